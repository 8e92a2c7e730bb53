"""What a user may get wrong: one clear line each, and nothing written is lost."""

import numpy as np
import pytest
from run_fixtures import NUM_CLIENTS, SMALL

from protocol.config import default_config
from server_app.inline import run_inline
from server_app.run import run_federation


@pytest.fixture
def rejected(tmp_path):
    """rejected(keys): the one line of the error that a run ends with; it makes no directory."""

    def refused_line(keys):
        output = tmp_path / "runs"
        given = dict(keys) if "resume" in keys else SMALL | {"output-dir": str(output)} | keys
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            run_inline(given, NUM_CLIENTS)
        line = str(caught.value)
        assert "\n" not in line
        assert not output.exists()
        return line

    return refused_line


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"method": "fedcka", "fedcka.num-layers": 0}, ["fedcka.num-layers = 0"]),
        ({"method": "fedreco", "fedreco.split": "conv9"}, ["fedreco.split", "conv9", "conv1"]),
        ({"evaluate-clients": "all"}, ["client-0000", "local-test-fraction"]),
        ({"num-clients": 6}, ["num-clients = 6", "4 clients"]),
        (
            {"method": "fedreco", "client-models": "cnn-fedreco,cnn-fedcka"},
            ["cnn-fedcka 256 (2 clients)", "cnn-fedreco 84 (2 clients)"],
        ),
        # all clients agree, and none of them with u_0
        (
            {"method": "fedreco", "client-models": "cnn-fedcka"},
            ["cnn-fedcka 256 (4 clients)", "cnn-fedreco has 84"],
        ),
    ],
)
def test_what_the_data_the_network_or_the_clients_do_not_allow(rejected, keys, named):
    """One of each kind: tests/test_protocol_config.py has those that the config alone refuses."""
    line = rejected(keys)
    assert all(words in line for words in named)


def test_every_key_is_named_when_its_value_is_of_another_kind():
    """No key is read by a default, or not at all."""
    for key, value in default_config().items():
        if key == "preset":
            continue  # read before all others: unknown, whatever it is
        wrong = 0.5 if isinstance(value, bool | int | str) else "half"
        table = key.partition(".")[0]
        switch = {"method": table} if "." in key and table not in ("privacy",) else {}
        if table in ("fedavgm", "fedadam", "fedacg"):
            switch = {"server-optimizer": table}
        with pytest.raises(ValueError) as caught:
            run_federation(None, SMALL | switch | {key: wrong})
        assert str(caught.value).startswith(f"{key} = {wrong!r}: "), key


def test_a_class_that_no_client_has(rejected, tmp_path):
    x = np.random.default_rng(2).integers(0, 256, (60, 28, 28), dtype=np.uint8)
    y = np.array([0, 1, 3] * 20)
    np.savez(tmp_path / "gap.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    source = f"npz:{tmp_path / 'gap.npz'}"
    line = rejected({"source": source, "partition": "iid", "classes": "ant,bee,cat,dog"})
    assert "'cat'" in line
    assert source in line


def test_a_refused_resume_names_its_folder_and_loses_nothing(rejected, run, tmp_path):
    for path in (tmp_path, tmp_path / "moved"):
        assert str(path) in rejected({"resume": str(path)})
    folder = run({"num-rounds": 2})
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for keys in ({"lr": 0.5}, {"num-rounds": 0}, {"num-round": 9}):
        rejected({"resume": str(folder)} | keys)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
