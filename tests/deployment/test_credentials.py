"""Credentials: what OpenSSL and Flower take them for, and that nothing is ever overwritten."""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cryptography import x509
from deployment_fixtures import documented_commands
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from typer.testing import CliRunner

import keel.deployment.credentials
from keel.cli.deploy import app
from keel.deployment.credentials import (
    certificate_names,
    certificate_problem,
    check_issuer,
    make_credentials,
    new_ca,
    renew,
    write_new,
)
from keel.deployment.reach import handshake, split_address
from keel.deployment.register import register
from keel.deployment.superlink import app_folder, free_ports
from keel.deployment.supernode import report_superlink


def certificate_end(path):
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_each_machine_gets_what_it_needs_and_no_other_s_private_key(made):
    assert digests(made / "server").keys() == {
        *("ca.pem", "server.pem", "server.key", "executor.secret"),
        *("clients/site-a.pub", "clients/site-b.pub"),
    }
    for name in ("site-a", "site-b"):
        expected = {"ca.pem", "client.key", "client.pub", "executor.secret"}
        assert digests(made / name).keys() == expected
    secrets = [path.read_bytes() for path in made.rglob("executor.secret")]
    assert len(set(secrets)) == 3


def test_private_files_are_for_their_owner_alone(made):
    for path in made.rglob("*"):
        if path.suffix in (".key", ".secret"):
            assert path.stat().st_mode & 0o777 == 0o600, path


def test_nobody_else_can_replace_a_file_whatever_the_umask(tmp_path):
    before = os.umask(0o000)
    try:
        make_credentials(tmp_path / "credentials", ["localhost"], ["site-a"])
    finally:
        os.umask(before)
    for path in (tmp_path / "credentials", *(tmp_path / "credentials").rglob("*")):
        assert not path.stat().st_mode & 0o022, path


def test_openssl_verifies_the_server_for_the_names_given_and_for_no_other(made):
    def verify(*options):
        command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", *options]
        command += ["-CAfile", str(made / "ca/ca.pem"), str(made / "server/server.pem")]
        return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode

    assert verify() == 0
    assert verify("-verify_hostname", "fl.example.org") == 0
    assert verify("-verify_ip", "10.1.2.3") == 0
    assert verify("-verify_hostname", "evil.example.org") != 0
    assert verify("-verify_ip", "10.1.2.4") != 0
    assert verify("-purpose", "sslclient") != 0


def test_the_server_certificate_signs_nothing_and_its_authority_no_other(made):
    found = x509.load_pem_x509_certificate((made / "server/server.pem").read_bytes())
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    authority = x509.load_pem_x509_certificate((made / "ca/ca.pem").read_bytes())
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)  # it makes no other authority
    now = datetime.datetime.now(datetime.UTC)
    lasts, since = found.not_valid_after_utc - now, now - found.not_valid_before_utc
    assert datetime.timedelta(days=824) < lasts < datetime.timedelta(days=826)
    assert since > datetime.timedelta(minutes=50)  # a client's clock may be behind


def test_ssh_keygen_reads_the_client_keys_and_the_halves_belong_together(made):
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.cli.supernode.register import try_load_public_key

    private = load_ssh_private_key((made / "site-a/client.key").read_bytes(), None)
    assert private.curve.name == "secp384r1"
    registered = try_load_public_key(made / "server/clients/site-a.pub")
    assert public_key_to_bytes(private.public_key()) == registered


def test_a_client_is_added_later_and_nothing_else_changes(made):
    before = digests(made)
    lines = make_credentials(made, [], ["site-a", "site-c"])
    after = digests(made)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"site-c", "server"}
    assert f"exists  {made / 'site-a' / 'client.pub'}" in lines
    assert f"made  {made / 'site-c' / 'client.pub'}" in lines


@pytest.mark.parametrize(
    ("names", "clients", "said"),
    [
        ([], ["a"], "no server names: .* --name fl.example.org"),
        (["not a name"], ["a"], "expected a DNS name or an IP address"),
        (["ok.org"], ["../up"], "expected at most 63 letters"),
        (["ok.org"], ["ca"], "expected at most 63 letters"),
        (["ok.org"], ["site-a", "server"], "client 'server': expected at most 63 letters"),
        (["ok.org"], ["local"], "client 'local': .* not 'ca', 'server' or 'local'"),
        (["ok.org"], ["reset-state"], "'reset-state': .* not the name of a file of client state"),
        (["ok.org"], ["round-00001-0123456789abcdef"], "not the name of a file of client state"),
    ],
)
def test_mistakes_are_named_before_anything_is_made_for_them(tmp_path, names, clients, said):
    with pytest.raises(ValueError, match=said):
        make_credentials(tmp_path, names, clients)
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize(
    ("new", "other"),
    [
        *(("Site-A", "site-a"), ("site.a", "site-a"), ("site-b.1", "site-b-1")),
        *(("Server", "server"), ("Local", "local")),
    ],
)
def test_no_client_gets_the_containers_and_the_volume_of_another(new, other, tmp_path):
    """`make deploy-client` for one would have replaced the other's containers on its machine."""
    make_credentials(tmp_path, ["fl.example.org"], ["site-a"])
    with pytest.raises(ValueError, match=rf"^client '{new}': its containers .* '{other}'"):
        make_credentials(tmp_path, [], ["site-b-1", new])
    assert not (tmp_path / new / "client.key").exists()
    assert not (tmp_path / "site-b-1").exists()
    make_credentials(tmp_path, [], ["site-a", "site-b-1"])  # a client that has keys is no other


def test_a_server_s_name_may_be_longer_than_a_subject(tmp_path):
    """As a load balancer's in a cloud: its key was left without a certificate."""
    name = f"k8s-ingress-{'0123456789abcdef' * 2}.elb.eu-central-1.amazonaws.com"
    assert len(name) > 64
    make_credentials(tmp_path, [name], [])
    assert name in certificate_names(tmp_path / "server" / "server.pem")
    port, _ = tls_server(tmp_path / "server", 1)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca/ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        assert secure.getpeercert()


def test_other_names_for_a_server_that_has_a_certificate_are_refused(made):
    with pytest.raises(ValueError, match=r"server\.pem is not for new\.example\.org"):
        make_credentials(made, ["new.example.org"], [])
    assert "fl.example.org" in certificate_names(made / "server/server.pem")


def test_a_client_whose_folder_is_gone_gets_no_key_that_nobody_registers(tmp_path):
    make_credentials(tmp_path, ["a.org"], ["site-a"])
    known = tmp_path / "server/clients/site-a.pub"
    (tmp_path / "site-a").rename(tmp_path / "carried-away")
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=f"^{known} is the public key of site-a, .* is missing"):
        make_credentials(tmp_path, [], ["site-a", "site-b"])
    assert digests(tmp_path) == before
    known.rename(tmp_path / "old.pub")
    make_credentials(tmp_path, [], ["site-a"])
    (tmp_path / "old.pub").rename(known)
    with pytest.raises(ValueError, match="is a different one: put that client's directory back"):
        make_credentials(tmp_path, [], ["site-a"])


def test_no_client_gets_a_ca_that_did_not_sign_the_server_s_certificate(tmp_path):
    """`ca` was moved to a safe place: a new one was made for the new client, without a word."""
    make_credentials(tmp_path, ["a.org"], ["site-a"])
    (tmp_path / "ca").rename(tmp_path / "safe")
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=r"ca\.pem is missing: put the `ca` that signed server"):
        make_credentials(tmp_path, [], ["site-b"])
    assert digests(tmp_path) == before
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca/ca.pem").write_bytes((tmp_path / "server/ca.pem").read_bytes())
    make_credentials(tmp_path, [], ["site-b"])
    assert (tmp_path / "site-b/ca.pem").read_bytes() == (tmp_path / "site-a/ca.pem").read_bytes()


def test_another_ca_neither_serves_new_clients_nor_renews(tmp_path):
    """All clients would have refused the renewed certificate."""
    make_credentials(tmp_path, ["a.org"], [])
    make_credentials(tmp_path / "other", ["a.org"], [])
    (tmp_path / "ca").rename(tmp_path / "safe")
    (tmp_path / "other/ca").rename(tmp_path / "ca")
    before = digests(tmp_path)
    for make in (lambda: make_credentials(tmp_path, [], ["x"]), lambda: renew(tmp_path)):
        with pytest.raises(ValueError, match=r"ca\.pem is not the CA of .*: put the `ca`"):
            make()
    assert digests(tmp_path) == before


@pytest.mark.parametrize(
    ("private", "public"),
    [
        ("ca/ca.key", "ca.pem"),
        ("server/server.key", "server.pem"),
        ("site-a/client.key", "client.pub"),
    ],
)
def test_what_was_ended_half_way_says_what_to_move(tmp_path, monkeypatch, private, public):
    write_new = keel.deployment.credentials.write_new

    def killed(path, content, **options):
        if path.name == public:
            raise KeyboardInterrupt
        write_new(path, content, **options)

    monkeypatch.setattr(keel.deployment.credentials, "write_new", killed)
    with pytest.raises(KeyboardInterrupt):
        make_credentials(tmp_path, ["a.org"], ["site-a"])
    monkeypatch.undo()
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path / private} exists without {public}"):
        make_credentials(tmp_path, ["a.org"], ["site-a"])
    assert digests(tmp_path) == before
    (tmp_path / private).unlink()
    make_credentials(tmp_path, ["a.org"], ["site-a"])
    assert (tmp_path / private).with_name(public).exists()


def test_a_full_disk_leaves_no_part_of_a_file_that_the_next_call_takes_for_whole(made, tmp_path):
    limit, copy = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "ca.pem"
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=str(copy)):
            write_new(copy, (made / "ca" / "ca.pem").read_bytes(), private=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not copy.exists()


def test_a_kill_leaves_no_part_of_a_file_that_the_next_call_takes_for_whole(tmp_path):
    """An empty client.pub was passed on to the server, whose registration it then ended."""
    script = f"""
import os, pathlib, keel.deployment.credentials as credentials
os.fdopen = lambda descriptor, mode: os._exit(9)  # the file is there, and has no content yet
credentials.write_new(pathlib.Path({str(tmp_path / "client.pub")!r}), b"key", private=True)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert not (tmp_path / "client.pub").exists()
    write_new(tmp_path / "client.pub", b"key", private=True)
    assert [path.name for path in tmp_path.iterdir()] == ["client.pub"]  # the part is gone
    assert (tmp_path / "client.pub").read_bytes() == b"key"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_takes_credentials(tmp_path, monkeypatch, code):
    """Such as a USB stick's FAT, or a folder that a virtual machine shares with its host."""

    def refuse(source, target):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "client.pub"
    write_new(path, b"key", private=True)
    with pytest.raises(FileExistsError, match=str(path)):
        write_new(path, b"another", private=True)
    assert [each.name for each in tmp_path.iterdir()] == ["client.pub"]
    assert path.read_bytes() == b"key"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_private_files_and_the_caches_are_ignored_by_git():
    for name in ("credentials/site-a/client.key", "docker/wheels/x.whl"):
        ignored = subprocess.run(["git", "check-ignore", "-q", name], cwd=app_folder, check=False)
        if not (app_folder / ".git").exists():
            pytest.skip("not a git checkout")
        assert ignored.returncode == 0, name


def tls_server(folder, connections):
    """The port of a TLS server with the certificate in `folder` for at most so many callers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(30)

    def serve():
        with listener, contextlib.suppress(TimeoutError):
            for _ in range(connections):
                plain, _ = listener.accept()
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


def test_a_handshake_takes_our_ca_and_refuses_another(made, tmp_path):
    make_credentials(tmp_path, ["fl.example.org"], [])
    port, thread = tls_server(made / "server", 2)
    assert handshake(f"127.0.0.1:{port}", made / "ca/ca.pem")["subject"]
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(f"127.0.0.1:{port}", tmp_path / "ca/ca.pem")
    thread.join(30)


def test_the_umask_does_not_open_private_files(tmp_path):
    before = os.umask(0)
    try:
        make_credentials(tmp_path, ["a.org"], ["x"])
    finally:
        os.umask(before)
    assert (tmp_path / "x/client.key").stat().st_mode & 0o777 == 0o600


def test_registering_without_credentials_names_the_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ca\.pem is missing: expected the server's"):
        register(tmp_path, "localhost:1", 0.0)


def test_registering_where_nothing_listens_names_the_address(tmp_path):
    make_credentials(tmp_path, ["localhost"], ["x"])
    address = f"localhost:{free_ports(1)[0]}"
    with pytest.raises(RuntimeError, match=rf"--superlink {address}: no SuperLink .* refused"):
        register(tmp_path / "server", address, 0.0)


def test_registering_at_the_port_for_clients_names_it(tmp_path):
    """It ended with a traceback: that port has the same certificate, but is no HTTP server."""
    make_credentials(tmp_path, ["localhost"], ["x"])
    port, thread = tls_server(tmp_path / "server", 2)
    with pytest.raises(RuntimeError, match=rf"--superlink 127\.0\.0\.1:{port}: .*port for users"):
        register(tmp_path / "server", f"127.0.0.1:{port}", 0.0)
    thread.join(30)


def test_an_ipv6_address_without_brackets_is_refused():
    """The check of the port accepted it, but gRPC and HTTP need the brackets."""
    assert split_address("[::1]:9092") == ("::1", 9092)
    for address in ("::1:9092", "[::1:9092", "::1]:9092"):
        with pytest.raises(ValueError, match=r"IPv6 address in brackets: \["):
            split_address(address)


@pytest.mark.parametrize("name", ["ca/ca.key", "ca/ca.pem", "server/server.pem"])
def test_a_damaged_file_is_named_when_a_certificate_is_renewed(tmp_path, name):
    make_credentials(tmp_path, ["a.org"], [])
    (tmp_path / name).write_bytes(b"-----BEGIN")
    with pytest.raises(ValueError, match=rf"{name} is damaged or not a (key|certificate): "):
        renew(tmp_path)


def test_a_damaged_public_key_is_named(tmp_path, monkeypatch):
    make_credentials(tmp_path, ["localhost"], ["x"])
    monkeypatch.setattr("keel.deployment.register.wait_for_server", lambda *_: None)
    (tmp_path / "server/clients/x.pub").write_bytes(b"ecdsa-sha2-nistp384 AAAA")
    with pytest.raises(ValueError, match=r"x\.pub is damaged or not a public key: .*: copy"):
        register(tmp_path / "server", "localhost:1", 0.0)


def test_a_key_s_comment_in_another_encoding_is_no_obstacle(tmp_path, monkeypatch):
    """The key was registered, and `clients.json` not written."""
    make_credentials(tmp_path, ["localhost"], ["x"])
    monkeypatch.delenv("KEEL_CLIENT_REGISTRY", raising=False)
    monkeypatch.setattr("keel.deployment.register.wait_for_server", lambda *_: None)
    monkeypatch.setattr("keel.deployment.register.register_keys", lambda *_: {"x": (7, True)})
    public = tmp_path / "server/clients/x.pub"
    kind, key, _ = public.read_bytes().split()
    public.write_bytes(b"%b %b M\xfcller\n" % (kind, key))
    register(tmp_path / "server", "localhost:1", 0.0)
    clients = json.loads((tmp_path / "server/clients.json").read_text())
    assert clients == {"x": {"node": "7", "key": f"{kind.decode()} {key.decode()}"}}


@pytest.mark.parametrize("days", ["0", "2000000"])
def test_a_certificate_that_is_never_valid_is_refused(tmp_path, days):
    words = ["--folder", str(tmp_path), "--name", "a.org", "--days", days]
    assert CliRunner().invoke(app, ["credentials", *words]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_command_takes_names_repeated_or_with_commas(tmp_path):
    words = ["--folder", str(tmp_path), "--name", "a.org,10.0.0.1", "--client", "x"]
    result = CliRunner().invoke(app, ["credentials", *words, "--client", "y"])
    assert result.exit_code == 0
    assert f"made  {tmp_path / 'y' / 'client.pub'}" in result.stdout.splitlines()
    names = certificate_names(tmp_path / "server/server.pem")
    assert names[:2] == ["a.org", "10.0.0.1"]


def test_renewing_replaces_the_server_s_certificate_and_no_key(tmp_path):
    make_credentials(tmp_path, ["fl.example.org"], ["site-a"], days=20)
    before = digests(tmp_path)
    old = x509.load_pem_x509_certificate((tmp_path / "server/server.pem").read_bytes())
    words = ["credentials", "--folder", str(tmp_path), "--renew", "--days", "30"]
    result = CliRunner().invoke(app, [*words, "--name", "10.0.0.1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"renewed  {tmp_path}/server/server.pem  valid until 20")
    after = digests(tmp_path)
    assert {name for name in after if after[name] != before.get(name)} == {"server/server.pem"}
    new = x509.load_pem_x509_certificate((tmp_path / "server/server.pem").read_bytes())
    assert new.public_key() == old.public_key()
    assert new.serial_number != old.serial_number
    assert (new.not_valid_after_utc - old.not_valid_after_utc).days in (9, 10)
    names = certificate_names(tmp_path / "server/server.pem")
    assert {"fl.example.org", "localhost", "10.0.0.1"} <= set(names)
    port, thread = tls_server(tmp_path / "server", 1)  # with the old key, for a client's old ca.pem
    assert handshake(f"127.0.0.1:{port}", tmp_path / "site-a/ca.pem")["subject"]
    thread.join(30)


def test_a_certificate_that_cannot_be_renewed_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"ca\.key is missing: renew where"):
        renew(tmp_path)
    make_credentials(tmp_path, ["a.org"], [], days=20)
    last = certificate_end(tmp_path / "ca/ca.pem")
    assert renew(tmp_path)
    assert 0 <= (last - certificate_end(tmp_path / "server/server.pem")).days <= 1
    make_credentials(tmp_path / "old", ["a.org"], [], days=0)
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=r"ca\.pem expired on 2.*: make a new authority"):
        renew(tmp_path / "old")
    result = CliRunner().invoke(app, ["credentials", "--renew", "--client", "x"])
    assert "--renew with --client" in str(result.exception)
    assert digests(tmp_path) == before


@pytest.mark.parametrize(("days_on", "words"), [(0, "expires soon, on 2"), (6, "expired on 2")])
def test_a_certificate_that_ends_is_warned_of(tmp_path, days_on, words):
    make_credentials(tmp_path, ["a.org"], [], days=5)
    pem = tmp_path / "server/server.pem"
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days_on)
    problem = certificate_problem(pem, now)
    assert problem.startswith(f"{pem} {words}")
    assert problem.endswith(": `keel deploy credentials --renew`")


def test_a_supernode_names_its_superlink_and_why_it_cannot_be_reached(made, tmp_path, capsys):
    make_credentials(tmp_path, ["fl.example.org"], [])
    port, thread = tls_server(made / "server", 2)
    address = f"127.0.0.1:{port}"
    report_superlink(["--superlink", address, f"--root-certificates={made / 'ca/ca.pem'}", "-x"])
    assert capsys.readouterr().err == f"SuperLink: {address}\n"
    report_superlink([f"--superlink={address}", "--root-certificates", f"{tmp_path / 'ca/ca.pem'}"])
    assert "cannot be reached yet: [SSL: CERTIFICATE_VERIFY_FAILED]" in capsys.readouterr().err
    thread.join(30)
    report_superlink(["--superlink", address, f"--root-certificates={made / 'ca/ca.pem'}"])
    error = capsys.readouterr().err
    assert f"SuperLink {address} cannot be reached yet: [Errno 111]" in error
    assert f"`keel doctor client --fleet {address}` says what to do" in error


@pytest.mark.end_to_end
@pytest.mark.parametrize("module", ["superlink_server", "supernode"])
def test_a_process_warns_of_its_certificate_when_it_starts(tmp_path, module):
    make_credentials(tmp_path, ["a.org"], [], days=5)
    pem = tmp_path / "server/server.pem"
    command = [sys.executable, "-m", f"keel.deployment.{module}", f"--ssl-certfile={pem}"]
    command += ["--root-certificates", str(tmp_path / "none.pem"), "--version"]
    done = subprocess.run(
        command, cwd=app_folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert f"warning: {pem} expires soon, on 2" in done.stderr


def test_an_authority_that_ends_is_replaced_as_documented(tmp_path):
    """The clients' keys stay: new ones would have to be registered, and the old ones removed."""
    folder = tmp_path / "credentials"
    make_credentials(folder, ["a.org"], ["site-a", "site-b"], days=5)
    problem = certificate_problem(folder / "ca/ca.pem", datetime.datetime.now(datetime.UTC))
    assert problem.endswith(new_ca)
    before = (folder / "ca/ca.pem").read_bytes()
    keys = {path: path.read_bytes() for path in folder.rglob("client.*")}
    bin_dir = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", "-ec", documented_commands("--folder new")]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=100)
    for owner in ("ca", "server", "site-a", "site-b"):
        check_issuer(folder / "server/server.pem", folder / owner / "ca.pem")
        assert (folder / owner / "ca.pem").read_bytes() != before
    assert keys == {path: path.read_bytes() for path in folder.rglob("client.*")}
    assert f"made  {folder / 'site-c' / 'client.pub'}" in make_credentials(folder, [], ["site-c"])
