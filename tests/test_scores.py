"""Scores beside the accuracy: against scikit-learn and loops, in whole runs, and their faults."""

import json
import math

import numpy as np
import pytest
from own_fixtures import cell
from run_fixtures import SMALL

import keel
from client_app import scores
from keel.views.run_page import main_charts
from keel.views.store import ShownRun
from protocol.config import resolve_config
from protocol.options import ConfigError

pytestmark = pytest.mark.end_to_end  # they train whole runs

rng = np.random.default_rng(7)


@pytest.fixture
def predicted():
    """Probabilities [200, 5], some of them equal, and labels of which 4 has none."""
    probabilities = rng.integers(1, 6, (200, 5)).astype(float)
    return probabilities / probabilities.sum(1, keepdims=True), rng.integers(0, 4, 200)


def test_scores_are_those_of_scikit_learn_and_ece_that_of_a_loop(predicted):
    import sklearn.metrics

    p, y = predicted
    guess, there = p.argmax(1), sorted({*y.tolist(), *p.argmax(1).tolist()})
    one_against_others = [sklearn.metrics.roc_auc_score(y == k, p[:, k]) for k in range(4)]
    expected = {
        "macro-f1": sklearn.metrics.f1_score(y, guess, labels=there, average="macro"),
        "balanced-accuracy": sklearn.metrics.recall_score(
            y, guess, labels=range(4), average="macro"
        ),
        "auroc": np.mean(one_against_others),
    }
    ece = 0.0
    for k in range(15):
        inside = [i for i in range(200) if k / 15 < p[i].max() <= (k + 1) / 15]
        if inside:
            right = sum(guess[i] == y[i] for i in inside) / len(inside)
            ece += len(inside) / 200 * abs(right - sum(p[i].max() for i in inside) / len(inside))
    found, faults = scores.measured(scores.FUNCTIONS, p, y)
    assert faults == {}
    assert found == pytest.approx(expected | {"ece": ece})
    matrix = scores.confusion_matrix(guess, y, 5)
    assert np.array_equal(matrix, sklearn.metrics.confusion_matrix(y, guess, labels=range(5)))


def test_a_function_that_writes_to_its_arguments_changes_no_other_score(predicted):
    def writes(p, y):
        p[:], y[:] = 0, 0
        return 1.0

    p, y = predicted
    kept = y.copy()
    found, _ = scores.measured({"writes": writes, "f1": scores.macro_f1}, p, y)
    assert found["f1"] == scores.macro_f1(p, kept)
    assert np.array_equal(y, kept)


def test_no_metrics_are_no_scores_and_one_label_has_no_area():
    assert resolve_config({}).scores == {}
    assert math.isnan(scores.auroc(np.full((3, 2), 0.5), np.zeros(3, dtype=int)))


TEXT = """import numpy as np


def top2(p, y):
    return float(np.mean((p.argsort(1)[:, -2:] == y[:, None]).any(1)))


def raises(p, y):
    raise KeyError("x")


def odd(p, y):
    return float("nan")
"""
top2 = cell(TEXT, "top2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rounds of a personal method that also has a global model, with scores of each kind."""
    folder = tmp_path_factory.mktemp("scores")
    keys = SMALL | {"output-dir": str(folder), "method": "ditto", "local-test-fraction": 0.2}
    keys |= {"evaluate-clients": "all", "num-rounds": 2}
    metrics = {"top2": top2, "odd": cell(TEXT, "odd"), "bad": cell(TEXT, "raises")}
    metrics |= {"macro-f1": "macro-f1"}
    return keel.run(keys, metrics=metrics, clients=2, quiet=True)


def test_scores_are_in_history_summary_and_tables(run):
    assert run.config["metrics"] == "own:top2,own:odd,own:bad,macro-f1"
    lines = [json.loads(line) for line in (run.directory / "history.jsonl").open()]
    for line in lines:
        kinds = [key for key in ("global", "local_global", "personal") if key in line]
        assert "personal" in kinds
        for key in kinds:
            assert line[key]["scores"].keys() == {"top2", "macro-f1"}
            accuracy = line[key].get("mean", line[key].get("accuracy"))
            assert accuracy <= line[key]["scores"]["top2"] <= 1
    last = lines[-1]["personal"]["scores"]["top2"]
    assert run.summary["scores"]["personal.top2"]["final"] == last
    assert run.history["score/personal.top2"].iloc[-1] == last


def test_scores_have_charts_of_their_own(run):
    charts = main_charts(ShownRun(run.directory))
    assert {"score top2", "score macro-f1", "accuracy"} <= charts.keys()
    titles = {name: chart["layout"]["yaxis"]["title"]["text"] for name, chart in charts.items()}
    assert (titles["score top2"], titles["accuracy"]) == ("top2", "accuracy (%)")
    assert len(charts["confusion"]["data"]) == 1


def test_a_score_without_a_number_is_named(run):
    log = (run.directory / "run.log").read_text()
    for fault in ("metric odd returned nan", "metric bad raised KeyError: 'x'"):
        assert fault in log
    assert "WARNING round 1: metric bad has no number at client-0000, client-0001" in log


def test_confusion_of_the_last_and_the_best_round(tmp_path):
    keys = SMALL | {"output-dir": str(tmp_path), "num-rounds": 3}
    run = keel.run(keys, clients=2, quiet=True)
    found = json.loads((run.directory / "confusion.json").read_text())
    accuracies = list(run.history["accuracy/global.accuracy"])
    for which, number in (("last", 3), ("best", 1 + int(np.argmax(accuracies)))):
        matrix = np.array(found[which]["matrix"])
        assert found[which]["round"] == number
        assert matrix.trace() / matrix.sum() == pytest.approx(accuracies[number - 1])
        assert matrix.sum() == 359
        assert np.array_equal(run.confusion(which), matrix)


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ("macrof1", "macro-f1"),
        ({"accuracy": top2}, "accuracy"),
        ({"my score": top2}, "my score"),
        ({"x": 3}, "x"),
    ],
)
def test_bad_metrics_are_refused(tmp_path, metrics, named):
    with pytest.raises(ConfigError) as refused:
        keel.run(SMALL | {"output-dir": str(tmp_path)}, metrics=metrics, quiet=True)
    assert refused.value.key == "metrics"
    assert named in str(refused.value)
