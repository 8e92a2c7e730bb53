"""`python -m deployment.credentials` is now `keel deploy credentials`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("deployment.credentials", "deploy", "credentials")
