"""Several runs compared: groups over seeds, axes, exports."""

import csv
import json
import math
import os
import statistics

import pytest

from keel.exports import harmless, latex
from keel.views.compare_page import (
    View,
    as_csv,
    as_latex,
    chart,
    choices,
    config_rows,
    curve_of,
    grouped,
    header,
    points_of,
    result_rows,
)
from keel.views.store import ShownRun
from tests.tools.run_directories import make_run

HEADLINE = View()


def runs_in(base):
    return [ShownRun(path) for path in sorted(base.iterdir())]


def rows_of(groups, view=HEADLINE):
    found = [dict(zip(header(view), row, strict=True)) for row in result_rows(groups, view)]
    return {row["group"]: row for row in found}


def accuracy(run, number):
    return 100 * run.history[number - 1]["global"]["accuracy"]


@pytest.fixture
def runs(tmp_path):
    """Two methods with three seeds each, which end after 4, 5 and 6 rounds."""
    for method in ("fedavg", "moon"):
        for seed in range(3):
            keys, last = {"method": method, "seed": seed, "lr": 0.1}, 4 + seed
            make_run(tmp_path / f"{method}-{seed}", keys, 10, num_written=last, status="stopped")
    return runs_in(tmp_path)


def test_runs_that_differ_in_the_seed_are_one_curve_with_mean_and_deviation(runs):
    groups = grouped(runs)
    assert [group.label for group in groups] == ["fedavg", "moon"]
    curve = curve_of(groups[0], View())
    assert list(curve.x) == [1, 2, 3, 4, 5, 6]
    values = [accuracy(run, 4) for run in groups[0].runs]
    assert curve.y[3] == pytest.approx(statistics.fmean(values))
    assert curve.spread[3] == pytest.approx(statistics.stdev(values))
    assert curve.note[4].endswith("(2 of 3 seeds)")
    assert curve.spread[5] is None  # no band around one run
    assert [len(group.runs) for group in grouped(runs, by_seed=True)] == [1] * 6


def test_a_methods_colour_depends_on_no_order(runs):
    def colours(chosen):
        shown = [t for t in chart(grouped(chosen), View())["data"] if "name" in t]
        return {t["name"]: t["line"]["color"] for t in shown}

    assert colours(runs) == colours(runs[::-1])
    assert len(set(colours(runs).values())) == 2


def test_a_mean_is_of_finished_runs_one_a_seed_and_says_which_others_there_are(tmp_path):
    for age, (name, seed, num_written, status) in enumerate((
        *(("newest", 0, 3, "stopped"), ("new", 0, 10, "finished"), ("old", 0, 10, "finished")),
        *(("one", 1, 10, "finished"), ("two", 2, 2, "failed: diverged"), ("cut", 3, 4, "running")),
    )):  # fmt: skip
        keys = {"method": "fedavg", "seed": seed}
        directory = make_run(tmp_path / name, keys, 10, num_written=num_written, status=status)
        os.utime(directory / "history.jsonl", (1000 - age, 1000 - age))
        os.utime(directory / "config.json", (0, 0))
    runs = {run.name: run for run in runs_in(tmp_path)}
    groups = grouped(runs.values())
    values = [accuracy(runs["new"], 10), accuracy(runs["one"], 10)]
    [row] = rows_of(groups).values()
    assert row["final (%)"] == f"{statistics.fmean(values):.2f}"
    assert row["± sd"] == f"{statistics.stdev(values):.2f}"
    assert (row["seeds"], row["rounds"]) == ("4", "10")
    assert row["not finished"] == "failed 1/4, interrupted 1/4"
    assert {run.name for run in groups[0].counted} == {"new", "one"}
    assert curve_of(groups[0], View()).y[-1] == pytest.approx(statistics.fmean(values))
    assert "failed 1/4, interrupted 1/4" in as_latex(groups, View())
    table = list(csv.DictReader(as_csv(groups, View()).partition("\r\n\r\n")[2].splitlines()))
    assert {row["run"]: row["state"] for row in table}["two"] == "failed: diverged"
    assert len(table) == sum(run.last_round for run in runs.values())  # every point
    value = {(row["run"], row["round"]): row["headline"] for row in table}["one", "10"]
    assert float(value) == pytest.approx(values[1], rel=1e-5)


def test_the_final_values_are_at_the_last_round_that_all_runs_have(runs):
    row = rows_of(grouped(runs))["moon"]
    moons = [run for run in runs if run.config["method"] == "moon"]
    assert row["final (%)"] == f"{statistics.fmean(accuracy(run, 4) for run in moons):.2f}"
    assert (row["rounds"], row["round of final"]) == ("4–6", "4")


def test_bytes_and_seconds_add_up_over_rounds(runs):
    points = points_of(runs[0], View())
    assert list(points["MB"])[:3] == pytest.approx([1.9, 3.8, 5.7])
    seconds = [sum(line["seconds"].values()) for line in runs[0].history]
    assert points["spent"][3] == pytest.approx(sum(seconds[:3]))


def test_smoothing_is_the_bias_corrected_moving_average(runs):
    [group] = grouped(runs[:1])
    smooth = curve_of(group, View(smoothing=0.6)).y
    values = [accuracy(runs[0], number) for number in range(1, 5)]
    for t, found in enumerate(smooth):
        weights = [0.6 ** (t - i) for i in range(t + 1)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert math.isclose(found, expected)


def test_an_option_is_only_of_the_method_that_has_it_and_shown_as_it_is_typed(tmp_path):
    for name, keys in {
        "a": {"method": "fedcka", "fedcka.mu": 5.0},
        "b": {"method": "fedcka", "fedcka.mu": 10.0, "flip": True},
        "c": {"method": "fedavg", "fedcka.mu": 7.0},
        "d": {"method": "fedavg", "seed": 1},
    }.items():
        make_run(tmp_path / name, keys, 1)
    groups = grouped(runs_in(tmp_path))
    assert [len(group.runs) for group in groups] == [2, 1, 1]
    rows = {key: dict(zip("cba", values, strict=True)) for key, *values in config_rows(groups)}
    # by label: fedavg; fedcka, fedcka.mu 10.0, ...; fedcka, fedcka.mu 5.0, ...
    assert rows == {
        "fedcka.mu": {"a": "5.0", "b": "10.0", "c": ""},
        "flip": {"a": "false", "b": "true", "c": "false"},
        "method": {"a": "fedcka", "b": "fedcka", "c": "fedavg"},
    }


def test_a_loss_is_no_percentage_and_keeps_its_digits(tmp_path):
    for seed, loss in enumerate((0.00123456, 0.00223456)):
        path = make_run(tmp_path / f"a-{seed}", {"seed": seed}, 1) / "history.jsonl"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"losses": {"a": loss}}) + "\n")
    view, runs = View(curve="losses/a", log_y=True), runs_in(tmp_path)
    assert (view.curve, "loss: a") in choices(runs)
    [row] = rows_of(grouped(runs), view).values()
    assert (row["final"], row["± sd"], row["best"]) == ("0.001735", "0.0007071", "0.001735")
    assert chart(grouped(runs), view)["layout"]["yaxis"]["type"] == "log"


@pytest.mark.parametrize("cell", ["=1+1", "+x", "@SUM(A1)", "-cmd|' /C calc'!A0", "\tx"])
def test_a_cell_is_no_formula(cell):
    assert harmless(cell) == f"'{cell}"
    assert harmless("-7.1e-15") == "-7.1e-15"


def test_latex_is_escaped():
    assert latex("a_b & 50% ±\\x{}") == r"a\_b \& 50\% $\pm$\textbackslash{}x\{\}"
    # after the \\ of the row above, LaTeX reads [ and * as its arguments; > is another character
    assert latex("[ours]* > |x|") == "{[}ours]{*} $>$ $|$x$|$"
    assert latex("α ≥ 0.5, Δλ") == r"$\alpha$ $\geq$ 0.5, $\Delta$$\lambda$"  # pdflatex prints none


@pytest.mark.parametrize(
    ("key", "name", "more"),
    [("data", "data digest", {}), ("split", "site counts digest", {"simulated": False})],
)
def test_runs_on_other_data_are_no_seeds_of_one_setting(key, name, more, tmp_path, printed):
    for seed, digest in enumerate(("aaaa", "aaaa", "bbbb")):
        directory = make_run(tmp_path / "runs" / str(seed), {"method": "fedavg", "seed": seed}, 1)
        manifest = json.loads((directory / "manifest.json").read_text()) | more | {key: digest}
        (directory / "manifest.json").write_text(json.dumps(manifest))
    groups = grouped(runs_in(tmp_path / "runs"))
    assert sorted(group.num_seeds for group in groups) == [1, 2]
    assert config_rows(groups) == [[name, "aaaa", "bbbb"]]
    assert all(digest in as_csv(groups, View()) for digest in ("aaaa", "bbbb"))
    table = tmp_path / "table.csv"
    runs = [str(tmp_path / "runs" / each) for each in "02"]
    printed("compare", *runs, "--csv", str(table), "-o", str(tmp_path / "plot.png"))
    with table.open() as file:
        assert [row[name] for row in csv.DictReader(file)] == ["aaaa", "bbbb"]
