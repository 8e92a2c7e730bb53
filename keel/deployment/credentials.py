"""Credentials of a federation: a CA and the server's certificate; for a trial, clients' keys too.

    credentials/ca/          ca.key  ca.pem         stays where it was made
    credentials/server/      ca.pem  server.pem  server.key  executor.secret    for the server
    credentials/site-a/      of a client, see keys.py

Private files are for their owner alone (0600). Existing files are never overwritten; `renew`
replaces the server's certificate, and no key.
"""

import datetime
import ipaddress
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from keel.deployment.keys import (
    check_client_names,
    make_key,
    new_secret,
    private_pem,
    write_missing,
)
from protocol.files import write_atomically

default_names = ("localhost", "127.0.0.1", "superlink")  # health check; the name under compose
backdated = datetime.timedelta(hours=1)  # for clocks that are behind
min_validity = datetime.timedelta(days=30)  # of a certificate, before it is warned about
new_ca = (
    "make a new authority and copy its ca.pem to all machines (docs/how-to/deployment.md, "
    "Certificates)"
)


def make_credentials(
    folder: Path, names: Sequence[str], clients: Sequence[str] = (), days: int = 825
) -> list[str]:
    """Make what is missing in `folder`: CA, server's certificate, keys of clients; the new files.

    names: of the server, in its certificate. days: validity of that certificate. ValueError, before
    anything is written, for a name that cannot be used, or that an existing certificate lacks.
    """
    ca, server = folder / "ca", folder / "server"
    check_client_names(clients)
    all_names = list(dict.fromkeys([*names, *default_names]))
    subjects = [general_name(name) for name in all_names]
    certificate = server / "server.pem"
    if certificate.exists():
        if missing := set(names) - set(certificate_names(certificate)):
            raise ValueError(
                f"{certificate} is not for {', '.join(sorted(missing))}: add them with --renew"
            )
    elif not names:
        raise ValueError(
            "no server names: pass the names or addresses that clients connect to, such as "
            "--name fl.example.org"
        )
    if not certificate.exists() and (ca / "ca.pem").exists() and not (ca / "ca.key").exists():
        raise ValueError(f"{ca / 'ca.key'} is missing: put it back beside its ca.pem")
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    before = set(folder.rglob("*"))
    if not certificate.exists():
        for key in (ca / "ca.key", server / "server.key"):
            write_missing(key, lambda: private_pem(PrivateFormat.PKCS8), is_private=True)
        write_missing(ca / "ca.pem", lambda: ca_certificate(ca / "ca.key", 2 * days))
        write_missing(server / "ca.pem", (ca / "ca.pem").read_bytes)
        write_missing(certificate, lambda: server_certificate(ca, server, subjects, days))
    write_missing(server / "executor.secret", new_secret, is_private=True)
    for name in clients:
        make_key(folder / name, name)
        write_missing(folder / name / "ca.pem", (server / "ca.pem").read_bytes)
    made = sorted(path for path in folder.rglob("*") if path not in before and path.is_file())
    return [f"made  {path}" for path in made] or [f"nothing is missing in {folder}"]


def renew(folder: Path, names: Sequence[str] = (), days: int = 825) -> list[str]:
    """Replace the server's certificate by one valid for `days`, or as long as the CA is.

    The CA and all keys stay, so no client changes anything. names: for the certificate, beside
    those that it has. Returns lines that say what to do. ValueError if the CA has expired or did
    not sign the old certificate: all clients would refuse the new one.
    """
    ca, path = folder / "ca", folder / "server" / "server.pem"
    authority = load_certificate(ca / "ca.pem")
    try:
        load_certificate(path).verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):  # of another subject or kind of key
        raise ValueError(f"{ca / 'ca.pem'} is not the CA of {path}: put that `ca` back") from None
    last = authority.not_valid_after_utc
    left = (last - datetime.datetime.now(datetime.UTC)).days
    if left < 1:
        raise ValueError(f"{ca / 'ca.pem'} expired on {last:%Y-%m-%d}: {new_ca}")
    all_names = list(dict.fromkeys([*certificate_names(path), *names]))
    subjects = [general_name(name) for name in all_names]
    write_atomically(path, server_certificate(ca, path.parent, subjects, min(days, left)))
    until = load_certificate(path).not_valid_after_utc
    return [
        f"renewed  {path}  valid until {until:%Y-%m-%d}, for {', '.join(all_names)}",
        "copy it to the server, then restart the SuperLink there (`make deploy-server`)",
    ]


# --- certificates --------------------------------------------------------------------------------


def ca_certificate(key: Path, days: int) -> bytes:
    """A certificate of this CA key, signed by itself, which signs server certificates alone."""
    authority, name = load_key(key), common_name("Keel CA")
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    signed = (
        certificate_of(authority.public_key(), name, name, authority, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(authority, hashes.SHA384())
    )
    return signed.public_bytes(Encoding.PEM)


def server_certificate(
    ca: Path, server: Path, names: Sequence[x509.GeneralName], days: int
) -> bytes:
    """A certificate of the server's key for these names, signed by the CA, as PEM."""
    key, authority = load_key(server / "server.key"), load_key(ca / "ca.key")
    issuer = load_certificate(ca / "ca.pem").subject
    signed = (
        # the subject is shown, and not verified
        certificate_of(key.public_key(), common_name("Keel server"), issuer, authority, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority, hashes.SHA384())
    )
    return signed.public_bytes(Encoding.PEM)


def certificate_of(
    public_key: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    """A certificate, valid from an hour ago until `days` from now, before its extensions."""
    now = datetime.datetime.now(datetime.UTC)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - backdated)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(authority, critical=False)
    )


def certificate_problem(path: Path, now: datetime.datetime) -> str:
    """What is wrong with a certificate's validity, or will be within 30 days; else empty."""
    found = load_certificate(path)
    first, last = found.not_valid_before_utc, found.not_valid_after_utc
    if now < first:
        return (
            f"{path} is valid from {first:%Y-%m-%d %H:%M}, this machine's clock says "
            f"{now:%Y-%m-%d %H:%M} UTC: set the clock"
        )
    if last - now >= min_validity:
        return ""
    when = f"expired on {last:%Y-%m-%d}" if now > last else f"expires soon, on {last:%Y-%m-%d}"
    is_ca = found.issuer == found.subject
    return f"{path} {when}: {new_ca if is_ca else '`keel deploy credentials --renew`'}"


def warn_of_certificates(paths: Iterable[Path | None]) -> None:
    """Print a line for each of these certificates that has expired or soon will."""
    for path in filter(None, paths):
        now = datetime.datetime.now(datetime.UTC)
        if path.is_file() and (problem := certificate_problem(path, now)):
            print(f"warning: {problem}", file=sys.stderr, flush=True)


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a PEM file; ValueError if it is damaged or of another kind."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        raise ValueError(f"{path} is damaged or not a key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path}: expected an ECDSA key, as `keel deploy credentials` makes")
    return key


def load_certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file; ValueError if it is damaged."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged or not a certificate: {error}") from error


def certificate_names(path: Path) -> list[str]:
    """The DNS names and IP addresses that a certificate is for."""
    extensions = load_certificate(path).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def certificate_fingerprint(path: Path) -> str:
    """The SHA-256 of a certificate, as `openssl x509 -fingerprint -sha256` prints it."""
    return load_certificate(path).fingerprint(hashes.SHA256()).hex(":").upper()


def common_name(name: str) -> x509.Name:
    """A subject or issuer with a common name only."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def general_name(name: str) -> x509.GeneralName:
    """An IP address if `name` is one, else a DNS name; ValueError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", name):
            raise ValueError(f"{name!r}: expected a DNS name or an IP address") from None
        return x509.DNSName(name)
