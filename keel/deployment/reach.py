"""Exit status 0 if something answers there: the health check of the containers.

python -m keel.deployment.reach HOST:PORT CA.pem      a TLS server with a certificate of this CA
python -m keel.deployment.reach /run/worker.sock      a worker's socket
"""

import socket
import ssl
import sys
from pathlib import Path

limit_s = 5.0


def split_address(address: str) -> tuple[str, int]:
    """(host, port); ValueError if it is not HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r}: an address is HOST:PORT")
    return host.strip("[]"), int(port)


def handshake(address: str, ca: Path) -> dict[str, object]:
    """The certificate of the TLS server there, once it is one of this CA for this name.

    OSError (of which ssl.SSLError is one) if not.
    """
    host, port = split_address(address)
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection((host, port), timeout=limit_s) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return dict(secure.getpeercert() or {})


def main() -> int:
    """The command line."""
    try:
        match sys.argv[1:]:
            case [path]:
                # here: it imports Flower, which the other check can do without
                from client_app.worker_client import worker_says

                worker_says(path, limit_s)
            case [address, ca]:
                handshake(address, Path(ca))
            case _:
                print(__doc__)
                return 2
    except (OSError, ValueError) as error:
        print(f"{sys.argv[1]}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
