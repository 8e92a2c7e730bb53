"""`python -m deployment.loopback` is now `keel deploy loopback`."""

from keel.legacy import forward

if __name__ == "__main__":
    forward("deployment.loopback", "deploy", "loopback")
