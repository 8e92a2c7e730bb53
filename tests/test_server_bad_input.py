"""What a user may get wrong: one clear line each, exit code 1, and nothing written is lost."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from run_fixtures import NUM_CLIENTS, SMALL, final_model, same_bits

from protocol.config import default_config
from server_app.inline import run_inline
from server_app.run import run_federation

Keel = Callable[..., str]


@pytest.fixture
def rejected(tmp_path) -> Keel:
    """rejected(keys, num_clients): the one line of the error that a run ends with.

    Holds that no run directory is made.
    """

    def refused_line(keys: dict[str, object], num_clients: int = NUM_CLIENTS) -> str:
        output = tmp_path / "runs"
        given = dict(keys) if "resume" in keys else SMALL | {"output-dir": str(output)} | keys
        with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
            run_inline(given, num_clients)
        line = str(caught.value)
        assert "\n" not in line
        assert not output.exists()
        return line

    return refused_line


# --- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "found", "allowed"),
    [
        ({"num-round": 3}, "num-round", "num-rounds"),
        ({"lr": -0.1}, "lr = -0.1", ">= 0"),
        ({"method": "moon", "moon.tau": 0.0}, "moon.tau = 0.0", "> 0"),
        ({"method": "fedcka", "fedcka.num-layers": 0}, "fedcka.num-layers = 0", "1"),
        ({"method": "fedreco", "fedreco.split": "conv9"}, "conv9", "conv1"),
        ({"evaluate-clients": "all"}, "client-0000 has no local test part", "local-test-fraction"),
        ({"num-clients": 6}, "num-clients = 6", "4 clients"),
        ({"init": "x"}, "init = 'x'", 'one of "", fan-in'),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_key_or_value_that_is_not_allowed(rejected, keys, found, allowed):
    """One of each kind: tests/test_protocol_config.py has those that the config alone refuses."""
    line = rejected(keys)
    assert found in line
    assert allowed in line


def test_every_key_is_named_when_its_value_is_of_another_kind(rejected):
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


# --- data ------------------------------------------------------------------------------------


def npz_of(path: Path, y_train: list[int]) -> str:
    rng = np.random.default_rng(2)
    x = rng.integers(0, 256, (len(y_train), 28, 28), dtype=np.uint8)
    y = np.array(y_train)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    return f"npz:{path}"


def test_a_class_that_no_client_has(rejected, tmp_path):
    source = npz_of(tmp_path / "gap.npz", [0, 1, 3] * 20)
    line = rejected({"source": source, "partition": "iid", "classes": "ant,bee,cat,dog"})
    assert "'cat'" in line
    assert source in line


# --- clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "found"),
    [
        ("cnn-fedreco,cnn-fedcka", "cnn-fedcka 256 (2 clients), cnn-fedreco 84 (2 clients)"),
        # all clients agree, and none of them with u_0
        ("cnn-fedcka", "cnn-fedcka 256 (4 clients); the run's model cnn-fedreco has 84"),
        ("cnn-fedreco,cnn-fedrecho", "cnn-fedrecho"),
    ],
)
def test_models_of_fedreco_clients_that_do_not_fit(rejected, models, found):
    line = rejected({"method": "fedreco", "client-models": models})
    assert found in line
    assert "cnn-fedreco" in line


# --- a run to resume -------------------------------------------------------------------------


def test_a_folder_that_holds_no_run(rejected, tmp_path):
    for path in (tmp_path, tmp_path / "moved"):
        assert str(path) in rejected({"resume": str(path)})


def test_a_refused_resume_loses_nothing(rejected, run):
    folder = run({"num-rounds": 2})
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    model = final_model(folder)
    for keys in ({"lr": 0.5}, {"num-rounds": 0}, {"num-round": 9}):
        rejected({"resume": str(folder)} | keys)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert same_bits(final_model(folder), model)
