"""Several runs compared: groups over seeds, axes, exports."""

import csv
import io
import json
import os
import statistics

import pytest

from keel.views.charts import PALETTE
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
    result_rows,
    view_of,
    x_of,
)
from keel.views.exports import harmless, latex
from keel.views.store import Store
from protocol.catalogue import method_names
from tests.tools.run_directories import make_run


@pytest.fixture
def runs(tmp_path):
    """Two methods with three seeds each."""
    for method in ("fedavg", "moon"):
        for seed in range(3):
            keys = {"method": method, "seed": seed, "lr": 0.1}
            make_run(
                tmp_path / f"{method}-{seed}", keys, 10, num_written=4 + seed, status="stopped"
            )
    store = Store([tmp_path])
    return [(entry, store.history(entry)) for entry in store.runs().values()]


def test_runs_that_differ_in_the_seed_are_one_curve_with_mean_and_deviation(runs):
    groups = sorted(grouped(runs), key=lambda group: group.label)
    assert [group.label for group in groups] == ["fedavg", "moon"]
    curve = curve_of(groups[0], View())
    assert list(curve.x) == [1, 2, 3, 4, 5, 6]
    assert [note.partition("(")[2] for note in curve.note[3:]] == [
        *("3 seeds)", "2 of 3 seeds)", "1 of 3 seeds)")
    ]
    assert curve.spread[5] is None  # no band around one run
    values = [reader.lines[3]["global"]["accuracy"] for _, reader in groups[0].runs]
    assert curve.y[3] == pytest.approx(100 * statistics.fmean(values))
    assert curve.spread[3] == pytest.approx(100 * statistics.stdev(values))
    assert [len(group.runs) for group in grouped(runs, by_seed=True)] == [1] * 6


def test_a_methods_colour_depends_on_no_order_and_every_curve_has_its_own(runs, tmp_path):
    def looks(chosen):
        shown = [t for t in chart(grouped(chosen), View())["data"] if "name" in t]
        return {t["name"]: (t["line"]["color"], t["line"]["dash"]) for t in shown}

    assert looks(runs) == looks(runs[::-1])
    assert looks(runs)["fedavg"] == (PALETTE[0], "solid")
    for method in (*method_names(), "removed"):
        make_run(tmp_path / f"{method}-x", {"method": method, "lr": 0.1}, 10, num_written=2)
    store = Store([tmp_path])
    many = [(e, store.history(e)) for e in store.runs().values() if e.name.endswith("-x")]
    assert len(set(looks(many).values())) == len(many) == len(method_names()) + 1
    assert looks(many) == looks(many[::-1])
    one_method = [run for run in runs if run[0].method == "moon"]
    found = chart(grouped(one_method, by_seed=True), View())["data"]
    assert [t["line"]["color"] for t in found if "name" in t] == list(PALETTE[:3])


@pytest.fixture
def uneven(tmp_path):
    """One setting: seed 0 finished twice and stopped once, 1 finished, 2 diverged, 3 is cut off."""
    for name, seed, num_written, status in (
        *(("old", 0, 10, "finished"), ("new", 0, 10, "finished"), ("newest", 0, 3, "stopped")),
        *(("one", 1, 10, "finished"), ("two", 2, 2, "failed: diverged"), ("cut", 3, 4, "running")),
    ):
        keys = {"method": "fedavg", "seed": seed}
        directory = make_run(tmp_path / name, keys, 10, num_written=num_written, status=status)
        age = ["newest", "new", "old"].index(name) if seed == 0 else 0
        os.utime(directory / "history.jsonl", (1000 - age, 1000 - age))
        os.utime(directory / "config.json", (0, 0))
    store = Store([tmp_path])
    return {entry.name: (entry, store.history(entry)) for entry in store.runs().values()}


def final_of(run, number=10):
    return 100 * run[1].lines[number - 1]["global"]["accuracy"]


def test_a_mean_is_of_finished_runs_one_a_seed_and_says_which_others_there_are(uneven):
    groups = grouped(list(uneven.values()))
    (row,) = result_rows(groups, View())
    found = dict(zip(header(View()), row, strict=True))
    values = [final_of(uneven["new"]), final_of(uneven["one"])]
    assert found["final (%)"] == f"{statistics.fmean(values):.2f}"
    assert found["± sd"] == f"{statistics.stdev(values):.2f}"
    assert (found["seeds"], found["rounds"]) == ("4", "10")
    assert found["not finished"] == "failed 1/4, interrupted 1/4"
    assert {entry.name for entry in groups[0].repeats} == {"old", "newest"}
    curve = curve_of(groups[0], View())
    assert (curve.name, len(curve.x)) == ("fedavg (failed 1/4, interrupted 1/4)", 10)
    assert curve.y[-1] == pytest.approx(statistics.fmean(values))
    assert as_latex(groups, View()).count("failed 1/4, interrupted 1/4") == 1
    table = list(csv.DictReader(as_csv(groups, View()).partition("\r\n\r\n")[2].splitlines()))
    assert {row["run"]: row["state"] for row in table}["two"] == "failed: diverged"


def test_where_no_run_finished_the_mean_is_at_the_last_round_that_all_have(uneven):
    groups = grouped([uneven["newest"], uneven["two"]])
    (row,) = result_rows(groups, View())
    found = dict(zip(header(View()), row, strict=True))
    values = [final_of(uneven[name], 2) for name in ("newest", "two")]
    assert found["final (%)"] == f"{statistics.fmean(values):.2f}"
    assert (found["rounds"], found["not finished"]) == ("2–3", "failed 1/2, stopped 1/2")
    assert found["round of final"] == "2"
    assert list(curve_of(groups[0], View()).x) == [1, 2, 3]


def test_bytes_and_seconds_add_up_over_rounds(runs):
    _, reader = runs[0]
    sent = x_of(reader.lines, "bytes")
    assert [sent[r] for r in (1, 2, 3)] == pytest.approx([1.9, 3.8, 5.7])
    seconds = [sum(line["seconds"].values()) for line in reader.lines]
    assert x_of(reader.lines, "seconds")[3] == pytest.approx(sum(seconds[:3]))


def test_the_table_has_one_row_a_group_and_the_keys_that_differ(runs):
    groups = grouped(runs)
    rows = {row[0]: row for row in result_rows(groups, View())}
    assert rows["moon"][1:4] == ["3", "stopped 3/3", "4–6"]
    assert {group.label for group in groups} == {"fedavg", "moon"}
    assert config_rows(groups) == [["method", *(group.label for group in groups)]]


def test_values_that_differ_are_shown_as_they_are_typed(tmp_path):
    for name, flip in (("a", False), ("b", True)):
        make_run(tmp_path / name, {"method": "fedavg", "flip": flip}, 1)
    store = Store([tmp_path])
    entries = sorted(store.runs().values(), key=lambda entry: entry.name)
    groups = grouped([(entry, store.history(entry)) for entry in entries])
    assert [group.label for group in groups] == ["flip false", "flip true"]
    assert config_rows(groups) == [["flip", "false", "true"]]


def test_an_option_is_only_of_the_method_that_has_it(tmp_path):
    for name, keys in {
        "a": {"method": "fedcka", "fedcka.mu": 5.0},
        "b": {"method": "fedcka", "fedcka.mu": 10.0},
        "c": {"method": "fedavg", "fedcka.mu": 7.0},
        "d": {"method": "fedavg", "seed": 1},
    }.items():
        make_run(tmp_path / name, keys, 1)
    store = Store([tmp_path])
    entries = sorted(store.runs().values(), key=lambda entry: entry.name)
    groups = grouped([(entry, store.history(entry)) for entry in entries])
    assert [len(group.runs) for group in groups] == [1, 1, 2]
    assert config_rows(groups) == [
        ["fedcka.mu", "5.0", "10.0", ""],
        ["method", "fedcka", "fedcka", "fedavg"],
    ]


def test_the_csv_has_every_point(runs):
    groups = grouped(runs)
    table = list(csv.reader(io.StringIO(as_csv(groups, View()))))
    points = table[table.index([]) + 2 :]
    assert len(points) == sum(len(reader.lines) for _, reader in runs)
    _, run, _, _, r, *_, value = points[0]
    reader = next(reader for entry, reader in runs if entry.name == run)
    expected = 100 * reader.lines[int(r) - 1]["global"]["accuracy"]
    assert float(value) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cell", ["=1+1", "+x", "@SUM(A1)", "-cmd|' /C calc'!A0", "\tx"])
def test_a_cell_is_no_formula(cell):
    assert harmless(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-1.5", "-7.1e-15", "1e-05", "-3"])
def test_a_number_stays_a_number(cell):
    assert harmless(cell) == cell


def test_latex_is_escaped():
    assert latex("a_b & 50% ±\\x{}") == r"a\_b \& 50\% $\pm$\textbackslash{}x\{\}"
    # after the \\ of the row above, LaTeX reads [ and * as its arguments; > is another character
    assert latex("[ours]* > |x|") == "{[}ours]{*} $>$ $|$x$|$"
    assert latex("α ≥ 0.5, Δλ") == r"$\alpha$ $\geq$ 0.5, $\Delta$$\lambda$"  # pdflatex prints none


@pytest.mark.parametrize("query", [{"smooth": "nan"}, {"smooth": "x"}, {"x": "y", "curve": "z"}])
def test_a_choice_that_is_unknown_has_its_default(query):
    assert view_of(query) == View()


def test_a_loss_is_no_percentage(runs):
    view = View(curve="loss.contrastive")
    heading, *_ = csv.reader(as_csv(grouped(runs), view).splitlines())
    assert {"final", "best"} < set(heading)
    assert r"\%" not in as_latex(grouped(runs), view)
    assert r"final (\%)" in as_latex(grouped(runs), View())


def test_a_small_loss_keeps_its_digits(tmp_path):
    for seed, loss in enumerate((0.00123456, 0.00223456)):
        path = make_run(tmp_path / f"a-{seed}", {"seed": seed}, 1) / "history.jsonl"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"losses": {"a": loss}}) + "\n")
    store = Store([tmp_path])
    view = View(curve="loss.a")
    (group,) = grouped([(entry, store.history(entry)) for entry in store.runs().values()])
    (row,) = result_rows([group], view)
    found = dict(zip(header(view), row, strict=True))
    assert (found["final"], found["± sd"], found["best"]) == ("0.001735", "0.0007071", "0.001735")
    assert curve_of(group, view).note == ["± 0.0007071 (2 seeds)"]
    assert "0.001735" in as_latex([group], view)


def test_a_curve_that_the_last_round_lacks_is_offered(tmp_path):
    path = make_run(tmp_path / "a", {}, 3) / "history.jsonl"
    *before, last = path.read_text().splitlines()
    line = {**json.loads(last), "losses": {}}
    del line["global"]
    path.write_text("\n".join([*before, json.dumps(line), ""]))
    store = Store([tmp_path])
    runs = [(entry, store.history(entry)) for entry in store.runs().values()]
    offered = [value for value, _ in choices(runs)]
    assert offered == ["headline", "global.accuracy", "loss.supervised", "loss.contrastive"]


def test_a_zoom_outlasts_smoothing_and_no_other_axis_or_curve(runs):
    def kept(**choices):
        return chart(grouped(runs), View(**choices))["layout"]["uirevision"]

    assert kept(smoothing=0.5) == kept()
    assert len({kept(), kept(x="bytes"), kept(log_y=True), kept(curve="loss.contrastive")}) == 4


def test_losses_have_their_own_axis(runs):
    figure = chart(grouped(runs), View(curve="loss.contrastive", log_y=True))
    assert figure["layout"]["yaxis"]["title"]["text"] == "loss"
    assert figure["layout"]["yaxis"]["type"] == "log"
