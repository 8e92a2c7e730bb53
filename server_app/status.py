"""`python -m server_app.status` is now `keel status`."""

from protocol.legacy import forward

if __name__ == "__main__":
    forward("server_app.status", "status")
