"""Warnings of a success that is none, and of clients that a run had to do without."""

import json
import math

import numpy as np
import pytest
import torch
from data_fixtures import make_npz, random_images
from method_fixtures import METHODS
from run_fixtures import summary_of

from keel.cli.status import status_lines
from keel.saved_runs import SavedRun
from keel.views import run_page
from keel.views.store import ShownRun
from protocol.config import resolve_config
from server_app.checks import noise_warnings
from server_app.history import Line
from server_app.observers import ended_text
from server_app.participation import participation

short = {"num-rounds": 1, "partition": "iid", "data-fraction": 1.0, "lr": 0.0}


def line(number, left_out=(), backed_off=(), **updates) -> Line:
    return {
        "round": number,
        "participants": list(updates),
        "left_out": dict.fromkeys(left_out, "OSError: no power"),
        "backed_off": list(backed_off),
        "updates": updates,
    }


@pytest.fixture
def majority(tmp_path):
    """A source of which nine images in ten are benign, and none is learnt with lr = 0."""
    y = np.arange(40) % 10 == 0
    x = random_images(40, 28, 28, seed=3)
    spec = make_npz(tmp_path / "m.npz", x_train=x, y_train=y * 1, x_test=x + 1, y_test=y * 1)
    return {"source": spec, "classes": '["benign", "mass"]'}


def test_a_model_that_predicts_one_class_is_named_with_the_class_and_the_share(run, majority):
    folder = run(short | majority, 3)
    matrix = np.array(json.loads((folder / "confusion.json").read_text())["last"]["matrix"])
    [never] = np.array(["benign", "mass"])[matrix.sum(0) == 0]
    [warning] = summary_of(folder)["warnings"]
    assert f"never predicts '{never}'" in warning
    assert "'benign': 90.00%" in warning  # the largest share
    assert warning in (folder / "run.log").read_text()
    assert any(warning in text for text in status_lines(SavedRun(folder)))
    assert run_page.status(ShownRun(folder))["warnings"] == [warning]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"evaluate-global": False, "evaluate-clients": "all"}, "share of the class"),
        ({"method": "local"}, "personal"),
    ],
)
def test_the_same_is_seen_where_only_clients_have_test_images(run, majority, keys, named):
    [warning] = summary_of(run(short | majority | {"local-test-fraction": 0.5} | keys, 2))[
        "warnings"
    ]
    assert named in warning


def test_a_client_that_never_took_part_is_named_also_in_the_last_line(run, monkeypatch):
    train = METHODS["fedavg"].train

    def full(method, ctx):
        if ctx.client == "client-0002":
            raise OSError(28, "No space left on device")
        return train(method, ctx)

    monkeypatch.setattr(METHODS["fedavg"], "train", full)
    summary = summary_of(run({"num-rounds": 2, "train-fraction": 1.0}, 3))
    assert summary["missing"] == "2 of 3 clients, without client-0002"
    assert ended_text(summary).startswith("finished")
    assert "2 of 3 clients, without client-0002" in ended_text(summary)
    assert any("client-0002 never" in t and "No space" in t for t in summary["warnings"])


def test_a_slow_and_an_opposed_site_are_named_and_others_are_not():
    usual = {"seconds": 2.0, "loss": 0.5, "norm": 1.0, "cosine": 0.8}
    lines = [line(n, a=usual, b=usual, c=usual, d=usual | {"cosine": -0.4}) for n in range(1, 4)]
    lines[1] = line(2, a=usual, b=usual, c=usual | {"seconds": 32.0}, d=usual | {"cosine": -0.4})
    found = participation(lines)
    assert [found.notes(client) for client in "ab"] == [[], []]
    [slow] = found.notes("c")
    assert all(word in slow for word in ("32.0", "round 2", "2.0"))
    [opposed] = found.notes("d")
    assert all(word in opposed for word in ("-0.4", "0.80"))
    rows = {row["client"]: row for row in found.rows()}
    assert rows["c"]["seconds"] == pytest.approx((2 + 32 + 2) / 3)
    assert rows["d"]["rounds"] == 3
    signs = {"a": -0.6, "b": -0.5, "c": 0.1, "d": -0.7}  # of skewed data
    found = participation([line(1, **{c: {"cosine": value} for c, value in signs.items()})])
    assert [found.notes(client) for client in signs] == [[]] * 4


def test_only_the_last_round_decides_who_is_missing():
    lines = [line(1, left_out=["b"], a={}), line(2, a={}, b={})]
    assert participation(lines).missing_text("site") == ""
    lines.append(line(3, backed_off=["b"], a={}))
    assert participation(lines).missing_text("site") == "1 of 2 sites, without b"


def test_noise_that_drowns_the_update_is_warned_of_with_the_figure():
    released = {"w": torch.empty(35_000), "b": torch.empty(219)}
    keys = {"privacy.epsilon": 0.9, "privacy.delta": 1e-5, "privacy.clip-norm": 0.5}
    [text] = noise_warnings(resolve_config(keys), 3, released)
    sigma_over_c = 2 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.9
    assert f"{sigma_over_c * math.sqrt(35_219 / 3):.3g} times" in text
    assert noise_warnings(resolve_config(keys), 10**7, released) == []
    assert noise_warnings(resolve_config({}), 3, released) == []
