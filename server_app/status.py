"""`python -m server_app.status` is now `keel status`."""

from importlib import import_module  # nothing here may import keel

if __name__ == "__main__":
    import_module("keel.legacy").forward("server_app.status", "status")
