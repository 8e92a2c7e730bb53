"""The tables of the report: which number is the best, and which columns there are."""

import csv
import html
import io
import json
import re
import tracemalloc
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from keel.experiments.measure import History, Take
from keel.experiments.recipe import load_recipe, shipped_recipes
from keel.experiments.rendering import Section, label_of, write_report
from keel.experiments.runs import Options
from keel.views.charts import static_file
from protocol.config import resolve_config
from server_app.record import split
from tests.tools.run_directories import line_of, make_table

ROOT = Path(__file__).parent.parent.parent


def section(
    means, paper=None, is_time=False, code="abc", precision=(), failed=(), unreached=(), mixed=""
):
    results = {}
    for name, mean in means.items():
        take = Take("seconds a round" if is_time in (True, name) else "final")
        cell = SimpleNamespace(column=SimpleNamespace(name="c"), take=take, paper=paper)
        results[name, "c"] = SimpleNamespace(
            cell=cell, mean=mean, code=(code or name,), precision=precision and (name,),
            failures={0: "diverged"} if name in failed else {},
            reached=[mean], counted=dict.fromkeys(range(1 + (name in unreached)), mean),
            data={("digits", name if mixed == "data" else "")},
            machines=[name if mixed == "machines" else ""],
        )  # fmt: skip
    return Section(None, None, "", results, [])


def ranks(found):
    return {row: found.rank(result) for (row, _), result in found.results.items()}


def test_the_best_of_a_column_and_the_second_are_marked():
    means = {"a": 50.0, "b": None, "c": 70.0, "d": 60.0}
    assert ranks(section(means)) == {"a": "", "b": "", "c": "best", "d": "second"}
    assert ranks(section(means, is_time=True)) == {"a": "best", "b": "", "c": "", "d": "second"}
    assert ranks(section({"a": 1.0, "b": None})) == {"a": "", "b": ""}
    of_different_code = section(means, code="")
    assert set(ranks(of_different_code).values()) == {""}
    assert set(ranks(section(means, precision="each its own")).values()) == {""}
    assert ranks(section(means, failed="c")) == {"a": "second", "b": "", "c": "", "d": "best"}
    assert ranks(section(means, is_time=True, unreached="a")) == {
        **{"a": "", "b": "", "c": "second", "d": "best"}
    }
    assert set(ranks(section(means, mixed="data")).values()) == {""}
    assert set(ranks(section(means, is_time=True, mixed="machines")).values()) == {""}
    assert ranks(section(means, mixed="machines"))["c"] == "best"
    assert set(ranks(section(means, is_time="a")).values()) == {""}  # seconds beside accuracies
    fewer_seeds = section(means)
    fewer_seeds.results["d", "c"].counted = {1: 60.0}
    assert set(ranks(fewer_seeds).values()) == {""}  # a seed may be easier than another
    assert ranks(section({"a": 1.0, "b": 1.0, "c": 0.0})) == {
        **{"a": "best", "b": "best", "c": "second"}
    }


def test_a_sweep_without_numbers_of_a_paper_has_no_columns_for_them():
    assert not section({"a": 1.0}).has_paper_numbers
    assert section({"a": 1.0}, paper=2.0).has_paper_numbers


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """FedRCL's Table 1 in part, with a row that diverged; a sweep; a table at a reduced scale."""
    output = tmp_path_factory.mktemp("report")
    names = ["FedAvg", "MOON", "FedRCL", "CIFAR-10", "alpha 0.05", "alpha 0.6"]
    make_table(output, "fedrcl-table-1", names, diverging=["MOON"])
    make_table(output, str(ROOT / "docs" / "sweep.yaml"), seeds=2)
    make_table(output, "fedcka-table-1", ["FedAvg", "FedCKA", "CIFAR-10"], scale="hour")
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


def test_the_page_fits_phones_has_a_dark_scheme_and_names_nothing_elsewhere(report):
    page = (report / "report.html").read_text()
    assert '<meta name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    own = page.replace(static_file("plotly.js").read_text(), "")
    assert re.findall(r"https?://", own) == []


def test_headline_claims_come_first_by_paper_with_effect_interval_seeds_and_scale(report):
    page = (report / "report.html").read_text()
    first = page.partition('<section id="claims">')[2].partition("</section>")[0]
    rows = [re.sub(r"<[^>]*>", "|", row) for row in first.split("<tr>")]
    (row,) = [row for row in rows if "FedRCL above FedAvg in CIFAR-10, alpha 0.6, 500R" in row]
    assert re.search(r"[+]\d+[.]\d\d \[[+-]\d+[.]\d\d, [+-]\d+[.]\d\d\]", row)
    assert "|+5.07|" in row
    assert re.search(r"\|3\|.*Table 1, scale paper", row)
    assert first.index("<h2>FedRCL") < first.index("FedRCL above FedAvg")
    assert "alpha 0.1, 500R" not in page  # a claim that was not asked for


def test_groups_of_columns_are_rows_of_headings(report):
    section = section_in(report, "fedrcl")
    heads = re.findall(r'scope="colgroup" colspan="(\d)">([^<]*)', section)
    assert heads == [("4", "CIFAR-10"), ("2", "alpha 0.05"), ("2", "alpha 0.6")]
    last = re.findall(r'scope="col" class="number"><button type="button">([^<]*)', section)
    assert last == ["500R", "1000R"] * 2


def test_a_diverged_seed_is_shown_in_its_cell_and_in_the_exports(report):
    assert section_in(report, "fedrcl").count("diverged 1/3") >= 4
    found = list(csv.DictReader(io.StringIO(table(report, "fedrcl", "csv"))))
    assert {r["row"]: (r["seeds"], r["diverged"]) for r in found} == {
        "FedAvg": ("3", "0"), "MOON": ("2", "1"), "FedRCL": ("3", "0"),
    }  # fmt: skip
    lines = table(report, "fedrcl", "tex").splitlines()
    assert [line.count("diverged 1/3") for line in lines if line.startswith("MOON")] == [4]
    assert sum(line.count("diverged") for line in lines) == 4


def test_exports_hold_the_numbers_of_the_table(report):
    cells = json.loads(table(report, "fedrcl", "json"))["cells"]
    rows = list(csv.DictReader(io.StringIO(table(report, "fedrcl", "csv"))))
    text = table(report, "fedrcl", "tex")
    assert len(cells) == len(rows) == 12
    for cell, row in zip(cells, rows, strict=True):
        assert float(row["mean"]) == cell["mean"]
        assert float(row["paper"]) == cell["paper"]
        assert f"{cell['mean']:.2f}" in text
    assert text.count(r"\\") == 3 + 3  # headings and rows
    assert r"\multicolumn{4}{c}{CIFAR-10}" in text
    assert r"\cmidrule(lr){2-3}\cmidrule(lr){4-5}" in text
    assert text.count(r"\textbf") == text.count(r"\underline") == 4
    assert len(re.findall(r"(?<!\\)&", text)) == 6 * 4 - 3 - 2  # spans join 3 and 2 columns


def test_a_recipe_that_departs_from_its_paper_is_not_called_the_papers_setting(report):
    remark = "the CNN's rate is 0.01, not the printed 0.1"
    shown = html.unescape(section_in(report, "fedcka"))
    setting = re.search('<p class="scaled">([^<]*)', shown)[1]
    assert setting.startswith("Not the paper's setting: ")
    assert setting.endswith(f"; {remark}.")
    content = json.loads(table(report, "fedcka", "json"))
    assert content["remark"] == remark
    whole = Section(load_recipe("fedreco-lenet-table-1"), None, "", {}, [])
    assert whole.deviation.startswith("Not the paper's setting: guessed settings")
    claim = SimpleNamespace(verdict="reproduced", remarks="after 2 of 3 seeds", seeds=2)
    assert whole.verdict(claim) == f"reproduced; after 2 of 3 seeds; {whole.recipe.remark}"
    not_run = SimpleNamespace(verdict="not tested", remarks="", seeds=0)
    assert whole.verdict(not_run) == "not tested"


def test_every_recipe_with_another_rate_or_optimizer_than_its_papers_says_so():
    for recipe in map(load_recipe, shipped_recipes()):
        notes = " ".join(recipe.notes)
        if "states a learning rate of 0.1" in notes:
            assert "not the printed 0.1" in recipe.remark, recipe.name
        if "local steps are plain SGD" in notes:
            assert "momentum 0.9, not plain SGD" in recipe.remark, recipe.name


def test_every_recipe_of_hard_mined_pairs_says_so():
    """Their report said that the notes name all choices, and that the rest is as the paper says."""
    for recipe in map(load_recipe, shipped_recipes()):
        configs = [resolve_config(cell.keys).flat for cell in recipe.cells]
        if any(flat.get(f"{flat['method']}.mining") == "hard" for flat in configs):
            assert "hard-mined" in " ".join(recipe.notes), recipe.name


def test_settings_say_what_the_scale_made_of_the_papers(report):
    scaled, whole = section_in(report, "fedcka"), section_in(report, "fedrcl")
    rounds = re.search(r"num-rounds</th><td[^>]*>(\d+)</td><td[^>]*>100</td>", scaled)
    assert rounds
    assert f"Not the paper's setting: num-rounds {rounds[1]} (paper: 100)" in html.unescape(scaled)
    assert "The paper's setting, as far as the paper states it; the notes" in html.unescape(whole)
    assert "paper, where it differs" not in whole
    for words in ('<td class="text">cifar10</td>', "torch 2.11.0", "cpu: made up", "Code: sources"):
        assert words in whole


def test_a_sweep_of_ones_own_says_nothing_of_a_paper(report):
    section = html.unescape(section_in(report, "sweep"))
    assert "paper's" not in section
    assert "scale paper" not in section
    assert "as in the recipe; seeds 0, 1" in section
    assert 'class="paper"' not in section
    text = (report / "report.md").read_text()
    of_sweep = text.partition("FedProx's mu for")[2].partition("\n# ")[0].partition("\n## ")[0]
    assert "\n| key | here |\n|---|---|\n| " in of_sweep
    assert "\n| key | here | paper, where it differs |\n|---|---|---|\n| " in text
    assert "difference</label>" not in section


def test_a_claim_names_its_scale_and_how_many_keys_were_changed():
    options = Options("hour", {"lr": 0.1, "num-rounds": 3}, [0], False)
    paper, own = load_recipe("fedrcl-table-1"), load_recipe(str(ROOT / "docs" / "sweep.yaml"))
    assert Section(paper, options, "", {}, []).scale == "scale hour, 2 keys changed"
    options = Options("paper", {"lr": 0.1}, [0], False)
    assert Section(own, options, "", {}, []).scale == "1 key changed"
    assert label_of(own, options) == "lr=0.1"
    assert label_of(paper, options).startswith("scale paper, lr=0.1")


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


def test_names_with_markup_are_text_on_the_page(tmp_path):
    recipe = tmp_path / "own.yaml"
    name = "</script><img src=x onerror=alert(1)>"
    recipe.write_text(
        "config: {source: digits, num-clients: 2, num-rounds: 3}\n"
        f"rows:\n  {json.dumps(name)}: {{method: fedavg}}\n"
    )
    make_table(tmp_path / "out", str(recipe), seeds=1)
    page = write_report(tmp_path / "out")[0].read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    assert "=alert" not in (json.loads(table(tmp_path / "out", "own", "json"))["title"])


def test_claims_that_read_the_same_runs_at_two_rounds_count_once(report):
    section = section_in(report, "fedrcl")
    num = re.findall(r"(\d+) (?:reproduced|not reproduced|inconclusive)", section.split("<p>")[-1])
    assert re.search(r"4 at an earlier round of the same runs not counted", section)
    assert sum(map(int, num)) == 4  # two claims at two alphas, each at 500 and at 1000 rounds


def test_a_history_in_memory_takes_less_than_100_bytes_a_round():
    lines = [split(line_of(n, Random(n)))[0] for n in range(1, 5001)]
    tracemalloc.start()
    try:
        kept = History(lines)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(kept.points("global.accuracy")) == 5000
    assert size < 100 * 5000
