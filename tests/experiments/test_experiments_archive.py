"""Archived runs in, the same numbers, intervals and verdicts out; the page made from them."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from keel.experiments.jobs import folder_of, job_name, load_job
from keel.experiments.results import runs_needed
from tests.tools.run_directories import make_table
from tools.archived_runs import archive, unpacked
from tools.headlines import evidence_in
from tools.results_page import write_page

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "results"
ARCHIVES = sorted((RESULTS / "histories").glob("*.zip"))
# of the judged claims and all cells; made at commit 3abfafb2, whose code was another
GOLDEN = json.loads((Path(__file__).parent / "archived_results.json").read_text())


@pytest.fixture(scope="module")
def outputs():
    """The archives, unpacked."""
    with unpacked(RESULTS / "histories") as outputs:
        yield outputs


@pytest.fixture(scope="module")
def evidence(outputs):
    """What each archive says."""
    return {output.name: evidence_in(output)[0] for output in outputs}


def test_every_archive_is_compared_has_its_jobs_name_and_runs_that_its_report_finds(outputs):
    """Under another name, archiving more seeds would write another one beside it."""
    assert [path.stem for path in ARCHIVES] == sorted(GOLDEN)
    for output in outputs:
        recipe, options = load_job(output / "jobs" / f"{output.name}.json")
        assert job_name(recipe, options) == output.name
        found = runs_needed(recipe.cells, options, folder_of(recipe, options, output))
        names = {run.name for _, run in found if run.status}
        assert names == {path.name for path in output.glob("runs/*/*")}


@pytest.mark.parametrize("name", GOLDEN)
def test_archived_runs_give_the_numbers_that_they_gave(name, evidence):
    found = {
        " | ".join(cell): {
            "mean": result.mean,
            "deviation": result.deviation,
            "by_seed": {str(seed): number for seed, number in result.by_seed.items()},
        }
        for cell, result in evidence[name].results.items()
    }
    for cell, expected in GOLDEN[name]["cells"].items():
        assert found.pop(cell) == {key: pytest.approx(value) for key, value in expected.items()}
    assert found == {}


@pytest.mark.parametrize("name", GOLDEN)
def test_archived_runs_give_the_verdicts_that_they_gave(name, evidence):
    verdicts = {v.claim.text: v.on_all or v for v in evidence[name].claims if v.num_seeds}
    assert verdicts.keys() == GOLDEN[name]["claims"].keys()
    for text, expected in GOLDEN[name]["claims"].items():
        verdict = verdicts[text]
        assert (verdict.decision, verdict.num_seeds) == (expected["decision"], expected["seeds"])
        for key in ("effect", "interval", "paper_effect"):
            assert getattr(verdict, key) == pytest.approx(expected[key]), (text, key)


def test_page_table_and_curves_of_this_repository_are_those_of_its_archive(tmp_path):
    """Archived runs in, the committed page out."""
    page, readme = tmp_path / "papers.md", tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    written = write_page(page=page, readme=readme)
    committed = [RESULTS / "papers.md", ROOT / "README.md", *sorted(RESULTS.glob("curves/*.svg"))]
    assert [path.name for path in written] == [path.name for path in committed]
    for ours, theirs in zip(written, committed, strict=True):
        assert ours.read_text() == theirs.read_text(), f"{theirs}: see tools/results_page.py"
    for text in (page.read_text(), readme.read_text()):
        assert not re.search(r"/(tmp|root|home|work|data/[0-9a-f]{6})/", text)


@pytest.fixture
def output(tmp_path) -> Path:
    """FedCKA, Table 2, alpha 5, on a private folder: three seeds of FedAvg and of FedCKA."""
    changes = {"source": f"folder:{tmp_path}/private/cifar10-jpg", "num-rounds": 41}
    only = ["FedAvg", "FedCKA", "alpha 5"]
    return make_table(tmp_path / "out", "fedcka-table-2", only, changes=changes, seeds=3)


def test_an_archive_is_small_names_no_folder_and_gives_the_verdicts_of_the_runs(output, tmp_path):
    (path,) = archive(output, tmp_path / "histories")
    content = path.read_bytes()
    assert len(content) < 20_000  # six runs of 41 rounds
    with zipfile.ZipFile(path) as file:
        text = "".join(file.read(name).decode() for name in file.namelist())
    for said in (text, path.name):
        assert str(tmp_path) not in said
        assert "private" not in said  # a part of the source's path, which a job's name has
    assert "participants" not in text
    assert archive(output, tmp_path / "histories") == [path]
    assert path.read_bytes() == content
    (ours,) = evidence_in(output)
    with unpacked(tmp_path / "histories") as (copy,):
        (theirs,) = evidence_in(copy)
    for one, other in zip(theirs.claims, ours.claims, strict=True):
        assert (one.claim, one.reading, one.seeds) == (other.claim, other.reading, other.seeds)
        assert one.effect == pytest.approx(other.effect, abs=0.01)


def test_an_archive_loses_no_run_to_another_output(output, tmp_path):
    (path,) = archive(output, tmp_path / "histories")
    before = path.read_bytes()
    shutil.rmtree(next(output.glob("runs/*/fedavg*")))
    with pytest.raises(ValueError, match=str(path)):
        archive(output, tmp_path / "histories")
    assert path.read_bytes() == before
