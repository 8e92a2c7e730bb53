"""`python -m server_app.method_table` is now `keel methods --markdown`."""

from importlib import import_module  # nothing here may import keel

if __name__ == "__main__":
    import_module("keel.legacy").forward("server_app.method_table", "methods", "--markdown")
