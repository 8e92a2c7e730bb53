"""Credentials of a federation: a CA, the server's certificate, a key pair a client.

    make credentials NAMES="fl.example.org 10.0.0.1" CLIENTS="site-a site-b"

    credentials/ca/          ca.key  ca.pem         stays where it was made
    credentials/server/      ca.pem  server.pem  server.key  executor.secret    for the server
                             clients/site-a.pub  clients/site-b.pub             to register
    credentials/site-a/      ca.pem  client.key  client.pub  executor.secret    for that client

Private files are for their owner alone (0600). Nothing is ever overwritten: what is there is kept,
so that clients can be added later. Refused are a server certificate for other names, a client
whose public key on the server is another one, and a private file whose public half is missing.
"""

import argparse
import datetime
import functools
import ipaddress
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

always_named = ("localhost", "127.0.0.1", "superlink")  # health check; the name under compose
reserved = ("ca", "server")
plain_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
backdated = datetime.timedelta(hours=1)  # clocks differ


def write_new(path: Path, content: bytes, *, private: bool) -> None:
    """Write a file that is not there yet; FileExistsError if it is."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    mode = 0o600 if private else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as PEM (PKCS 8), not encrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def common_name(name: str) -> x509.Name:
    """A subject that is only a common name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def certificate(
    subject: str,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    """A certificate valid from an hour ago for so many days, extensions not yet added."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(common_name(subject))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - backdated)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )


def make_ca(folder: Path, days: int) -> None:
    """ca.key and ca.pem: signs server certificates, and nothing else."""
    key = ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        certificate("Keel CA", key.public_key(), common_name("Keel CA"), key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    write_new(folder / "ca.key", private_pem(key), private=True)
    write_new(folder / "ca.pem", made.public_bytes(Encoding.PEM), private=False)


def make_server_certificate(ca: Path, folder: Path, names: Sequence[str], days: int) -> None:
    """server.key and server.pem, for these DNS names and IP addresses, signed by the CA."""
    ca_key = load_pem_private_key((ca / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate((ca / "ca.pem").read_bytes()).subject
    key = ec.generate_private_key(ec.SECP384R1())
    made = (
        certificate(names[0], key.public_key(), issuer, ca_key, days)
        .add_extension(
            x509.SubjectAlternativeName([general_name(n) for n in names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    write_new(folder / "server.key", private_pem(key), private=True)
    write_new(folder / "server.pem", made.public_bytes(Encoding.PEM), private=False)


def general_name(name: str) -> x509.GeneralName:
    """An IP address where `name` is one, else a DNS name; ValueError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", name):
            raise ValueError(f"{name!r} is neither a DNS name nor an IP address") from None
        return x509.DNSName(name)


def certificate_names(path: Path) -> list[str]:
    """The DNS names and IP addresses that a certificate is for."""
    found = x509.load_pem_x509_certificate(path.read_bytes()).extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def make_client_keys(folder: Path, name: str) -> None:
    """client.key and client.pub: an ECDSA P-384 pair in OpenSSH's format, which Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_new(folder / "client.key", private, private=True)
    write_new(folder / "client.pub", public + f" {name}\n".encode(), private=False)


def refuse_half(private: Path, public: Path) -> None:
    """ValueError where there is a private file without its public half, which is written last."""
    if private.exists() and not public.exists():
        raise ValueError(
            f"{private} is there without {public.name}: an earlier call was ended half way, or "
            f"{public.name} was moved. Put it back, or move {private.name} away to have both made"
        )


def make_credentials(
    folder: Path, names: Sequence[str], clients: Sequence[str], days: int = 825
) -> list[str]:
    """Make what is missing in `folder`; the lines that say what was made and what was kept.

    ValueError, before anything is made, for what the module's docstring says is refused.
    """
    for name in clients:
        if name in reserved or not plain_name.fullmatch(name):
            raise ValueError(
                f"{name!r} is no client's name: letters, digits, '.', '_' and '-', at most 63; "
                "not 'ca' or 'server'"
            )
    wanted = list(dict.fromkeys([*names, *always_named]))
    for name in wanted:
        general_name(name)
    lines: list[str] = []

    def make(target: Path, maker: "functools.partial[None]") -> None:
        if target.exists():
            lines.append(f"kept  {target}")
            return
        maker()
        lines.append(f"made  {target}")

    ca, server = folder / "ca", folder / "server"
    refuse_half(ca / "ca.key", ca / "ca.pem")
    refuse_half(server / "server.key", server / "server.pem")
    for name in clients:
        own, known = folder / name / "client.pub", server / "clients" / f"{name}.pub"
        refuse_half(folder / name / "client.key", own)
        if known.exists() and not (own.exists() and own.read_bytes() == known.read_bytes()):
            raise ValueError(
                f"{known} is the public key of {name}, {own} is "
                f"{'another one' if own.exists() else 'not there'}: put that client's folder back, "
                f"or, for a new key, move {known} away and unregister the old one"
            )
    make(ca / "ca.pem", functools.partial(make_ca, ca, 2 * days))
    if (server / "server.pem").exists():
        missing = set(names) - set(certificate_names(server / "server.pem"))
        if missing:
            raise ValueError(
                f"{server / 'server.pem'} is not for {', '.join(sorted(missing))}: move it and "
                "server.key away to have another one made"
            )
    elif not names:
        raise ValueError("the server's certificate needs the names or addresses clients call it by")
    make(
        server / "server.pem",
        functools.partial(make_server_certificate, ca, server, wanted, days),
    )
    machines = [server, *(folder / name for name in clients)]
    for name in clients:
        keys = functools.partial(make_client_keys, folder / name, name)
        make(folder / name / "client.pub", keys)
    for name in clients:
        public = server / "clients" / f"{name}.pub"
        if not public.exists():
            write_new(public, (folder / name / "client.pub").read_bytes(), private=False)
    for machine in machines:
        if not (machine / "ca.pem").exists():
            write_new(machine / "ca.pem", (ca / "ca.pem").read_bytes(), private=False)
        if not (machine / "executor.secret").exists():
            secret = secrets.token_hex(32).encode()  # exact bytes: no newline at its end
            write_new(machine / "executor.secret", secret, private=True)
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m keel.deployment.credentials", description=__doc__
    )
    parser.add_argument("--folder", type=Path, default=Path("credentials"))
    parser.add_argument("--names", nargs="*", default=[], help="DNS names, IP addresses")
    parser.add_argument("--clients", nargs="*", default=[], help="names of the clients")
    parser.add_argument("--days", type=int, default=825, help="validity of the certificate")
    arguments = parser.parse_args()
    try:
        lines = make_credentials(
            arguments.folder, arguments.names, arguments.clients, arguments.days
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
