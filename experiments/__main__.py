"""`python -m experiments` is now `keel experiments`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("experiments", "experiments")
