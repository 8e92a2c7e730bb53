"""The key of a client, which its site makes, and the request by which the server learns of it.

    credentials/site-a/  client.key  executor.secret    made at the site, and never sent
                         site-a.pub                     the request: only public parts
                         ca.pem                         from the server

Private files are for their owner alone (0600). Existing files are never overwritten.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from protocol.files import STATE_FILE, private_files, write_atomically

client_name = re.compile(rf"(?!(?:ca|server|{STATE_FILE})\Z)[A-Za-z0-9][A-Za-z0-9._-]{{0,62}}")
expected_request = "expected the NAME.pub of `keel deploy key`"


def make_key(folder: Path, name: str) -> list[str]:
    """Make a client's key and its request in `folder`, unless they are there; lines that name them.

    The request is NAME.pub: the public half in OpenSSH's format, with the name behind it.
    """
    check_client_names([name])
    key, request = folder / "client.key", folder / f"{name}.pub"
    write_missing(key, lambda: private_pem(PrivateFormat.OpenSSH), is_private=True)
    write_missing(folder / "executor.secret", new_secret, is_private=True)
    public = public_half(load_client_key(key))
    write_missing(request, lambda: f"{public} {name}\n".encode())
    return [f"key      {key}  stays here", f"request  {request}  {fingerprint(public)}"]


def read_requests(text: str, where: str) -> list[tuple[str, str]]:
    """(client name, public key in OpenSSH's format) of the requests in `text`, one a line.

    where: the file, for errors. ValueError for what is no request, or holds a private key.
    """
    if "PRIVATE KEY" in text:
        raise ValueError(
            f"{where} holds a private key, which must not leave its site: make a new one there "
            "with `keel deploy key`, and send only NAME.pub"
        )
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            kind, content, name = line.split()
            key = load_ssh_public_key(f"{kind} {content}".encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError(f"{where}: {expected_request}: ecdsa-..., the key and the name")
        found.append((name, f"{kind} {content}"))
    if not found:
        raise ValueError(f"{where}: {expected_request}, found nothing")
    return found


def check_client_names(names: Iterable[str]) -> None:
    """ValueError unless these may be clients' names, which name containers and folders of state."""
    containers: dict[str, str] = {}
    for name in names:
        if not client_name.fullmatch(name):
            raise ValueError(
                f"client {name!r}: expected at most 63 letters, digits, '.', '_' and '-', not 'ca' "
                "or 'server', and not the name of a file of client state, such as 'reset-state'"
            )
        other = containers.setdefault(name.lower().replace(".", "-"), name)
        if other != name:
            raise ValueError(
                f"client {name!r}: its containers would be named like those of {other!r} (in lower "
                "case, with dashes for dots): choose another name"
            )


def load_client_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a client.key; ValueError if it is damaged, locked, or of another kind."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} is not an OpenSSH private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is not an ECDSA key: `keel deploy key` makes one")
    return key


def public_half(key: ec.EllipticCurvePrivateKey) -> str:
    """Its public key in OpenSSH's format, without a comment."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def fingerprint(public: str) -> str:
    """The fingerprint of a public key in OpenSSH's format, as `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def private_pem(form: PrivateFormat) -> bytes:
    """A new private key on the curve that Flower requires, as PEM, unencrypted."""
    key = ec.generate_private_key(ec.SECP384R1())
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def new_secret() -> bytes:
    """A secret for a machine's executor and its SuperLink or SuperNode; no newline ends it."""
    return secrets.token_hex(32).encode()


def write_missing(path: Path, content: Callable[[], bytes], *, is_private: bool = False) -> None:
    """Write a file unless it is there, whole or not at all. is_private: for its owner alone."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with private_files():
        write_atomically(path, content())
    if not is_private:
        path.chmod(0o644)
