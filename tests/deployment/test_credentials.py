"""The server's credentials: what OpenSSL takes them for, and that nothing is ever overwritten."""

import datetime
import hashlib
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from deployment_fixtures import documented_commands
from typer.testing import CliRunner

from keel.cli.deploy import app
from keel.deployment.__main__ import main
from keel.deployment.credentials import (
    certificate_fingerprint,
    certificate_names,
    certificate_problem,
    load_certificate,
    make_credentials,
    new_ca,
    renew,
)
from keel.deployment.reach import handshake, split_address
from protocol.config import app_folder

NOW = datetime.datetime.now(datetime.UTC)


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_each_machine_gets_what_it_needs_and_private_files_are_for_their_owner_alone(tmp_path):
    os.umask(0o000)
    made = tmp_path / "made"
    make_credentials(made, ["localhost"], ["site-a", "site-b"])
    server = {"ca.pem", "server.pem", "server.key", "executor.secret"}
    assert digests(made / "server").keys() == server
    for name in ("site-a", "site-b"):
        expected = {"ca.pem", "client.key", f"{name}.pub", "executor.secret"}
        assert digests(made / name).keys() == expected
    assert len({path.read_bytes() for path in made.rglob("executor.secret")}) == 3
    for path in made.rglob("*"):
        is_private = path.suffix in (".key", ".secret")
        assert path.stat().st_mode & (0o077 if is_private else 0o022) == 0, path


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
    shown = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", made / "ca/ca.pem"]
    printed = subprocess.check_output(shown, text=True).partition("=")[2]
    assert certificate_fingerprint(made / "ca/ca.pem") == printed.strip()


def test_the_server_certificate_signs_nothing_and_its_authority_no_other(made):
    found = load_certificate(made / "server/server.pem")
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    authority = load_certificate(made / "ca/ca.pem")
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)  # it makes no other authority
    assert (found.not_valid_after_utc - NOW).days in (824, 825)
    assert NOW - found.not_valid_before_utc > datetime.timedelta(minutes=50)  # clocks behind


def test_a_client_is_added_later_without_the_authority_and_nothing_else_changes(tmp_path):
    make_credentials(tmp_path, ["a.org"], ["site-a"])
    (tmp_path / "ca").rename(tmp_path.with_name("safe"))
    before = digests(tmp_path)
    make_credentials(tmp_path, [], ["site-a", "site-c"])
    after = digests(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"site-c"}
    assert after["site-c/ca.pem"] == before["server/ca.pem"]


def test_what_was_ended_half_way_is_completed_with_the_keys_that_are_there(tmp_path):
    make_credentials(tmp_path, ["a.org"], ["site-a"])
    before = digests(tmp_path)
    for name in ("ca/ca.pem", "server/server.pem", "server/ca.pem", "site-a/site-a.pub"):
        (tmp_path / name).unlink()
    make_credentials(tmp_path, ["a.org"], ["site-a"])
    after = digests(tmp_path)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert not {name for name in changed if name.endswith((".key", ".secret", ".pub"))}


def test_an_authority_whose_key_is_elsewhere_gets_no_other_key(tmp_path):
    make_credentials(tmp_path, ["a.org"])
    for name in ("ca/ca.key", "server/server.pem"):
        (tmp_path / name).unlink()
    before = digests(tmp_path)
    with pytest.raises(ValueError) as refused:
        make_credentials(tmp_path, ["a.org"])
    assert str(tmp_path / "ca/ca.key") in str(refused.value)
    assert digests(tmp_path) == before


@pytest.mark.parametrize(
    ("names", "clients", "named"),
    [
        ([], ["a"], "--name"),
        (["not a name"], ["a"], "'not a name'"),
        (["ok.org"], ["../up"], "'../up'"),
        (["ok.org"], ["site-a", "server"], "'server'"),
        (["ok.org"], ["reset-state"], "'reset-state'"),  # a file of client state
        (["ok.org"], ["site-a", "Site.A"], "'Site.A'"),  # their containers have one name
    ],
)
def test_mistakes_are_named_before_anything_is_made(tmp_path, names, clients, named):
    with pytest.raises(ValueError) as refused:
        make_credentials(tmp_path, names, clients)
    assert named in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_other_names_for_a_server_that_has_a_certificate_are_refused(made):
    before = digests(made)
    with pytest.raises(ValueError) as refused:
        make_credentials(made, ["new.example.org"], [])
    assert "new.example.org" in str(refused.value)
    assert digests(made) == before


@pytest.mark.parametrize("address", ["::1:9092", "[::1:9092", "host", "host:0", ":9092"])
def test_what_is_no_address_is_refused(address):
    assert split_address("[::1]:9092") == ("::1", 9092)
    with pytest.raises(ValueError):
        split_address(address)


def test_private_files_are_ignored_by_git():
    command = ["git", "check-ignore", "-q", "credentials/site-a/client.key"]
    if not (app_folder / ".git").exists():
        pytest.skip("not a git checkout")
    assert subprocess.run(command, cwd=app_folder, check=False).returncode == 0


# --- certificates that end -----------------------------------------------------------------------


def test_renewing_replaces_the_server_s_certificate_and_no_key(tmp_path, tls_server):
    make_credentials(tmp_path, ["fl.example.org"], ["site-a"], days=20)
    before, old = digests(tmp_path), load_certificate(tmp_path / "server/server.pem")
    words = ["credentials", "--credentials", str(tmp_path), "--renew", "--days", "30"]
    result = CliRunner().invoke(app, [*words, "--name", "10.0.0.1"])
    assert result.exit_code == 0, result.output
    after, new = digests(tmp_path), load_certificate(tmp_path / "server/server.pem")
    assert {name for name in after if after[name] != before[name]} == {"server/server.pem"}
    assert new.public_key() == old.public_key()
    assert (new.not_valid_after_utc - old.not_valid_after_utc).days in (9, 10)
    names = certificate_names(tmp_path / "server/server.pem")
    assert {"fl.example.org", "localhost", "10.0.0.1"} <= set(names)
    port = tls_server(tmp_path / "server")  # with the old key, for a client's old ca.pem
    assert handshake(f"127.0.0.1:{port}", tmp_path / "site-a/ca.pem")["subject"]


def test_a_certificate_that_cannot_be_renewed_names_the_file(tmp_path):
    make_credentials(tmp_path / "other", ["a.org"], [])
    folder = tmp_path / "made"
    for change in (
        lambda: make_credentials(folder, ["a.org"], [], days=0),  # it has expired
        lambda: (folder / "ca").rename(tmp_path / "old"),
        lambda: (tmp_path / "other/ca").rename(folder / "ca"),  # of another server
        lambda: (folder / "ca/ca.pem").write_bytes(b"-----BEGIN"),
    ):
        change()
        before = digests(tmp_path)
        with pytest.raises((ValueError, FileNotFoundError)) as refused:
            renew(folder)
        assert str(folder / "ca" / "ca.pem") in str(refused.value)
        assert digests(tmp_path) == before


def test_a_key_that_is_damaged_or_of_another_kind_is_named(tmp_path):
    make_credentials(tmp_path, ["a.org"])
    key = tmp_path / "ca/ca.key"
    rsa_key = rsa.generate_private_key(65537, 2048)
    for pem in (
        b"junk",
        rsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    ):
        key.write_bytes(pem)
        with pytest.raises(ValueError) as refused:
            renew(tmp_path)
        assert str(key) in str(refused.value)


@pytest.mark.parametrize(
    ("days_on", "is_named"), [(-1, True), (0, False), (800, True), (900, True)]
)
def test_a_certificate_that_ends_or_has_not_begun_is_named(made, days_on, is_named):
    pem = made / "server/server.pem"
    found = certificate_problem(pem, NOW + datetime.timedelta(days=days_on))
    assert found.startswith(str(pem)) == is_named


def test_a_process_warns_of_its_certificate_when_it_starts(tmp_path, monkeypatch, capsys):
    make_credentials(tmp_path, ["a.org"], [], days=5)
    pem = tmp_path / "server/server.pem"
    monkeypatch.setattr("flower_adapter.superlink.main", lambda: None)
    monkeypatch.setattr("sys.argv", ["python"])
    with pytest.raises(SystemExit):
        main(
            "superlink", [f"--ssl-certfile={pem}", "--root-certificates", "none.pem", "--insecure"]
        )
    assert f"warning: {pem} " in capsys.readouterr().err


def test_a_process_names_a_damaged_certificate_and_one_of_another_authority(
    tmp_path, made, monkeypatch
):
    def fail():
        raise ssl.SSLError("certificate verify failed")

    monkeypatch.setattr("flower_adapter.superexec.main", fail)
    monkeypatch.setattr("sys.argv", ["python"])
    (tmp_path / "damaged.pem").write_text("junk")
    for program, option, pem in (
        ("superlink", "--ssl-certfile", tmp_path / "damaged.pem"),
        ("executor", "--root-certificates", made / "ca/ca.pem"),
    ):
        with pytest.raises(SystemExit, match=str(pem)):
            main(program, [option, str(pem)])


def test_an_authority_that_ends_is_replaced_as_documented(tmp_path):
    """The clients' keys stay: new ones would have to be registered, and the old ones removed."""
    folder = tmp_path / "credentials"
    make_credentials(folder, ["a.org"], ["site-a", "site-b"], days=5)
    assert certificate_problem(folder / "ca/ca.pem", NOW).endswith(new_ca)
    before, keys = (folder / "ca/ca.pem").read_bytes(), digests(folder)
    bin_dir = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", "-ec", documented_commands("--credentials new")]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=100)
    new = (folder / "ca/ca.pem").read_bytes()
    assert new != before
    assert (folder / "server/ca.pem").read_bytes() == new
    authority = load_certificate(folder / "ca/ca.pem")
    load_certificate(folder / "server/server.pem").verify_directly_issued_by(authority)
    now = digests(folder)
    assert now.keys() == keys.keys()
    changed = {"ca/ca.key", "ca/ca.pem", "server/ca.pem", "server/server.pem", "server/server.key"}
    assert {name for name in now if now[name] != keys[name]} == changed
