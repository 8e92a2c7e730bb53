"""`python -m deployment.register` is now `keel deploy register`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("deployment.register", "deploy", "register")
