"""`python -m diagnostics` is now `keel diagnose`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("diagnostics", "diagnose")
