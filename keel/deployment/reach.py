"""Exit status 0 if something answers there: the health check of the containers.

python -m keel.deployment.reach HOST:PORT CA.pem      a TLS server with a certificate of this CA
python -m keel.deployment.reach SOCKET                a resident worker
"""

import re
import socket
import ssl
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

timeout_s = 5.0


def split_address(address: str) -> tuple[str, int]:
    """(host, port); ValueError if it is not HOST:PORT, an IPv6 address in brackets."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not (host and port):
        raise ValueError(f"address {address!r}: expected HOST:PORT, an IPv6 address in brackets")
    return host, port


def handshake(address: str, ca: Path) -> dict[str, object]:
    """The certificate of the TLS server there, verified for this CA and this name.

    OSError (ssl.SSLError is one) if there is none or it is not valid.
    """
    host, port = split_address(address)
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection((host, port), timeout=timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return dict(secure.getpeercert() or {})


def proxy_for(address: str) -> str:
    """The proxy that the environment names for a connection to HOST:PORT, without its password.

    Empty if it names none. Flower's programs connect through it; `handshake` connects directly.
    """
    host, _ = split_address(address)
    if proxy_bypass(host):
        return ""
    proxies = getproxies_environment()
    found = next(
        (proxies[kind] for kind in ("grpc", "https", "http", "all") if kind in proxies), ""
    )
    return re.sub(r"//[^@/]*@", "//", found)


def proxy_hint(address: str) -> str:
    """What to add to an error about HOST:PORT if the environment names a proxy for it."""
    if not (proxy := proxy_for(address)):
        return ""
    return (
        f"; this environment's proxy {proxy} may stand in the way: to connect without it, add "
        f"{split_address(address)[0]} to no_proxy and NO_PROXY"
    )


def wait_for_server(address: str, ca: Path, timeout_s: float) -> None:
    """Return once the server answers over TLS; the OSError of the last try after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            handshake(address, ca)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main() -> int:
    """The command line."""
    try:
        match sys.argv[1:]:
            case [path]:
                from client_app.worker_client import worker_status  # imports Flower

                worker_status(path, timeout_s)
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
