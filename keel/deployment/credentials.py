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
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from keel.deployment.keys import check_client_names, make_key, new_secret, write_new
from protocol.files import write_atomically

default_names = ("localhost", "127.0.0.1", "superlink")  # health check; the name under compose
usages = ["key_encipherment", "data_encipherment", "key_agreement", "encipher_only"]
usages += ["digital_signature", "content_commitment", "decipher_only"]  # none is a CA's
backdated = datetime.timedelta(hours=1)  # for clocks that are behind
min_validity = datetime.timedelta(days=30)  # of a certificate, before it is warned about
new_ca = (
    "make a new authority and copy its ca.pem to all machines (docs/how-to/deployment.md, "
    "Certificates)"
)
certificate_options = ("--ssl-certfile", "--ssl-ca-certfile", "--root-certificates")  # of Flower


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
    for name in all_names:
        general_name(name)
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
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)  # `write_new` makes what is below it
    before = set(folder.rglob("*"))
    if not certificate.exists():
        make_server_credentials(ca, server, all_names, days)
    if not (secret := server / "executor.secret").exists():
        write_new(secret, new_secret(), private=True)
    for name in clients:
        make_key(folder / name, name)
        if not (copy := folder / name / "ca.pem").exists():
            write_new(copy, (server / "ca.pem").read_bytes(), private=False)
    made = sorted(path for path in folder.rglob("*") if path not in before and path.is_file())
    return [f"made  {path}" for path in made] or [f"nothing is missing in {folder}"]


def make_server_credentials(ca: Path, server: Path, names: Sequence[str], days: int) -> None:
    """Write the server's key and certificate, signed by a new CA unless there is one."""
    if not (ca / "ca.pem").exists():
        make_ca(ca, 2 * days)
    key = server / "server.key"
    if not key.exists():
        write_new(key, private_pem(ec.generate_private_key(ec.SECP384R1())), private=True)
    if not (server / "ca.pem").exists():
        write_new(server / "ca.pem", (ca / "ca.pem").read_bytes(), private=False)
    # last: with it, the server's credentials are complete
    signed = server_certificate(ca, load_key(key), names, days)
    write_new(server / "server.pem", signed, private=False)


def make_ca(folder: Path, days: int) -> None:
    """Write ca.key, unless it is there, and ca.pem, which signs server certificates alone."""
    if not (folder / "ca.key").exists():
        pem = private_pem(ec.generate_private_key(ec.SECP384R1()))
        write_new(folder / "ca.key", pem, private=True)
    key = load_key(folder / "ca.key")
    usage = x509.KeyUsage(**dict.fromkeys(usages, False), key_cert_sign=True, crl_sign=True)
    signed = (
        certificate_of("Keel CA", key.public_key(), common_name("Keel CA"), key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    write_new(folder / "ca.pem", signed.public_bytes(Encoding.PEM), private=False)


def server_certificate(
    ca: Path, key: ec.EllipticCurvePrivateKey, names: Sequence[str], days: int
) -> bytes:
    """A certificate of this key for these DNS names and IP addresses, signed by the CA, as PEM."""
    ca_key, issuer = load_key(ca / "ca.key"), load_certificate(ca / "ca.pem").subject
    alternatives = x509.SubjectAlternativeName([general_name(name) for name in names])
    signed = (
        certificate_of(names[0], key.public_key(), issuer, ca_key, days)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return signed.public_bytes(Encoding.PEM)


def certificate_of(
    subject: str,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    """A certificate, valid from an hour ago until `days` from now, before its extensions."""
    now = datetime.datetime.now(datetime.UTC)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(common_name(subject))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - backdated)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(authority, critical=False)
    )


def renew(folder: Path, names: Sequence[str] = (), days: int = 825) -> list[str]:
    """Replace the server's certificate by one valid for `days`, or as long as the CA is.

    The CA and all keys stay, so no client changes anything. names: for the certificate, beside
    those that it has. Returns lines that say what to do. ValueError if the CA is not there, has
    expired or did not sign the old certificate: all clients would refuse the new one.
    """
    ca, path = folder / "ca", folder / "server" / "server.pem"
    for needed in (ca / "ca.key", ca / "ca.pem", path, path.with_suffix(".key")):
        if not needed.exists():
            raise ValueError(
                f"{needed} is missing: renew where `keel deploy credentials` ran, with its `ca`"
            )
    authority, key = load_certificate(ca / "ca.pem"), load_key(path.with_suffix(".key"))
    try:
        load_certificate(path).verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):  # of a CA with another name, or key type
        raise ValueError(f"{ca / 'ca.pem'} is not the CA of {path}: put that `ca` back") from None
    last = authority.not_valid_after_utc
    left = (last - datetime.datetime.now(datetime.UTC)).days
    if left < 1:
        raise ValueError(f"{ca / 'ca.pem'} expired on {last:%Y-%m-%d}: {new_ca}")
    all_names = list(dict.fromkeys([*certificate_names(path), *names]))
    write_atomically(path, server_certificate(ca, key, all_names, min(days, left)))
    until = load_certificate(path).not_valid_after_utc
    return [
        f"renewed  {path}  valid until {until:%Y-%m-%d}, for {', '.join(all_names)}",
        "copy it to the server, then restart the SuperLink there (`make deploy-server`)",
    ]


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


def warn_of_certificates(words: Iterable[str]) -> None:
    """Print a line for each certificate in a Flower command that has expired or soon will."""
    split = [part for word in words for part in word.split("=", 1)]
    for option, value in pairwise(split):
        if option in certificate_options and Path(value).is_file():
            try:
                problem = certificate_problem(Path(value), datetime.datetime.now(datetime.UTC))
            except ValueError:  # Flower names the file
                continue
            if problem:
                print(f"warning: {problem}", file=sys.stderr, flush=True)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as PEM (PKCS 8), unencrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


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
    """A subject with a common name only, cut to the 64 characters that X.509 allows.

    It is shown, and not verified: a server's names are its alternative names.
    """
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def general_name(name: str) -> x509.GeneralName:
    """An IP address if `name` is one, else a DNS name; ValueError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", name):
            raise ValueError(f"{name!r}: expected a DNS name or an IP address") from None
        return x509.DNSName(name)
