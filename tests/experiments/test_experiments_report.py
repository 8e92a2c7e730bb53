"""The report: its tables, settings, claims and charts, and the exports of each table."""

import csv
import html
import io
import json
import re
from pathlib import Path

import pytest
from experiment_fixtures import (
    NOT_FINITE,
    THREE,
    TWO_ROWS,
    folder_in,
    leave_all,
    leave_run,
    options,
    recipe_of,
    results_in,
)

from keel.cli.main import main
from keel.experiments.figures import curve_of, run_charts
from keel.experiments.jobs import save_job
from keel.experiments.recipe import load_recipe, parse_recipe
from keel.experiments.report import write_report
from keel.experiments.results import runs_needed
from keel.experiments.tables import ranks_of
from keel.views.charts import static_file
from tests.tools.run_directories import make_table

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """FedRCL's Table 1 in part, with a row that diverged; a sweep; a table of fewer rounds."""
    output = tmp_path_factory.mktemp("report")
    names = ["FedAvg", "MOON", "FedRCL", "CIFAR-10", "alpha 0.05", "alpha 0.6"]
    make_table(output, "fedrcl-table-1", names, diverging=["MOON"])
    make_table(output, str(ROOT / "docs" / "sweep.yaml"), seeds=2)
    make_table(
        output, "fedcka-table-1", ["FedAvg", "FedCKA", "CIFAR-10"], changes={"num-rounds": 20}
    )
    write_report(output)
    return output


def table(report: Path, name: str, kind: str) -> str:
    (path,) = report.glob(f"tables/{name}*.{kind}")
    return path.read_text()


def section_in(report: Path, name: str) -> str:
    """The section of one table in the page."""
    (job,) = report.glob(f"jobs/{name}*.json")
    page = (report / "report.html").read_text()
    return page.partition(f'<section class="result" id="{job.stem}">')[2].partition("</section>")[0]


def rows_of(output: Path) -> dict[str, str]:
    """The cells in report.md, by row, of a table of one column."""
    lines = [line.split(" | ") for line in write_report(output)[1].read_text().splitlines()]
    return {line[0].strip("| "): line[1].strip("| ") for line in lines if len(line) == 2}


def test_the_page_fits_phones_has_a_dark_scheme_and_names_nothing_elsewhere(report):
    page = (report / "report.html").read_text()
    assert '<meta name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    own = page.replace(static_file("plotly.js").read_text(), "")
    assert re.findall(r"https?://", own) == []


def test_headline_claims_come_first_by_paper_with_effect_interval_and_seeds(report):
    page = (report / "report.html").read_text()
    first = page.partition('<section id="claims">')[2].partition("</section>")[0]
    rows = [re.sub(r"<[^>]*>", "|", row) for row in first.split("<tr>")]
    (row,) = [row for row in rows if "FedRCL above FedAvg in CIFAR-10, alpha 0.6, 500R" in row]
    assert re.search(r"[+]\d+[.]\d\d \[[+-]\d+[.]\d\d, [+-]\d+[.]\d\d\]", row)
    assert "|+5.07|" in row
    assert re.search(r"\|3\|.*Table 1\|", row)
    assert "alpha 0.1, 500R" not in page  # a claim that was not asked for


def test_groups_of_columns_are_rows_of_headings(report):
    section = section_in(report, "fedrcl")
    heads = re.findall(r'scope="colgroup" colspan="(\d)">([^<]*)', section)
    assert heads == [("4", "CIFAR-10"), ("2", "alpha 0.05"), ("2", "alpha 0.6")]
    last = re.findall(r'scope="col" class="number"><button type="button">([^<]*)', section)
    assert last == ["500R", "1000R"] * 2


def test_exports_hold_the_numbers_of_the_table(report):
    rows = list(csv.DictReader(io.StringIO(table(report, "fedrcl", "csv"))))
    text = table(report, "fedrcl", "tex")
    page = section_in(report, "fedrcl")
    assert len(rows) == 12
    for row in rows:
        assert all(
            f"{float(row[key]):.2f}" in each for key in ("mean", "paper") for each in (text, page)
        )
    assert text.count(r"\\") == 3 + 3  # headings and rows
    assert r"\multicolumn{4}{c}{CIFAR-10}" in text
    assert text.count(r"\textbf") == text.count(r"\underline") == 4
    assert {r["row"]: (r["seeds"], r["diverged"]) for r in rows} == {
        "FedAvg": ("3", "0"), "MOON": ("2", "1"), "FedRCL": ("3", "0"),
    }  # fmt: skip
    (moon,) = [line for line in text.splitlines() if line.startswith("MOON")]
    assert moon.count("diverged 1/3") == 4


def test_settings_are_shown_beside_the_papers_where_they_differ(report):
    scaled, whole = (html.unescape(section_in(report, name)) for name in ("fedcka", "fedrcl"))
    assert re.search(r"num-rounds</th><td[^>]*>20</td><td[^>]*>100</td>", scaled)
    remark = load_recipe("fedcka-table-1").remark
    about = re.search('<p class="changed">([^<]*)', scaled)[1]
    assert "num-rounds 20 (paper: 100)" in about
    assert about.endswith(f"; {remark}.")
    assert "paper, where it differs" not in whole
    for words in ('<td class="text">cifar10</td>', "torch 2.11.0", "cpu: made up", "Code: sources"):
        assert words in whole


def test_every_key_that_a_sweep_sets_is_among_its_settings(tmp_path):
    text = TWO_ROWS.replace("{source: digits", "{source: digits, data-fraction: 0.3, flip: true")
    text = text.replace("{method: fedprox}", "{method: fedprox, fedprox.mu: 0.7}")
    leave_all(tmp_path, text, options(seeds=[0, 1, 2], changes={"device": "cpu"}))
    lines = write_report(tmp_path)[1].read_text().splitlines()
    expected = ("data-fraction | 0.3", "flip | true", "fedprox.mu | 0.7", "device | cpu")
    assert all(f"| {setting} |" in lines for setting in expected)


def test_a_sweep_of_ones_own_says_nothing_of_a_paper(report):
    section = html.unescape(section_in(report, "sweep"))
    assert "paper's" not in section
    assert 'class="paper"' not in section
    assert "difference</label>" not in section


def test_curves_of_two_columns_of_the_same_runs_are_one_chart_with_the_papers_numbers(report):
    figures = re.findall(
        r'<script type="application/json" [^>]*>(.*?)</script>', section_in(report, "fedrcl"), re.S
    )
    assert len(figures) == 2  # alpha 0.05 and 0.6
    data = json.loads(figures[0])["data"]
    assert [t["name"] for t in data if "name" in t] == ["FedAvg", "MOON", "FedRCL"]
    dotted = [(t["x"][-1], t["y"][0]) for t in data if t["line"].get("dash") == "dot"]
    assert dotted[:2] == [(500, 51.47), (1000, 63.42)]
    assert max(len(t["x"]) for t in data if "name" in t) <= 242


def test_a_curve_is_the_moving_average_where_its_number_is(tmp_path):
    recipe, runs = leave_all(tmp_path, TWO_ROWS.replace("rows:", "take: ema 0.5\nrows:"))
    for run, value in zip(runs[:2], (0.2, 0.4), strict=True):
        lines = [json.loads(t) for t in (run.directory / "history.jsonl").read_text().splitlines()]
        lines[0]["global"] = {"accuracy": value}
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.directory / "history.jsonl").write_text(text)
    assert curve_of(recipe.cells[0], runs[:1]) == [(1, 20.0, 0.0), (2, 35.0, 0.0)]
    (chart,) = run_charts(recipe, results_in(tmp_path, recipe))
    assert "0.5" in chart[0]


def test_measures_of_features_are_compared_over_rows_on_one_axis(tmp_path):
    recipe, runs = leave_all(tmp_path, how=options())
    for run, level in zip(runs, (0.25, 0.75), strict=True):
        path = run.directory / "history.jsonl"
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        lines[1]["diagnostics"] = {"vci": {"mean": level, "global": 2 * level}}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, (title, figure) = run_charts(recipe, results_in(tmp_path, recipe, options()))
    assert "vci" in title
    assert {t["name"]: list(t["y"]) for t in figure["data"] if "name" in t} == {
        **{"FedAvg": [0.25], "FedAvg, global model": [0.5]},
        **{"FedProx": [0.75], "FedProx, global model": [1.5]},
    }


def test_text_of_a_recipe_and_of_runs_is_text_on_the_page(tmp_path):
    name = "</script><img src=x onerror=alert(1)> | bar"
    text = TWO_ROWS.replace("FedAvg:", f"{json.dumps(name)}:").partition("claims")[0]
    leave_all(tmp_path, text, machines=[["x\ud800y"], *5 * [["cpu: a"]]])
    page, markdown = (path.read_text("utf-8") for path in write_report(tmp_path))
    assert "<img src=x" not in page + markdown
    assert "&lt;img src=x" in page
    assert "x?y" in markdown
    assert r"\| bar |" in markdown


def test_what_is_missing_in_a_cell_is_said(tmp_path):
    recipe, runs = leave_all(tmp_path, status=[NOT_FINITE, *5 * ["finished"]])
    (runs[3].directory / "summary.json").unlink()
    rows = rows_of(tmp_path)
    assert rows["FedAvg"] == "51.50 ± 0.71; diverged 1/3"
    assert rows["FedProx"] == "61.00 ± 1.41; 2 of 3 seeds"
    save_job(recipe, options(seeds=[0, 1, 2], changes={"lr": 0.9}), tmp_path, recipe.cells)
    assert "| FedAvg | – |" in write_report(tmp_path)[1].read_text()


@pytest.mark.parametrize(
    "differing", [{"precision": [["bf16"], *5 * [["fp32"]]]}, {"data": "baaaaa"}]
)
def test_numbers_of_runs_that_differ_are_not_averaged(differing, tmp_path):
    recipe, _ = leave_all(tmp_path, **differing)
    results = results_in(tmp_path, recipe)
    assert results["FedAvg", "result"].mean is None
    assert ranks_of(recipe, results) == {}
    charts = str(list(run_charts(recipe, results)))
    assert "FedProx" in charts
    assert "FedAvg" not in charts
    assert "different" in rows_of(tmp_path)["FedAvg"]


def test_the_best_of_a_column_and_the_second_are_marked(tmp_path):
    text = TWO_ROWS.replace("rows:", "rows:\n  MOON: {method: moon}")
    accuracies = [seed / 100 + level for seed in range(3) for level in (0.7, 0.5, 0.6)]
    recipe, runs = leave_all(tmp_path, text, accuracy=accuracies)
    found = ranks_of(recipe, results_in(tmp_path, recipe))
    assert found == {("MOON", "result"): "best", ("FedProx", "result"): "second"}
    (runs[0].directory / "summary.json").unlink()  # a seed may be easier than another
    assert ranks_of(recipe, results_in(tmp_path, recipe)) == {}


def test_runs_of_other_code_are_reported_only_where_there_are_none_of_todays(tmp_path):
    _, runs = leave_all(tmp_path)
    other = tmp_path / "runs" / "0123456789abcdef-torch-2.0.0"
    folder_in(tmp_path).rename(other)
    assert rows_of(tmp_path)["FedAvg"] == "51.00 ± 1.00"
    folder_in(tmp_path).mkdir()
    leave_run(runs[0], 0.9)
    assert rows_of(tmp_path)["FedAvg"] == "90.00; 1 of 3 seeds"


def test_a_job_keeps_the_seed_that_tunes_and_what_was_asked_for_before(tmp_path):
    recipe = recipe_of(TWO_ROWS)
    save_job(recipe, options(seeds=[5]), tmp_path, recipe.cells[:1])
    whole, how = save_job(recipe, options(seeds=[0, 5]), tmp_path, recipe.cells[1:])
    assert (how.seeds, [cell.name for cell in whole.cells]) == (
        *([5, 0], [("FedAvg", "result"), ("FedProx", "result")]),
    )
    assert len(list((tmp_path / "jobs").iterdir())) == 1


def test_another_recipe_of_the_same_name_replaces_no_table(tmp_path):
    recipe = recipe_of(TWO_ROWS)
    save_job(recipe, options(), tmp_path, recipe.cells)
    other = parse_recipe(TWO_ROWS.replace("fedprox", "moon"), Path("other/r.yaml"))
    with pytest.raises(ValueError) as error:
        save_job(other, options(), tmp_path, other.cells)
    assert all(str(each.path.absolute()) in str(error.value) for each in (recipe, other))


@pytest.mark.parametrize(("old", "new"), [("fedprox", "ours"), ('"seeds"', '"sides"'), ("[", "{")])
def test_a_damaged_job_is_named(old, new, tmp_path, refusal):
    leave_all(tmp_path)
    (job,) = (tmp_path / "jobs").iterdir()
    assert old in job.read_text()
    job.write_text(job.read_text().replace(old, new))
    assert str(job) in refusal("experiments", "report", "--output", str(tmp_path))


def test_a_damaged_job_is_not_continued(tmp_path):
    recipe, _ = leave_all(tmp_path)
    (job,) = (tmp_path / "jobs").iterdir()
    job.write_text("{")
    with pytest.raises(ValueError, match=str(job)):
        save_job(recipe, THREE, tmp_path, recipe.cells)


def test_labels_need_no_run(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "shows: labels\nconfig: {source: digits, num-clients: 3}\nrows: {A: {alpha: 0.5}}\n"
    )
    output = str(tmp_path / "out")
    assert main(["experiments", "run", str(recipe), "--output", output]) == 0
    assert main(["experiments", "report", "--output", output]) == 0
    assert len(list((tmp_path / "out" / "figures").glob("*.png"))) == 1


def test_a_listing_counts_the_runs_of_a_recipe(tmp_path, printed):
    cells = load_recipe("fedreco-table-1").cells
    how = options(seeds=[0, 1, 2])
    for _, run in list(runs_needed(cells, how, folder_in(tmp_path)))[:4]:
        leave_run(run, 0.5)
    text = printed("experiments", "list", "--output", str(tmp_path))
    (line,) = [line for line in text.splitlines() if "fedreco-table-1" in line]
    assert "4 of 54" in line
