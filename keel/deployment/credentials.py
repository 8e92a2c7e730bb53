"""Credentials of a federation: a CA, the server's certificate, one key pair for each client.

    credentials/ca/          ca.key  ca.pem         stays where it was made
    credentials/server/      ca.pem  server.pem  server.key  executor.secret    for the server
                             clients/site-a.pub  clients/site-b.pub             to register
    credentials/site-a/      ca.pem  client.key  client.pub  executor.secret    for that client

Private files are readable by their owner only (0600). Existing files are never overwritten, so
clients can be added later; `renew` replaces the server's certificate, and no key. Refused are a
server certificate for other names or of another CA than the one in `ca`, a client whose public key
differs from the server's copy, and a private file without its public half.
"""

import datetime
import errno
import functools
import ipaddress
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
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

from protocol.files import STATE_FILE, part_of, remove_parts, write_atomically

default_names = ("localhost", "127.0.0.1", "superlink")  # health check; the name under compose
reserved_names = ("ca", "server", "local")  # the last: of `make deploy-local`
client_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
key_usages = (  # every argument of x509.KeyUsage
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
backdated = datetime.timedelta(hours=1)  # for clocks that are behind
min_validity = datetime.timedelta(days=30)  # of a certificate, before it is warned about
without_links = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system such as FAT
new_ca = (
    "make a new authority and copy its ca.pem to all machines (docs/how-to/deployment.md, step 1)"
)
certificate_options = ("--ssl-certfile", "--ssl-ca-certfile", "--root-certificates")  # of Flower


def write_new(path: Path, content: bytes, *, private: bool) -> None:
    """Write a new file, whole or not at all; FileExistsError if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    remove_parts(path.parent)
    mode = 0o600 if private else 0o644
    # under another name: the next call would accept what a kill leaves of the file
    part = part_of(path)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)  # unlike a rename, replaces no file
        except OSError as error:
            if error.errno not in without_links:
                raise
            if os.path.lexists(path):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            part.rename(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as PEM (PKCS 8), unencrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def common_name(name: str) -> x509.Name:
    """A subject with a common name only, cut to the 64 characters that X.509 allows.

    It is shown, and not verified: a server's names are its alternative names.
    """
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def certificate(
    subject: str,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    """A certificate, valid from an hour ago until `days` from now, before its extensions."""
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
    """Write ca.key and ca.pem, which sign server certificates and nothing else."""
    key = ec.generate_private_key(ec.SECP384R1())
    signs = {"key_cert_sign", "crl_sign"}
    usage = x509.KeyUsage(**{name: name in signs for name in key_usages})
    signed = (
        certificate("Keel CA", key.public_key(), common_name("Keel CA"), key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    write_new(folder / "ca.key", private_pem(key), private=True)
    write_new(folder / "ca.pem", signed.public_bytes(Encoding.PEM), private=False)


def server_certificate(
    ca: Path, key: ec.EllipticCurvePrivateKey, names: Sequence[str], days: int
) -> bytes:
    """A certificate of this key for these DNS names and IP addresses, signed by the CA, as PEM."""
    ca_key = load_key(ca / "ca.key")
    issuer = load_certificate(ca / "ca.pem").subject
    signed = (
        certificate(names[0], key.public_key(), issuer, ca_key, days)
        .add_extension(
            x509.SubjectAlternativeName([general_name(n) for n in names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return signed.public_bytes(Encoding.PEM)


def load_certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file; ValueError if it is damaged."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged or not a certificate: {error}") from error


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a PEM file; ValueError if it is damaged or of another kind."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        raise ValueError(f"{path} is damaged or not a key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path}: expected an ECDSA key, as `keel deploy credentials` makes")
    return key


def make_server_certificate(ca: Path, folder: Path, names: Sequence[str], days: int) -> None:
    """Write server.key and server.pem, for these DNS names and IP addresses, signed by the CA."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_new(folder / "server.key", private_pem(key), private=True)
    write_new(folder / "server.pem", server_certificate(ca, key, names, days), private=False)


def renew(folder: Path, names: Sequence[str] = (), days: int = 825) -> list[str]:
    """Replace the server's certificate in `folder` by one valid for `days`, or as long as the
    CA is; lines that say so.

    The CA, the server's key and the clients' keys stay, so no client changes anything. names: for
    the certificate, beside those that it has. ValueError if the CA is not there or has expired.
    """
    ca, path = folder / "ca", folder / "server" / "server.pem"
    for needed in (ca / "ca.key", ca / "ca.pem", path, path.with_suffix(".key")):
        if not needed.exists():
            raise ValueError(
                f"{needed} is missing: renew where `keel deploy credentials` ran, with its `ca`"
            )
    last = load_certificate(ca / "ca.pem").not_valid_after_utc
    left = (last - datetime.datetime.now(datetime.UTC)).days
    if left < 1:
        raise ValueError(f"{ca / 'ca.pem'} expired on {last:%Y-%m-%d}: {new_ca}")
    check_issuer(path, ca / "ca.pem")
    all_names = list(dict.fromkeys([*certificate_names(path), *names]))
    content = server_certificate(ca, load_key(path.with_suffix(".key")), all_names, min(days, left))
    write_atomically(path, content)
    until = x509.load_pem_x509_certificate(content).not_valid_after_utc
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
    way_out = new_ca if is_ca else "`keel deploy credentials --renew`"
    return f"{path} {when}: {way_out}"


def warn_of_certificates(words: Sequence[str]) -> None:
    """Print a line for each certificate in a Flower command that has expired or soon will."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in certificate_options and (equals or index + 1 < len(words)):
            try:
                problem = certificate_problem(
                    Path(value if equals else words[index + 1]), datetime.datetime.now(datetime.UTC)
                )
            except (OSError, ValueError):  # Flower names the file
                continue
            if problem:
                print(f"warning: {problem}", file=sys.stderr, flush=True)


def general_name(name: str) -> x509.GeneralName:
    """An IP address if `name` is one, else a DNS name; ValueError if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", name):
            raise ValueError(f"{name!r}: expected a DNS name or an IP address") from None
        return x509.DNSName(name)


def certificate_names(path: Path) -> list[str]:
    """The DNS names and IP addresses that a certificate is for."""
    extensions = load_certificate(path).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def check_issuer(server: Path, ca: Path) -> None:
    """ValueError unless this CA signed the server's certificate.

    Clients with another CA's ca.pem would refuse the server; after a renewal, all others would.
    """
    problem = "missing"
    if ca.exists():
        signed, authority = load_certificate(server), load_certificate(ca)
        try:
            signed.verify_directly_issued_by(authority)
            return
        except (InvalidSignature, ValueError, TypeError):  # of a CA with another name, or key type
            problem = f"not the CA of {server}"
    raise ValueError(
        f"{ca} is {problem}: put the `ca` that signed {server.name} back (to add clients, its "
        f"ca.pem is enough, which {server.parent} has too), or make new credentials in another "
        "directory"
    )


def make_client_keys(folder: Path, name: str) -> None:
    """Write client.key and client.pub: an ECDSA P-384 pair in OpenSSH's format, as Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_new(folder / "client.key", private, private=True)
    write_new(folder / "client.pub", public + f" {name}\n".encode(), private=False)


def refuse_half(private: Path, public: Path) -> None:
    """ValueError if a private file is there without its public half, which is written last."""
    if private.exists() and not public.exists():
        raise ValueError(
            f"{private} exists without {public.name}: an earlier call was interrupted, or "
            f"{public.name} was moved. Put it back, or move {private.name} away to make both"
        )


def compose_name(client: str) -> str:
    """The end of the name of a client's containers and volume, as the Makefile makes it."""
    return client.lower().replace(".", "-")


def refuse_same_containers(clients: Sequence[str], known: Sequence[str]) -> None:
    """ValueError if a client that is not known would have another's containers and volume.

    On one machine, deploying one would replace the other. known: clients that have keys.
    """
    names = [*reserved_names, *known]
    for client in dict.fromkeys(clients):
        if client in known:
            continue
        for other in names:
            if compose_name(client) == compose_name(other):
                raise ValueError(
                    f"client {client!r}: its containers would be named like those of {other!r} "
                    "(in lower case, with dashes for dots), so that one would replace the other "
                    "on a machine with both: choose another name"
                )
        names.append(client)


def make_credentials(
    folder: Path, names: Sequence[str], clients: Sequence[str], days: int = 825
) -> list[str]:
    """Make what is missing in `folder`; a line for each file, whether it was made or existed.

    names: of the server, in its certificate. days: validity of that certificate. ValueError, before
    anything is written, for what the module's docstring says is refused.
    """
    registered_clients = [path.stem for path in (folder / "server" / "clients").glob("*.pub")]
    for name in clients:
        is_reserved = name in reserved_names or bool(re.fullmatch(STATE_FILE, name))
        is_known = name in registered_clients  # by an earlier version of Keel
        if (is_reserved and not is_known) or not client_name.fullmatch(name):
            raise ValueError(
                f"client {name!r}: expected at most 63 letters, digits, '.', '_' and '-', not "
                "'ca', 'server' or 'local', and not the name of a file of client state, such as "
                "'reset-state'"
            )
    refuse_same_containers(clients, sorted(registered_clients))
    all_names = list(dict.fromkeys([*names, *default_names]))
    for name in all_names:
        general_name(name)
    ca, server = folder / "ca", folder / "server"
    refuse_half(ca / "ca.key", ca / "ca.pem")
    refuse_half(server / "server.key", server / "server.pem")
    for name in clients:
        own, registered = folder / name / "client.pub", server / "clients" / f"{name}.pub"
        refuse_half(folder / name / "client.key", own)
        if registered.exists() and not (
            own.exists() and own.read_bytes() == registered.read_bytes()
        ):
            raise ValueError(
                f"{registered} is the public key of {name}, but {own} is "
                f"{'a different one' if own.exists() else 'missing'}: put that client's directory "
                f"back or, for a new key, move {registered} away and unregister the old one"
            )
    if (server / "server.pem").exists():
        check_issuer(server / "server.pem", ca / "ca.pem")
        missing = set(names) - set(certificate_names(server / "server.pem"))
        if missing:
            raise ValueError(
                f"{server / 'server.pem'} is not for {', '.join(sorted(missing))}: add them "
                "with --renew"
            )
    elif not names:
        raise ValueError(
            "no server names: pass the names or addresses that clients connect to, such as "
            "--name fl.example.org"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)  # `write_new` makes what is below it
    lines: list[str] = []

    def make(path: Path, write: Callable[[], None]) -> None:
        lines.append(f"{'exists' if path.exists() else 'made'}  {path}")
        if not path.exists():
            write()

    make(ca / "ca.pem", lambda: make_ca(ca, 2 * days))
    make(server / "server.pem", lambda: make_server_certificate(ca, server, all_names, days))
    for name in clients:
        make(folder / name / "client.pub", functools.partial(make_client_keys, folder / name, name))
    for name in clients:
        public = server / "clients" / f"{name}.pub"
        if not public.exists():
            write_new(public, (folder / name / "client.pub").read_bytes(), private=False)
    for machine in [server, *(folder / name for name in clients)]:
        if not (machine / "ca.pem").exists():
            write_new(machine / "ca.pem", (ca / "ca.pem").read_bytes(), private=False)
        if not (machine / "executor.secret").exists():
            secret = secrets.token_hex(32).encode()  # exact bytes: no newline at its end
            write_new(machine / "executor.secret", secret, private=True)
    return lines
