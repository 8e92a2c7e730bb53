"""`python -m diagnostics` is now `keel diagnose`."""

from keel.legacy import forward

if __name__ == "__main__":
    forward("diagnostics", "diagnose")
