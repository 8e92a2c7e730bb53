"""`python -m deployment.loopback` is now `keel deploy loopback`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("deployment.loopback", "deploy", "loopback")
