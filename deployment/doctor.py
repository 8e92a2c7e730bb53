"""`python -m deployment.doctor` is now `keel doctor`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("deployment.doctor", "doctor")
