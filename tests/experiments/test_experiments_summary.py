"""The archive of finished runs, and the page and README table made from it."""

import json
import re
import shutil
import zipfile
from pathlib import Path
from random import Random

import pytest

from keel.cli.main import main
from keel.experiments.archive import copies, pack, unpacked
from keel.experiments.claims import CHANCE
from keel.experiments.measure import History
from keel.experiments.plan import job_name, load_job, runs_needed
from keel.experiments.recipe import parse_recipe
from keel.experiments.runs import Options
from keel.experiments.summary import evidence_in, write_summary
from server_app.run_reader import RunReader
from tests.tools.run_directories import append_round, line_of, make_run, make_table

root = Path(__file__).parent.parent.parent
RESULTS = root / "docs" / "results"
ARCHIVES = sorted((RESULTS / "histories").glob("*.zip"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """FedCKA, Table 2, alpha 5, on a private folder: three seeds of FedAvg and of FedCKA."""
    changes = {"source": f"folder:{tmp_path}/private/cifar10-jpg", "num-rounds": 41}
    only = ["FedAvg", "FedCKA", "alpha 5"]
    return make_table(tmp_path / "out", "fedcka-table-2", only, changes=changes, seeds=3)


def test_page_table_and_curves_of_this_repository_are_those_of_its_archive(tmp_path):
    """Archived runs in, the committed page out: `keel experiments summary` makes it."""
    page, readme = tmp_path / "papers.md", tmp_path / "README.md"
    readme.write_text((root / "README.md").read_text())
    written = write_summary(RESULTS / "histories", page, readme)
    committed = [RESULTS / "papers.md", root / "README.md", *sorted(RESULTS.glob("curves/*.svg"))]
    assert [path.name for path in written] == [path.name for path in committed]
    for ours, theirs in zip(written, committed, strict=True):
        assert ours.read_text() == theirs.read_text(), f"{theirs}: run `keel experiments summary`"
    assert not re.search(r"/(tmp|root|home|work)/", page.read_text())


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.stem)
def test_an_archive_has_the_name_that_its_job_has_today(path):
    """Otherwise archiving more seeds would write another one beside it."""
    with zipfile.ZipFile(path) as archive:
        about = json.loads(archive.read(f"jobs/{path.stem}.json"))
    recipe = parse_recipe(about["text"], Path(about["recipe"]))
    options = Options(about["scale"], about["changes"], about["seeds"], about["full_grid"])
    assert job_name(recipe, options) == path.stem


@pytest.mark.parametrize("name", ["README.md", "docs/results/papers.md"])
def test_what_chance_decides_is_said_in_the_same_words(name):
    text = " ".join((root / name).read_text().split())
    assert CHANCE[0].upper() + CHANCE[1:] in text


def test_an_archive_is_small_names_no_folder_and_gives_the_verdicts_of_the_runs(output, tmp_path):
    (path,) = pack(output, tmp_path / "histories")
    content = path.read_bytes()
    assert len(content) < 20_000  # six runs of 41 rounds
    with zipfile.ZipFile(path) as archive:
        text = "".join(archive.read(name).decode() for name in archive.namelist())
    for said in (text, path.name):
        assert str(tmp_path) not in said
        assert "private" not in said  # a part of the source's path, which a job's name has
    assert "participants" not in text
    assert pack(output, tmp_path / "histories") == [path]
    assert path.read_bytes() == content
    (ours,) = evidence_in(output)
    with unpacked(tmp_path / "histories") as (copy,):
        (theirs,) = evidence_in(copy)
    assert [(c.text, c.verdict, c.seeds) for c in theirs.claims] == [
        (c.text, c.verdict, c.seeds) for c in ours.claims
    ]
    for archived, claim in zip(theirs.claims, ours.claims, strict=True):
        assert (archived.effect is None) == (claim.effect is None)
        assert archived.effect == pytest.approx(claim.effect or archived.effect, abs=0.01)


def test_restored_runs_are_finished_and_archive_as_before(output, tmp_path, refusal, printed):
    (path,) = pack(output, tmp_path / "histories")
    before, source = path.read_bytes(), f"folder:{tmp_path}/private/cifar10-jpg"
    shutil.rmtree(output / "runs")
    restore = ["experiments", "restore", str(path), "--output", str(output)]
    for wrong in ([], ["--source", "folder:/data/cifar10"], ["--source", "npz:/data/cifar10-jpg"]):
        assert "--source" in refusal(*restore, *wrong)
    assert not (output / "runs").exists()
    assert main([*restore, "--source", source + "/"]) == 0
    (interrupted, *_) = (output / "runs").glob("*/*/config.json")
    interrupted.unlink()
    paths = {Path(line) for line in printed(*restore, "--source", source).splitlines()}
    assert len(paths) == 6
    (job,) = (output / "jobs").glob("*.json")
    recipe, how = load_job(job)
    needed = runs_needed(recipe, recipe.cells, how, output, ())
    assert {run.finished() for run in needed} == paths
    assert pack(output, tmp_path / "histories") == [path]
    assert path.read_bytes() == before


def test_a_copy_counts_the_updates_that_were_left_out_and_names_no_client(tmp_path):
    run = make_run(tmp_path / "run", {}, 2, num_written=0, status="failed: /home/jane: not finite")
    left_out = {"site-a": "values that are not finite", "site-b": "no answer"}
    append_round(run, line_of(1, Random(0)) | {"left_out": left_out})
    partial = {"evaluation_left_out": {"site-a": "personal-loss is nan, not finite"}}
    append_round(run, line_of(2, Random(0)) | partial)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, text in copies(run):
        assert "site-" not in text
        assert "jane" not in text
        (copy / name).write_text(text)
    read = RunReader(copy)
    found = History(read.history, read.clients())
    assert (found.num_left_out, found.rounds_not_finite) == (2, 1)
    assert (found.num_not_evaluated, found.rounds_partial) == (1, 1)


def test_what_is_no_archive_or_was_changed_is_refused(output, tmp_path, refusal):
    (path,) = pack(output, tmp_path / "histories")
    cut, other = tmp_path / "cut.zip", tmp_path / "other.zip"
    cut.write_bytes(path.read_bytes()[:-100])
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("jobs/../../escaped.json", "{}")
    for wrong in (cut, other, tmp_path, tmp_path / "none.zip"):
        assert str(wrong) in refusal("experiments", "restore", str(wrong), "--output", str(output))


def test_an_archive_loses_no_run_to_another_output(output, tmp_path):
    (path,) = pack(output, tmp_path / "histories")
    before = path.read_bytes()
    shutil.rmtree(next((output / "runs").iterdir()))
    with pytest.raises(ValueError, match=str(path)):
        pack(output, tmp_path / "histories")
    assert path.read_bytes() == before
