"""Shared by the tests of deployments."""

import contextlib
import socket
import ssl
import threading

import pytest

from keel.deployment.credentials import make_credentials


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Credentials of a server and two clients, not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    make_credentials(folder, ["fl.example.org", "10.1.2.3"], ["site-a", "site-b"])
    return folder


@pytest.fixture
def tls_server():
    """Starts a TLS server with the certificate in a folder; its port."""
    with contextlib.ExitStack() as stack:

        def start(folder, host="127.0.0.1"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.pem", folder / "server.key")
            listener = socket.create_server((host, 0))

            def serve():
                with contextlib.suppress(OSError):  # it is closed
                    while True:
                        plain, _ = listener.accept()
                        with plain, contextlib.suppress(OSError):
                            context.wrap_socket(plain, server_side=True).close()

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.close)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return listener.getsockname()[1]

        yield start
