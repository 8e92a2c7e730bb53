"""Several runs compared: groups over seeds, axes, exports."""

import csv
import io
import statistics

import pytest

from keel.views.compare_page import (
    View,
    as_csv,
    chart,
    config_rows,
    curve_of,
    grouped,
    result_rows,
    view_of,
    x_of,
)
from keel.views.exports import harmless, latex
from keel.views.store import Store
from tests.tools.run_directories import make_run


@pytest.fixture
def runs(tmp_path):
    """Two methods with three seeds each."""
    for method in ("fedavg", "moon"):
        for seed in range(3):
            keys = {"method": method, "seed": seed, "lr": 0.1}
            make_run(tmp_path / f"{method}-{seed}", keys, 10, num_written=4 + seed)
    store = Store([tmp_path])
    return [(entry, store.history(entry)) for entry in store.runs().values()]


def test_runs_that_differ_in_the_seed_are_one_curve_with_mean_and_deviation(runs):
    groups = sorted(grouped(runs), key=lambda group: group.label)
    assert [group.label for group in groups] == ["fedavg", "moon"]
    curve = curve_of(groups[0], View())
    assert list(curve.x) == [1, 2, 3, 4]  # the rounds that all three have
    values = [reader.lines[3]["global"]["accuracy"] for _, reader in groups[0].runs]
    assert curve.y[3] == pytest.approx(100 * statistics.fmean(values))
    assert curve.spread[3] == pytest.approx(100 * statistics.stdev(values))
    assert [len(group.runs) for group in grouped(runs, by_seed=True)] == [1] * 6


def test_bytes_and_seconds_add_up_over_rounds(runs):
    _, reader = runs[0]
    sent = x_of(reader.lines, "bytes")
    assert [sent[r] for r in (1, 2, 3)] == pytest.approx([1.9, 3.8, 5.7])
    seconds = [sum(line["seconds"].values()) for line in reader.lines]
    assert x_of(reader.lines, "seconds")[3] == pytest.approx(sum(seconds[:3]))


def test_the_table_has_one_row_a_group_and_the_keys_that_differ(runs):
    groups = grouped(runs)
    rows = {row[0]: row for row in result_rows(groups, View())}
    assert rows["moon"][1:3] == ["3", "4–6"]
    assert {group.label for group in groups} == {"fedavg", "moon"}
    assert config_rows(groups) == [["method", *(group.label for group in groups)]]


def test_the_csv_has_every_point(runs):
    groups = grouped(runs)
    table = list(csv.reader(io.StringIO(as_csv(groups, View()))))
    points = table[table.index([]) + 2 :]
    assert len(points) == sum(len(reader.lines) for _, reader in runs)
    _, run, _, r, *_, value = points[0]
    reader = next(reader for entry, reader in runs if entry.name == run)
    expected = 100 * reader.lines[int(r) - 1]["global"]["accuracy"]
    assert float(value) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cell", ["=1+1", "+x", "@SUM(A1)", "-cmd|' /C calc'!A0", "\tx"])
def test_a_cell_is_no_formula(cell):
    assert harmless(cell) == f"'{cell}"
    assert harmless("-1.5") == "-1.5"


def test_latex_is_escaped():
    assert latex("a_b & 50% ±\\x{}") == r"a\_b \& 50\% $\pm$\textbackslash{}x\{\}"


@pytest.mark.parametrize("query", [{"smooth": "nan"}, {"smooth": "x"}, {"x": "y", "curve": "z"}])
def test_a_choice_that_is_unknown_has_its_default(query):
    assert view_of(query) == View()


def test_losses_have_their_own_axis(runs):
    figure = chart(grouped(runs), View(curve="loss.contrastive", log_y=True))
    assert figure["layout"]["yaxis"]["title"]["text"] == "loss"
    assert figure["layout"]["yaxis"]["type"] == "log"
