"""Results in Python: a table of runs, curves with a band, the tables of a sweep."""

import json
from pathlib import Path

import numpy as np
import pytest
from data_fixtures import make_npz, random_images
from run_fixtures import SMALL

import keel
from keel.cli.main import main
from tests.tools.run_directories import make_table

pytestmark = pytest.mark.end_to_end  # they train whole runs

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two methods with two seeds each, and macro-F1."""
    folder = tmp_path_factory.mktemp("results")
    for method in ("fedavg", "ditto"):
        for seed in (0, 1):
            keys = SMALL | {"output-dir": str(folder), "method": method, "seed": seed}
            keys |= {"num-rounds": 2, "local-test-fraction": 0.2, "metrics": "macro-f1"}
            keel.run(keys, run_name=f"{method}-{seed}", clients=2, quiet=True)
    return folder


def test_runs_are_rows(folder):
    table = keel.runs(folder)
    assert {*table["run"]} == {"fedavg-0", "fedavg-1", "ditto-0", "ditto-1"}
    row = table.set_index("run").loc["ditto-1"]
    assert (row["method"], row["seed"], row["rounds"], row["state"]) == ("ditto", 1, 2, "finished")
    history = keel.load_run(row["directory"]).history
    assert row["global.accuracy"] == history["accuracy/global.accuracy"].iloc[-1]
    assert row["personal.macro-f1"] == history["score/personal.macro-f1"].iloc[-1]
    assert {*keel.runs(folder, method="fedavg", seed=[1, 2])["run"]} == {"fedavg-1"}
    with pytest.raises(ValueError, match="method"):
        keel.runs(folder, methd="fedavg")


def test_a_comparison_draws_means_and_bands(folder, tmp_path):
    runs = keel.runs(folder)
    of = ["global.accuracy", "global.macro-f1"]
    figure = keel.compare(runs, by="method", of=of, band="std")
    accuracy, f1 = figure.axes
    assert (accuracy.get_ylabel(), f1.get_ylabel()) == ("accuracy (%)", "macro-f1")
    values = [
        100 * keel.load_run(folder / f"ditto-{seed}").history["accuracy/global.accuracy"]
        for seed in (0, 1)
    ]
    lines = {line.get_label().strip().partition(",")[0]: line for line in accuracy.lines}
    assert lines["ditto"].get_ydata() == pytest.approx(np.mean(values, axis=0))
    place = [*lines].index("ditto")
    edges = accuracy.collections[place].get_paths()[0].vertices[:, 1]
    spread = np.std(values, axis=0, ddof=1)
    assert edges.max() == pytest.approx((np.mean(values, axis=0) + spread).max())
    assert accuracy.get_legend().get_window_extent().x0 >= accuracy.get_window_extent().x1
    figure.savefig(tmp_path / "fig.pdf")
    assert (tmp_path / "fig.pdf").stat().st_size > 1000


def test_runs_on_other_data_are_told_apart_and_are_not_averaged(tmp_path):
    keys = SMALL | {"output-dir": str(tmp_path / "runs"), "num-rounds": 1, "model": "cnn-fedreco"}
    keys |= {"data-fraction": 1.0, "min-samples": 1}
    for seed in (0, 1):
        y = np.array([0, 0, 0, 1, 1, seed])
        x = random_images(6, 30, 30, seed=3)
        spec = make_npz(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x + 1, y_test=y)
        keel.run(keys | {"source": spec, "seed": seed}, clients=2, quiet=True)
    runs = keel.runs(tmp_path / "runs")
    assert runs["data digest"].nunique() == 2
    [axis] = keel.compare(runs, by="method").axes
    assert len(axis.get_legend().get_texts()) == 2


def test_runs_that_have_not_measured_a_curve_are_named(folder, caplog):
    keel.compare(keel.runs(folder), of="personal.mean")
    [warning] = caplog.messages
    assert all(name in warning for name in ("fedavg-0", "fedavg-1"))
    assert "ditto" not in warning


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"of": "global.f1"}, "global.f1"),
        ({"of": "accuracy"}, "accuracy"),
        ({"by": "metod"}, "method"),
        ({"band": "sd"}, "std"),
    ],
)
def test_what_is_wrong_with_a_comparison_is_named(folder, options, named):
    with pytest.raises(ValueError, match=named):
        keel.compare(keel.runs(folder), **options)


def test_the_command_draws_the_same(folder, tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    runs = [str(folder / name) for name in ("fedavg-0", "fedavg-1", "ditto-0")]
    options = ["--by", "method", "--of", "global.macro-f1", "--band", "range", "-o", str(plot)]
    assert main(["compare", *runs, *options]) == 0
    assert str(plot) in capsys.readouterr().out
    assert plot.stat().st_size > 1000


def test_a_sweep_is_a_table_and_a_frame(tmp_path):
    make_table(tmp_path, str(ROOT / "docs" / "sweep.yaml"), seeds=2)
    sweep = keel.load_sweep(tmp_path)
    frame, table = sweep.frame(), sweep.table()
    assert {*frame["row"]} == {*table.index}
    assert {*frame["seed"]} == {0, 1}
    row, column = table.index[0], table.columns[0]
    values = frame[(frame["row"] == row) & (frame["column"] == column)]["value"]
    assert table.loc[row, column].startswith(f"{values.mean():.2f} ± {values.std():.2f}")
    assert json.loads((Path(frame["directory"][0]) / "config.json").read_text())["config"]
    with pytest.raises(ValueError, match="nothing was run"):
        keel.load_sweep(tmp_path / "nowhere")
