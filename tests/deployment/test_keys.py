"""Keys that sites make, and their registration from the request alone."""

import io
import json
import subprocess

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from typer.testing import CliRunner

from flower_adapter.registration import RegisteredNode
from keel.cli.deploy import app
from keel.deployment import register
from keel.deployment.keys import fingerprint, make_key, read_requests
from keel.deployment.superlink import free_ports


def test_a_site_makes_a_key_and_a_request_with_its_public_half(tmp_path):
    result = CliRunner().invoke(app, ["key", "site-a", "--credentials", str(tmp_path)])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "site-a"
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert files == {"client.key": 0o600, "executor.secret": 0o600, "site-a.pub": 0o644}
    request = folder / "site-a.pub"
    [(name, public)] = read_requests(request.read_text(), "")
    assert name == "site-a"
    shown = subprocess.check_output(["ssh-keygen", "-l", "-f", request], text=True)
    assert fingerprint(public) == shown.split()[1]
    assert fingerprint(public) in result.stdout
    private = load_ssh_private_key((folder / "client.key").read_bytes(), None)
    assert private.curve.name == "secp384r1"  # which Flower asks for
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert CliRunner().invoke(app, ["key", "site-a", "--credentials", str(tmp_path)]).exit_code == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_request_with_a_private_key_or_of_another_kind_is_refused_and_not_repeated(tmp_path):
    make_key(tmp_path, "site-a")
    (tmp_path / "empty").touch()
    rsa = tmp_path / "rsa.key"
    make = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-C", "site-a", "-f", str(rsa)]
    subprocess.run(make, check=True)
    (tmp_path / "both").write_bytes(
        (tmp_path / "site-a.pub").read_bytes() + (tmp_path / "client.key").read_bytes()
    )
    for name in ("client.key", "executor.secret", "both", "empty", "rsa.key.pub"):
        path = tmp_path / name
        with pytest.raises(ValueError) as refused:
            read_requests(path.read_text(), str(path))
        assert str(path) in str(refused.value)
        secret = (tmp_path / "executor.secret").read_text()
        assert secret[:20] not in str(refused.value)


class SuperLink:
    """In place of a SuperLink: the keys that were registered, and the nodes that they have."""

    def __init__(self, monkeypatch):
        self.nodes = []
        monkeypatch.setattr(register, "wait_for_server", lambda *_: None)
        monkeypatch.setattr(register, "registered_nodes", lambda *_: list(self.nodes))
        monkeypatch.setattr(register, "register_key", self.add)

    def add(self, address, ca, name, key, status="registered"):
        self.nodes.append(RegisteredNode(len(self.nodes) + 1, name, key, status))


@pytest.fixture
def superlink(monkeypatch):
    return SuperLink(monkeypatch)


@pytest.fixture
def server(made, tmp_path):
    """A server's credentials, which are not to be changed but by a registration."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "ca.pem").write_bytes((made / "server/ca.pem").read_bytes())
    return folder


def requests_of(folder, *names):
    for name in names:
        make_key(folder / name, name)
    return [str(folder / name / f"{name}.pub") for name in names]


def test_registered_is_who_has_a_request_and_the_record_has_names_nodes_and_keys(
    superlink, server, tmp_path, monkeypatch
):
    first, second = requests_of(tmp_path, "site-a", "site-b")
    lines = register.register(server, "localhost:1", 0.0, [first])
    assert lines[0].split()[:4] == ["registered", "site-a", "node", "1"]
    [(_, key)] = read_requests((tmp_path / "site-a/site-a.pub").read_text(), "")
    assert fingerprint(key) in lines[0]
    monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / "site-b/site-b.pub").read_text()))
    lines = register.register(server, "localhost:1", 0.0, ["-"])
    assert [line.split()[:2] for line in lines[:2]] == [
        ["known", "site-a"],
        ["registered", "site-b"],
    ]
    monkeypatch.setenv("KEEL_CLIENT_REGISTRY", str(tmp_path / "registry.json"))
    result = CliRunner().invoke(app, ["register", second, "--credentials", str(server)])
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["known", "known"]
    assert (tmp_path / "registry.json").read_text() == (server / "clients.json").read_text()
    clients = json.loads((server / "clients.json").read_text())
    assert {name: about["node"] for name, about in clients.items()} == {
        "site-a": "1",
        "site-b": "2",
    }
    assert clients["site-a"]["key"] == key


def test_a_name_or_a_key_that_is_taken_is_refused_before_anything_is_registered(
    superlink, server, tmp_path
):
    [first] = requests_of(tmp_path, "site-a")
    register.register(server, "localhost:1", 0.0, [first])
    [other] = requests_of(tmp_path / "other", "site-a")
    [fine, alike] = requests_of(tmp_path, "site-b", "Site.A")
    renamed = tmp_path / "renamed.pub"
    renamed.write_text((tmp_path / "site-a/site-a.pub").read_text().replace("site-a", "site-c"))
    (tmp_path / "removed").mkdir()
    [removed] = requests_of(tmp_path / "removed", "site-d")
    [(_, gone)] = read_requests((tmp_path / "removed/site-d/site-d.pub").read_text(), "")
    superlink.add("", b"", "site-d", gone, "unregistered")
    before = list(superlink.nodes)
    for request, named in (
        (other, "site-a"),
        (alike, "Site.A"),
        (str(renamed), "site-c"),
        (removed, "site-d"),
    ):
        with pytest.raises(ValueError) as refused:
            register.register(server, "localhost:1", 0.0, [fine, request])
        assert named in str(refused.value)
        assert superlink.nodes == before
    register.register(server, "localhost:1", 0.0, [fine])
    clients = json.loads((server / "clients.json").read_text())
    assert clients.keys() == {"site-a", "site-b"}  # without the one that was unregistered


def test_registering_without_credentials_or_where_no_superlink_answers_names_it(
    made, tmp_path, tls_server
):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "ca.pem")):
        register.register(tmp_path, "localhost:1", 0.0)
    port = tls_server(made / "server")  # as that for clients: TLS, but no HTTP
    for address in (f"localhost:{free_ports(1)[0]}", f"127.0.0.1:{port}"):
        with pytest.raises(RuntimeError, match=address):
            register.register(made / "server", address, 0.0)


def test_the_keys_of_a_trial_are_what_flower_reads(made):
    from flwr.cli.supernode.register import try_load_public_key

    private = load_ssh_private_key((made / "site-a/client.key").read_bytes(), None)
    registered = try_load_public_key(made / "site-a/site-a.pub")
    assert public_key_to_bytes(private.public_key()) == registered
