"""`python -m server_app.method_table` is now `keel methods --markdown`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("server_app.method_table", "methods", "--markdown")
