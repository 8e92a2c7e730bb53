"""`python -m experiments` is now `keel experiments`."""

from keel.legacy import forward

if __name__ == "__main__":
    forward("experiments", "experiments")
