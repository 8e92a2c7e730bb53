"""Own code by a spec: found, loaded once for each text, kept with a run, refused in one line."""

import gc
import importlib
import json
import os
import pickle
import sys
import threading

import own_fixtures
import pytest
from own_fixtures import PULL, cell

from client_app.methods import method_of
from keel.cli.main import main
from keel.deployment.superlink import flower_keys
from keel.engine import prepare
from keel.job import Engine, EngineOptions
from protocol import own_code
from protocol.code import code_of, code_version
from protocol.config import config_from_json, resolve_config
from protocol.options import ConfigError
from protocol.own_code import Own, find, known, own_of


@pytest.fixture
def mine(tmp_path):
    return own_fixtures.file(tmp_path)


def test_what_is_a_spec_and_what_its_options_are_called():
    for spec in ("mine.py:FedPull", "/a b/mine.py:FedPull", "my_package.pull:FedPull", "own:net"):
        assert own_code.is_spec(spec)
    for name in ("fedavg", "npz:/data/x.npz", "folder:../x", "mine.py", "mine.py:", "a-b:c", 3):
        assert not own_code.is_spec(name)
    assert own_code.table_of("mine.py:FedPull") == "fedpull"
    assert own_code.table_of("fedpull") == ""


def test_a_file_is_executed_once_for_each_text(mine):
    before, again = (find(f"{mine}:FedPull", "method") for _ in range(2))
    assert again.value is before.value
    mine.write_text(PULL.replace("default=0.1", "default=0.2"))
    edited = find(f"{mine}:FedPull", "method")
    assert (before.spec, edited.spec) == ("mine.py:FedPull", "mine.py:FedPull")
    assert (before.value().mu, edited.value().mu) == (0.1, 0.2)
    assert edited.digest != before.digest


def test_the_options_of_an_own_method_have_their_defaults_or_are_set(mine):
    flat = resolve_config({"method": f"{mine}:FedPull"}).flat
    assert (flat["method"], flat["fedpull.mu"]) == ("mine.py:FedPull", 0.1)
    config = resolve_config({"method": f"{mine}:FedPull", "fedpull.mu": 2})
    assert method_of(config).mu == 2.0
    assert config.rounds.num_rounds == resolve_config({}).rounds.num_rounds


@pytest.mark.parametrize(
    ("text", "keys", "key", "named"),
    [
        (None, {}, "method", "mine.py"),
        ("x = 1\n\nraise KeyError('y')\n", {}, "method", "mine.py:3"),
        ("def f(:\n", {}, "method", "mine.py:1"),
        ("FedPul = 1\n", {}, "method", "did you mean FedPul?"),
        ("FedPull = 1\n", {}, "method", "@dataclass"),
        (PULL.replace(", default=0.1", ""), {}, "method", "FedPull.mu has no default"),
        (PULL.replace("def layers(self, model)", "def layers(self)"), {}, "method", "layers"),
        (PULL.replace("def penalty", "def penalti"), {}, "method", "penalty"),
        (PULL.replace("(LocalObjective)", ""), {}, "method", "LocalObjective"),
        (PULL, {"fedpull.nu": 1.0}, "fedpull.nu", "did you mean fedpull.mu?"),
        (PULL, {"fedpull.mu": -1.0}, "fedpull.mu", "finite number >= 0"),
        (PULL, {"fedpul.mu": 1.0}, "fedpul.mu", "unknown"),
    ],
)
def test_what_is_wrong_with_an_own_method_is_refused_in_one_line(tmp_path, text, keys, key, named):
    if text is not None:
        own_fixtures.file(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        method_of(resolve_config({"method": f"{tmp_path / 'mine.py'}:FedPull"} | keys))
    assert refused.value.key == key
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["FedProx", "FedAvgM", "Privacy", "Seed"])
def test_a_name_of_keels_is_refused(tmp_path, name):
    mine = own_fixtures.file(tmp_path, PULL.replace("FedPull", name))
    with pytest.raises(ConfigError, match=f"rename {name}"):
        resolve_config({"method": f"{mine}:{name}"})


def test_a_module_is_named_by_its_classes_too(tmp_path, monkeypatch):
    package = own_fixtures.module(tmp_path, monkeypatch)
    own = own_of("FedPull", package.FedPull)
    assert (own.spec, own.value) == ("own_package:FedPull", package.FedPull)
    assert own.digest == find("own_package:FedPull", "method").digest
    assert own.digest == find(f"{tmp_path / 'own_package.py'}:FedPull", "method").digest
    with pytest.raises(ConfigError, match="no_such_package"):
        find("no_such_package:FedPull", "method")


def test_a_module_that_was_edited_after_its_import_is_named(tmp_path, monkeypatch):
    package = own_fixtures.module(tmp_path, monkeypatch)
    own_fixtures.file(tmp_path, PULL.replace("self.mu *", "2 * self.mu *"), "own_package.py")
    with pytest.raises(ConfigError, match="has changed since this process imported it"):
        find("own_package:FedPull", "method")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    os.utime(package.__file__, (0, 0))  # else reload takes the bytecode of the same second
    importlib.reload(package)
    assert find("own_package:FedPull", "method").value is package.FedPull


def test_an_object_is_kept_by_value_with_what_it_uses():
    own = own_of("FedPull", cell(PULL))
    assert own.spec == "own:FedPull"
    elsewhere = Own(own.spec, own.digest, own.text, own.pickled)
    assert elsewhere.value(mu=3.0).penalty.__name__ == "penalty"
    assert own.text.index("def distance") < own.text.index("class FedPull")
    assert own.digest == own_of("FedPull", cell(PULL)).digest
    others = [
        PULL.replace("self.mu *", "2 * self.mu *"),
        PULL.replace(".sum(1)", ".sum(-1)"),  # in a function that it calls
        PULL.replace("SCALE = 1.0", "SCALE = 2.0"),  # in a value that this reads
    ]
    assert len({own.digest, *(own_of("FedPull", cell(text)).digest for text in others)}) == 4
    half = "class Half:\n    eta = 1.0\n\n\n"
    whole = PULL.replace("@dataclass", f"{half}@dataclass") + "\n    server_half = Half\n"
    others = [whole, whole.replace("eta = 1.0", "eta = 2.0")]
    assert len({own_of("FedPull", cell(text)).digest for text in others}) == 2


def test_an_object_of_an_own_file_is_kept_by_value(mine):
    """No other process has the module under the name that it was loaded under."""
    strong = find(f"{mine}:FedPull", "method").value(mu=9.0)
    own = own_of("strong", strong)
    assert (own.spec, own.text) == ("own:strong", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, type(strong).__module__)
        assert pickle.loads(own.pickled).mu == 9.0


def test_what_cannot_be_pickled_is_refused():
    lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be pickled"):
        own_of("score", lambda p, y: lock.acquire())


def test_a_config_that_is_sent_finds_the_code_by_its_digest(mine):
    config = resolve_config({"method": f"{mine}:FedPull"})
    sent = config.to_json()
    assert str(mine.parent) not in sent
    assert config_from_json(sent).method_class is config.method_class
    mine.write_text(PULL.replace("default=0.1", "default=0.2"))
    edited = resolve_config({"method": f"{mine}:FedPull"})
    assert config_from_json(edited.to_json()).method_class is edited.method_class
    assert config_from_json(sent).method_class is config.method_class


def test_a_machine_without_the_file_or_the_object_refuses_it(tmp_path, monkeypatch):
    own = own_of("FedPull", cell(PULL + "\n\nTHERE = 1"))
    spec, found, held = own.spec, own.digest, own_code.shipped([own])
    assert known(spec, found) is own
    del own
    gc.collect()
    for unknown in ("own:FedPull", "mine.py:FedPull"):
        with pytest.raises(ValueError, match="is not on this machine"):
            known(unknown, "0" * 16)
    own_code.hold(held)
    assert known(spec, found).value is not None
    own_code._held.remove(held[0])


def test_a_module_of_another_digest_is_refused_unless_its_text_is_there(tmp_path, monkeypatch):
    own_fixtures.module(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="own_package has the digest"):
        _ = known("own_package:FedPull", "0" * 16).value
    text = PULL.replace("default=0.1", "default=0.7")
    kept = Own("own_package:FedPull", "0" * 16, text)
    assert kept.value().mu == 0.7
    relative = Own("json.mine:dump", "1" * 16, "from .decoder import JSONDecoder as dump\n")
    assert relative.value is json.JSONDecoder


def test_a_run_keeps_its_own_code_and_refuses_a_changed_copy(tmp_path, mine):
    own = find(f"{mine}:FedPull", "method")
    owns = {own.spec: own, "own:FedPull": own_of("FedPull", cell(PULL))}
    own_code.save(tmp_path, owns)
    digests = {spec: each.digest for spec, each in owns.items()}
    mine.unlink()
    read = own_code.read(tmp_path, digests)
    assert [each.value().mu for each in read.values()] == [0.1, 0.1]
    (tmp_path / "own" / "mine.py").write_text(PULL + "\n")
    with pytest.raises(ValueError, match=r"own/mine\.py is not as the run wrote it"):
        own_code.read(tmp_path, digests)


def test_a_deployment_and_flwr_run_take_modules_alone(mine, tmp_path, monkeypatch, capsys):
    own_fixtures.module(tmp_path, monkeypatch)
    remote = EngineOptions(Engine.deployment, federation="127.0.0.1:1")
    with pytest.raises(ValueError, match="installed at each of its sites"):
        prepare({"method": f"{mine}:FedPull"}, remote)
    assert main(["deploy", "loopback", f"method={mine}:FedPull"]) == 2
    assert "installed at each of its sites" in capsys.readouterr().err
    keys = {"method": "own_package:FedPull", "fedpull.mu": 2.0, "lr": 0.1}
    job = prepare(keys, remote)
    sent = flower_keys(job.overrides)
    assert sent == {"method": "own_package:FedPull", "lr": 0.1, "method-options": "mu = 2.0"}
    assert resolve_config(sent).flat == resolve_config(keys).flat
    for wrong in ("mu = ", "nu = 1", "mu = -1.0"):
        with pytest.raises(ConfigError):
            method_of(resolve_config(sent | {"method-options": wrong}))
    with pytest.raises(ConfigError, match="keys of their own"):
        resolve_config({"method": "fedprox", "method-options": "mu = 1.0"})


def test_two_files_of_one_name_are_refused(tmp_path, mine):
    (tmp_path / "other").mkdir()
    other = own_fixtures.file(tmp_path / "other", "def net(): ...\n")
    with pytest.raises(ConfigError, match=r"another mine\.py"):
        resolve_config({"method": f"{mine}:FedPull", "model": f"{other}:net"})


def test_own_code_is_other_code_than_keels(mine):
    config = resolve_config({"method": f"{mine}:FedPull"})
    assert code_of({}) == code_version()
    assert (
        code_of(config.own)
        == f"{code_version()}, mine.py:FedPull {find(f'{mine}:FedPull', 'method').digest}"
    )
