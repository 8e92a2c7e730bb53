"""The archive of finished runs, and the page and README table made from it."""

import io
import json
import re
import shutil
import zipfile
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from keel.cli.main import main
from keel.experiments import runner
from keel.experiments.archive import copies, pack, restore, unpacked, without_folders, write_zip
from keel.experiments.claims import CHANCE, JudgedClaim
from keel.experiments.measure import History
from keel.experiments.plan import job_name, load_job, runs_needed, selected
from keel.experiments.recipe import load_recipe, parse_recipe
from keel.experiments.rendering import write_report
from keel.experiments.runs import Options, run_of, status_of
from keel.experiments.summary import (
    BEGIN,
    END,
    curves_of,
    evidence_in,
    headlines,
    in_full,
    svg_of,
    verdict_of,
    weight,
    write_summary,
)
from keel.experiments.verify import unfinished, verify
from keel.runs import SavedRun
from protocol.config import resolve_config
from protocol.files import digest
from server_app.history import read_history
from tests.tools.run_directories import make_table

root = Path(__file__).parent.parent.parent
RESULTS = root / "docs" / "results"
EARLY = "at round 41 instead of 100"
OTHER = "sources 0123456789abcdef, torch 2.0.0"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """FedCKA, Table 2, alpha 5: three seeds of FedAvg at 60 to 62 %, FedCKA 3 points above."""
    return fake_job(tmp_path, {}, 0.03)


def fake_job(
    tmp_path: Path, changes: dict[str, float], lead: float, seeds: tuple[int, ...] = (0, 1, 2)
) -> Path:
    """As above, with this lead of FedCKA."""
    recipe, source = load_recipe("fedcka-table-2"), f"folder:{tmp_path}/private/cifar10-jpg"
    changes = {"source": source, "num-rounds": 41, **changes}
    cells, how = (
        selected(recipe, ["FedAvg", "FedCKA", "alpha 5"]),
        Options("paper", changes, list(seeds), full_grid=False),
    )
    runner.save_job(recipe, how, tmp_path, cells)
    for run in runs_needed(recipe, cells, how, tmp_path, ()):
        flat = dict(resolve_config(run.keys).flat) | {"output-dir": str(tmp_path)}
        final = 0.6 + 0.01 * int(flat["seed"]) + lead * (flat["method"] == "fedcka")
        history = [
            {
                **{"round": n, "client_seconds": 9.0, "client_cpu_seconds": 3600.0},
                **{"seconds": {"training": 8.0, "evaluation": 2.0}, "participants": ["a"]},
                **{"losses": {"loss": 1.0}, "left_out": {}},
                "global": {"accuracy": final * n / 41, "loss": 1.0},
            }
            for n in range(1, 42)
        ]
        folder = run.folder / "attempt"
        folder.mkdir(parents=True)
        manifest = {"code": [OTHER], "machines": ["cpu: some"], "split": "abc"}
        manifest["keel"] = ["0.2.0 51716e2fbfa1"]
        for name, content in (
            ("config.json", {"config": flat, "overrides": {}}),
            ("summary.json", {"status": "finished", "directory": str(folder)}),
            ("manifest.json", manifest),
        ):
            (folder / name).write_text(json.dumps(content))
        lines = "".join(json.dumps(line) + "\n" for line in history)
        (folder / "history.jsonl").write_text(lines)
    return tmp_path


def test_an_archive_is_small_says_nothing_of_the_machines_folders_and_is_always_the_same(output):
    (path,) = pack(output, output / "histories")
    content = path.read_bytes()
    assert len(content) < 20_000  # six runs of 41 rounds
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        text = "".join(archive.read(name).decode() for name in names)
    for said in (text, *names, path.name):
        assert str(output) not in said
        assert "private" not in said  # a part of the source's path, which a job's name has
    assert re.search("folder:/data/[0-9a-f]{6}/cifar10-jpg", text)
    assert "participants" not in text
    assert pack(output, output / "histories") == [path]
    assert path.read_bytes() == content
    assert pack(root / "tests" / "experiments" / "none", output) == []


def test_a_history_that_was_changed_after_its_run_is_not_archived(tmp_path):
    output = make_table(tmp_path / "out", "fedcka-table-2", ["FedAvg", "alpha 5"], seeds=2)
    changed = next(output.glob("runs/*/*/history.jsonl"))
    manifest = json.loads((changed.parent / "manifest.json").read_text())
    manifest["files"] = {"history.jsonl": digest(changed.read_bytes())}
    (changed.parent / "manifest.json").write_text(json.dumps(manifest))
    (archived,) = pack(output, tmp_path / "histories")
    before = archived.read_bytes()
    changed.write_text(changed.read_text().replace("0.5", "0.6"))
    with pytest.raises(ValueError, match=f"{changed} was changed after the run: its digest"):
        pack(output, tmp_path / "histories")
    assert archived.read_bytes() == before


def test_an_archive_of_nothing_is_refused(tmp_path, refusal):
    assert refusal("experiments", "archive", str(tmp_path), "--output", str(tmp_path)).startswith(
        f"error: --output {tmp_path}: no run of a recipe"
    )


def test_verdict_and_effect_of_an_archive_are_those_of_the_runs(output):
    pack(output, output / "histories")
    with unpacked(output / "histories") as (copy,):
        (found,) = evidence_in(copy)
    (claim,) = [c for c in found.claims if c.text == "FedCKA above FedAvg in alpha 5"]
    assert (claim.verdict, claim.seeds) == ("reproduced", 3)
    assert claim.effect == pytest.approx(3.0, abs=0.01)
    assert claim.deviations == [
        "num-rounds 41 (paper: 100)",
        "source folder:cifar10-jpg (paper: cifar10)",
    ]
    folder = digest(f"{output}/private/cifar10-jpg".encode())[:6]
    assert found.commands == [
        "keel experiments run fedcka-table-2 --only 'FedAvg;FedCKA;alpha 5' "
        f"--set num-rounds=41 --set source=folder:/data/{folder}/cifar10-jpg"
    ]


def test_the_command_that_adds_seeds_continues_the_runs_that_are_there(tmp_path):
    """With their changes: it named the paper's setting, of which no run would be a third seed."""
    fake_job(tmp_path, {"batch-size": 64}, 0.03, seeds=(0, 1))
    [found] = [h for h in headlines(evidence_in(tmp_path), {}) if h.evidence and h.claim.decide]
    only = "--only 'FedCKA;alpha 5;FedAvg'"
    command = f"keel experiments run fedcka-table-2 {only} --set batch-size=64 --set num-rounds=41"
    assert (found.claim.decide, found.command) == ("3 seeds", f"{command} --seeds 3")


def test_a_job_whose_rows_have_different_columns_has_a_page_and_a_command_for_each_set(output):
    (job,) = (output / "jobs").glob("*.json")
    about = json.loads(job.read_text())
    about["cells"].append(["FedAvg", "alpha 0.1"])
    job.write_text(json.dumps(about))
    pack(output, output / "histories")
    page, readme = output / "papers.md", output / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    write_summary(output / "histories", page, readme)
    text = page.read_text()
    for only in ("'FedAvg;alpha 5;alpha 0.1'", "'FedCKA;alpha 5'"):
        assert f"keel experiments run fedcka-table-2 --only {only} --set" in text
    assert f"| FedCKA | 67.86 | 64.00 ± 1.00 (5); {EARLY} | | |\n" in text
    assert f"| FedAvg | 64.37 | 61.00 ± 1.00; {EARLY} | 50.43 | – |\n" in text


@pytest.mark.parametrize(
    ("leads", "verdict", "half_width"),
    # 12.7062 sd / sqrt(2): the t quantile of one degree of freedom is tan(0.475 pi)
    [((8.0, 9.0), "reproduced", 6.3531), ((8.0, 24.0), "inconclusive", 101.65)],
)
def test_two_seeds_decide_where_they_agree(output, leads, verdict, half_width):
    for path in output.glob("runs/fedcka-*/attempt/history.jsonl"):
        if "seed2-" in str(path):
            shutil.rmtree(path.parent)
            continue
        seed = 1 if "seed1-" in str(path) else 0
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[-1]["global"]["accuracy"] = 0.6 + 0.01 * seed + leads[seed] / 100
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = evidence_in(output)
    (claim,) = [c for c in found.claims if c.text == "FedCKA above FedAvg in alpha 5"]
    assert (claim.verdict, claim.seeds) == (verdict, 2)
    mean = sum(leads) / 2
    assert claim.interval == pytest.approx((mean - half_width, mean + half_width), abs=0.01)


def test_of_two_archived_jobs_the_one_with_more_seeds_counts(output):
    """Three seeds in the fixture's job, two of them in another."""
    job = next((output / "jobs").glob("*.json"))
    about = json.loads(job.read_text()) | {"seeds": [0, 1]}
    (output / "jobs" / "a.json").write_text(json.dumps(about))
    found = {e.text: e for e in headlines(evidence_in(output), {})}
    claim = found["FedCKA above FedAvg on CIFAR-10, alpha 5"].claim
    assert claim.seeds == 3


def summary_of(output: Path) -> str:
    """The page of the claims made from these runs."""
    pack(output, output / "histories")
    (output / "README.md").write_text(f"{BEGIN}\n{END}\n")
    page, *_ = write_summary(output / "histories", output / "papers.md", output / "README.md")
    return page.read_text()


def test_evidence_against_a_verdict_is_on_the_page_and_named_beside_it(output):
    claim = "FedCKA above FedAvg on CIFAR-10, alpha 5"
    assert "contradicted" not in summary_of(output)
    fake_job(output, {"lr": 0.3}, -0.1)
    page = summary_of(output)
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {claim} (")]
    assert row.endswith("; not the paper's setting; contradicted by other runs |")
    beside = f"{EARLY}; {load_recipe('fedcka-table-2').remark}"
    assert f"**{claim}: reproduced; {beside}.** Difference +3.00" in page
    assert f"**{claim}: not reproduced; {beside}.** Difference -10.00" in page


def test_an_open_verdict_names_a_decided_one_of_other_runs():
    recipe = load_recipe("fedcka-table-2")
    open_one, decided = judged(verdict="inconclusive"), judged(verdict="not reproduced")
    assert [*verdict_of(open_one, [open_one, decided], recipe)] == [
        "inconclusive",
        recipe.remark,
        "not reproduced by other runs",
    ]


def test_one_run_decides_one_of_two_headlines_that_name_later_rounds(tmp_path):
    only = ["FedAvg", "FedRCL", "CIFAR-10", "alpha 0.05"]
    make_table(tmp_path, "fedrcl-table-1", only, changes={"num-rounds": 200}, seeds=3)
    page = summary_of(tmp_path)
    claim = "FedRCL above FedAvg on CIFAR-10, alpha 0.05"
    report = write_report(tmp_path)[1].read_text()
    (row,) = [
        line
        for line in report.splitlines()
        if line.endswith("| Table 1, scale paper, num-rounds=200 |")
    ]
    assert "| reproduced; at round 200 instead of 500 |" in row
    assert ": reproduced; at round 200 instead of 500.** Difference" in page
    early, late = [line for line in page.splitlines() if line.startswith(f"| {claim}, ")]
    assert early.endswith("| reproduced; at round 200 instead of 500; not the paper's setting |")
    assert late.endswith(" | not tested |")
    assert page.count(f"{claim}, 1000 rounds: ") == 0
    # without a paper's value, with what departs from the paper
    assert "rounds: accuracy over rounds, mean over seeds; num-rounds 200 (paper: 1000)](" in page


def test_a_run_that_gets_to_both_rounds_decides_both_headlines(tmp_path):
    only = ["FedAvg", "FedRCL", "CIFAR-10", "alpha 0.05"]
    make_table(tmp_path, "fedrcl-table-1", only, seeds=3)
    page = summary_of(tmp_path)
    for rounds in (500, 1000):
        claim = f"FedRCL above FedAvg on CIFAR-10, alpha 0.05, {rounds} rounds"
        assert re.search(rf"\| {claim} .*\| reproduced(; the paper's [^;|]*)? \|", page)
        assert f"{claim}: accuracy over rounds, mean over seeds; dashed: the paper" in page


def judged(**changed):
    """A judged claim of which these fields count."""
    empty = dict.fromkeys((field.name for field in fields(JudgedClaim)), None)
    return JudgedClaim(**{**empty, "share": 1.0, "seeds": 2, "deviations": []} | changed)


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"verdict": "inconclusive"}, {"verdict": "not tested", "seeds": 5, "share": 9.0}),
        ({}, {"deviations": ["lr 1 (paper: 2)"], "seeds": 5, "share": 9.0}),
        ({"seeds": 3}, {"share": 40.0}),
        ({"share": 0.9}, {"share": 0.8, "seeds": 3}),
    ],
)
def test_the_papers_own_setting_counts_more_than_steps_and_seeds(more, less):
    assert weight(judged(**more)) > weight(judged(**less))


def test_runs_on_folders_of_one_name_stay_apart():
    one, two = (without_folders({"source": f"folder:/{p}/cifar10"})["source"] for p in ("a", "b"))
    assert one != two
    assert one == without_folders({"source": "folder:/a/cifar10"})["source"]


def test_an_archive_keeps_its_name_when_cells_are_added(output):
    (path,) = pack(output, output / "histories")
    (job,) = (output / "jobs").glob("*.json")
    recipe, (_, how) = load_recipe("fedcka-table-2"), load_job(job)
    runner.save_job(recipe, how, output, selected(recipe, ["FedAvg", "MOON", "alpha 5"]))
    assert pack(output, output / "histories") == [path]


def test_an_archive_does_not_lose_a_run_to_another_output_directory(output):
    (path,) = pack(output, output / "histories")
    before = path.read_bytes()
    for attempt in output.glob("runs/*/attempt"):
        attempt.rename(attempt.with_name("another"))
    with pytest.raises(ValueError, match=r"lacks 6 runs that .* has, such as runs/fedavg-.*: add"):
        pack(output, output / "histories")
    assert path.read_bytes() == before
    for attempt in list(output.glob("runs/*/another")):  # both: the newer one counts
        shutil.copytree(attempt, attempt.with_name("attempt"))
        attempt.rename(attempt.with_name("later"))
    pack(output, output / "histories")
    with zipfile.ZipFile(path) as archive:
        assert sum("/later/history" in name for name in archive.namelist()) == 6


def test_restored_runs_are_finished_and_archive_as_before(output, tmp_path, refusal, printed):
    (path,) = pack(output, output / "histories")
    before, source = path.read_bytes(), f"folder:{tmp_path}/private/cifar10-jpg"
    shutil.rmtree(output / "runs")
    restore = ["experiments", "restore", str(path), "--output", str(output)]
    for wrong in ([], ["--source", "folder:/data/cifar10"], ["--source", "npz:/data/cifar10-jpg"]):
        error = refusal(*restore, *wrong)
        assert error.startswith(f"error: --source {(wrong or ['', ''])[1]!r}: the runs in {path} ")
        assert "'cifar10-jpg'" in error
    assert not (output / "runs").exists()
    assert main([*restore, "--source", source + "/"]) == 0
    (cut, *_) = (output / "runs").glob("*/*/config.json")
    cut.unlink()  # as if it had been interrupted
    paths = [Path(line) for line in printed(*restore, "--source", source).splitlines()]
    assert len({*paths}) == 6
    (job,) = (output / "jobs").glob("*.json")
    recipe, how = load_job(job)
    needed = list(runs_needed(recipe, recipe.cells, how, output, ()))
    assert {run.finished() for run in needed} == {*paths}
    assert pack(output, output / "histories") == [path]
    assert path.read_bytes() == before


def test_restored_runs_are_listed_as_the_runs_that_they_copy(output, tmp_path, printed):
    """Their config.json, which names no overrides, was taken for damaged."""
    (path,) = pack(output, output / "histories")
    again = tmp_path / "again"
    listed = restore(path, again, f"folder:{tmp_path}/private/cifar10-jpg")
    assert "fedcka-table-2" in printed("experiments", "list", "--output", str(again))
    for directory in listed:
        [row] = json.loads(printed("list", str(directory.parent), "--json"))
        assert row["state"] == "finished"
        run = SavedRun(directory)
        assert resolve_config(run.overrides).flat == run.config
    with pytest.raises(ValueError, match=r"no key 'participants': .* restored from an archive"):
        run.rows()


def test_runs_of_a_recipe_that_names_its_folder_are_found_where_they_are_restored(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        f"config: {{source: 'folder:{tmp_path}/private/photos', num-clients: 4, num-rounds: 2}}\n"
        "rows:\n  FedAvg: {method: fedavg}\n  FedProx: {method: fedprox}\n"
    )
    output, again = make_table(tmp_path / "out", str(own), seeds=2), tmp_path / "again"
    (path,) = pack(output, tmp_path / "histories")
    before = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert not any(b"private" in archive.read(name) for name in archive.namelist())
    restored = restore(path, again, f"folder:{tmp_path}/elsewhere/photos")
    (job,) = (again / "jobs").iterdir()
    recipe, how = load_job(job)
    needed = runs_needed(recipe, recipe.cells, how, again, ())
    assert {run.finished() for run in needed} == {*restored}
    assert pack(again, tmp_path / "histories") == [path]
    assert path.read_bytes() == before


def test_where_no_run_can_be_verified_verify_fails(output):
    """As these, which are small copies of runs."""
    out = io.StringIO()
    assert verify(output / "runs", 0, Console(file=out, width=300)) == 1
    assert out.getvalue().endswith("6 runs, 6 skipped, 0 checks failed\n")


def test_the_next_restore_completes_one_that_was_interrupted(output, tmp_path, monkeypatch):
    (path,) = pack(output, output / "histories")
    before, source = path.read_bytes(), f"folder:{tmp_path}/private/cifar10-jpg"
    shutil.rmtree(output / "runs")
    write = Path.write_bytes

    def interrupted(to, content):
        if to.name == "history.jsonl":
            raise KeyboardInterrupt
        return write(to, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restore(path, output, source)
    restore(path, output, source)
    assert pack(output, output / "histories") == [path]
    assert path.read_bytes() == before


def test_of_two_jobs_with_one_archive_none_replaces_the_other(output, tmp_path):
    """A job that is restored twice, with its data in two places."""
    (path,) = pack(output, output / "histories")
    before, again = path.read_bytes(), output / "again"
    for place in "ab":
        restore(path, again, f"folder:{tmp_path}/{place}/cifar10-jpg")
    assert pack(again, output / "histories") == [path]  # the same runs
    assert path.read_bytes() == before
    one, other = sorted((again / "jobs").iterdir())
    other.write_text(json.dumps(json.loads(other.read_text()) | {"seeds": [0, 1, 2, 3]}))
    with pytest.raises(ValueError, match=rf"^{one} and {other} share the archive {path.name}, "):
        pack(again, output / "histories")
    assert path.read_bytes() == before
    other.unlink()
    assert pack(again, output / "histories") == [path]


def test_a_job_continued_with_its_data_elsewhere_is_archived(output):
    """The folder of a published data set is no part of a run: both jobs have the same runs."""
    (path,) = pack(output, output / "histories")
    before = path.read_bytes()
    [job] = (output / "jobs").iterdir()
    about = json.loads(job.read_text())
    about["changes"]["data-dir"] = "/elsewhere"
    job.with_stem("later").write_text(json.dumps(about))
    assert pack(output, output / "histories") == [path]
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b.replace(b[99:101], b"..", 1)])
def test_a_damaged_archive_is_named(output, damage):
    (path,) = pack(output, output / "histories")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path} is damaged: "):
        pack(output, path.parent)
    with pytest.raises(ValueError, match=f"{path} is damaged: "), unpacked(path.parent):
        pass
    with pytest.raises(ValueError, match=f"{path} is damaged: "):
        restore(path, output / "again", "folder:/data/cifar10-jpg")


@pytest.mark.parametrize(
    ("part", "content", "fault"),
    [
        ("/config.json", b"{}", "config.json: "),
        ("/config.json", b'{"config": {}}', "config.json: it has no source"),
        ("/config.json", b"x", "config.json: Expecting value"),
        ("/summary.json", b"[]", "summary.json: it is not a JSON object"),
        ("/manifest.json", b"x", "manifest.json: Expecting value"),
        ("jobs/", b"{}", ".json: 'text' is missing"),
        ("jobs/", b"x", ".json: Expecting value"),
    ],
)
def test_an_archive_that_was_edited_is_named_and_not_restored_in_part(
    part, content, fault, output, tmp_path
):
    (path,) = pack(output, tmp_path / "histories")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files[next(name for name in files if part in name)] = content
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    message = f"{path} is damaged: .*{re.escape(fault)}"
    with pytest.raises(ValueError, match=message):
        pack(output, path.parent)
    with pytest.raises(ValueError, match=message), unpacked(path.parent):
        pass
    with pytest.raises(ValueError, match=message):
        restore(path, tmp_path / "again", "folder:/data/cifar10-jpg")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("file", "damage", "fault"),
    [
        ("history.jsonl", lambda b: None, "it is missing"),
        ("summary.json", lambda b: None, "it is missing"),
        ("config.json", lambda b: None, "it is missing"),
        ("history.jsonl", lambda b: b"", "round 41, the last, is missing"),
        ("history.jsonl", lambda b: b[:-10], "round 41, the last, is missing"),
        ("history.jsonl", lambda b: b + b[: b.index(b"\n") + 1], "round 1 follows round 41"),
        ("history.jsonl", lambda b: b"{}\n" + b, "line 1 is damaged: it has no key 'round'"),
        ("history.jsonl", lambda b: b[:9] + b"\xff" + b[9:], "line 1 is damaged: "),
    ],
)
def test_an_archive_whose_run_is_not_whole_is_not_restored(output, tmp_path, file, damage, fault):
    """It was restored, and the next report said to restore it from the archive."""
    (path,) = pack(output, tmp_path / "histories")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in files if name.endswith(f"/{file}"))
    content = damage(files.pop(name))
    write_zip(path, {n: b.decode() for n, b in files.items()})
    if content is not None:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged: {name}: {fault}")):
        restore(path, tmp_path / "again", "folder:/data/cifar10-jpg")
    assert not (tmp_path / "again").exists()


def test_a_directory_is_no_archive(tmp_path, refusal):
    expected = f"error: {tmp_path}: it is a directory; expected a zip made by"
    assert refusal("experiments", "restore", str(tmp_path)).startswith(expected)


def test_a_zip_without_a_job_is_no_archive(tmp_path, refusal):
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")
    expected = f"error: {path}: expected a zip made by `keel experiments archive`"
    assert refusal("experiments", "restore", str(path)).startswith(expected)


@pytest.mark.parametrize(
    "name", ["jobs/", "runs/", "runs/a/../config.json", "runs/a/b/.", "../x.json", "/x.json", "x"]
)
def test_a_zip_with_a_file_that_no_archive_has_is_refused(name, output, refusal):
    """A folder was called damaged, or ended in a traceback; a path must lead nowhere else."""
    (path,) = pack(output, output / "histories")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, "{}")
    said = refusal("experiments", "restore", str(path), "--output", str(output / "again"))
    assert said.startswith(f"error: {path} has {name!r}, which no archive has; expected a zip made")
    assert not (output / "again").exists()


def test_a_zip_that_unpacks_to_far_more_is_refused_before_it_is_read(output, refusal, monkeypatch):
    (path,) = pack(output, output / "histories")
    monkeypatch.setattr("keel.experiments.archive.MAX_BYTES", 100)
    said = refusal("experiments", "restore", str(path), "--output", str(output / "again"))
    assert re.match(f"error: {path}: its files have [0-9,]+ bytes, more than 100; expected", said)


def test_runs_that_are_too_large_for_a_zip_are_not_packed(output, monkeypatch):
    """They were, and `restore` refused the zip."""
    monkeypatch.setattr("keel.experiments.archive.MAX_BYTES", 100)
    with pytest.raises(ValueError, match=f"expected at most 100: keep {output} instead"):
        pack(output, output / "histories")
    assert not list(output.glob("histories/*"))


def archived(path: Path) -> list[str]:
    """The runs in a zip, by method and seed."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/config.json")]
    return sorted(re.sub(r"runs/(\w+)-.*(seed\d).*", r"\1 \2", name) for name in names)


def test_what_is_run_after_a_restore_is_added_to_the_archive(output, tmp_path):
    (path,) = pack(output, output / "histories")
    before, source = archived(path), f"folder:{tmp_path}/elsewhere/cifar10-jpg"
    for folder in ("runs", "jobs"):
        shutil.rmtree(output / folder)
    command = ["experiments", "restore", str(path), "--output", str(output), "--source", source]
    assert main(command) == 0
    recipe = load_recipe("fedcka-table-2")
    how = Options("paper", {"source": source, "num-rounds": 41}, [0, 1], full_grid=False)
    cells = selected(recipe, ["MOON", "alpha 5"])
    runner.save_job(recipe, how, output, cells)
    run = run_of(cells[0], cells[0].paper_candidate, 0, how, output)
    example = next(output.glob("runs/fedavg*"))
    shutil.copytree(example, run.folder)
    config = {"config": dict(resolve_config(run.keys).flat), "overrides": {}}
    (run.folder / "attempt" / "config.json").write_text(json.dumps(config))
    assert pack(output, output / "histories") == [path]
    assert archived(path) == sorted([*before, "moon seed0"])
    (job,) = (output / "jobs").iterdir()
    assert json.loads(job.read_text())["seeds"] == [0, 1, 2]


@pytest.mark.parametrize("fewer", [{"seeds": [0, 1]}, {"cells": [["FedAvg", "alpha 5"]]}])
def test_an_archive_does_not_lose_a_seed_or_a_row_that_a_job_does_not_name(output, fewer):
    (path,) = pack(output, output / "histories")
    before = path.read_bytes()
    (job,) = (output / "jobs").iterdir()
    job.write_text(json.dumps(json.loads(job.read_text()) | fewer))
    with pytest.raises(ValueError, match=r"lacks \d runs that .* has"):
        pack(output, output / "histories")
    assert path.read_bytes() == before


def test_a_note_of_a_failure_does_not_replace_an_archived_run(output):
    """With today's code it was killed, with that of the archive it had finished."""
    (path,) = pack(output, output / "histories")
    before = path.read_bytes()
    (job,) = (output / "jobs").iterdir()
    recipe, how = load_job(job)
    for run in runs_needed(recipe, recipe.cells, how, output, ()):
        run.note_failure("its process was killed")
        assert run.ended() == run.note
    with pytest.raises(ValueError, match=r"lacks 6 runs that .* has"):
        pack(output, output / "histories")
    assert path.read_bytes() == before


def test_a_run_that_was_killed_is_still_a_failure_once_it_is_restored(output):
    """It was left out of a restored job, and its seed no longer counted against the claim."""
    (killed,) = output.glob("runs/fedcka-*seed2-*/attempt")
    (job,) = (output / "jobs").iterdir()
    recipe, how = load_job(job)
    shutil.rmtree(killed)
    for run in runs_needed(recipe, recipe.cells, how, output, ()):
        if not run.ended():
            run.note_failure("its process was killed")
    (path,) = pack(output, output / "histories")
    again = output / "again"
    source = f"folder:{output}/cifar10-jpg"
    (first, *_) = restore(path, again, source)
    assert unfinished(first).startswith("it was restored from an archive")
    for folder in (output, again):
        (found,) = evidence_in(folder)
        (claim,) = [c for c in found.claims if c.text == "FedCKA above FedAvg in alpha 5"]
        assert claim.failures == "FedCKA failed 1/3"
    attempt = again / "runs" / run_with_seed(again, 2) / "attempt"
    shutil.copytree(next(again.glob("runs/fedcka-*seed1-*/attempt")), attempt)
    shutil.rmtree(attempt.with_name("failed"))
    restore(path, again, source)
    assert not attempt.with_name("failed").exists()  # it has ended there


def run_with_seed(output: Path, seed: int) -> str:
    """The folder of FedCKA's run with this seed."""
    (found,) = (output / "runs").glob(f"fedcka-*seed{seed}-*")
    return found.name


def test_an_archive_does_not_forget_seeds_that_were_asked_for(output):
    """Or a verdict would no longer say that it came after three of five."""
    (job,) = (output / "jobs").iterdir()
    about = json.loads(job.read_text())
    job.write_text(json.dumps(about | {"seeds": [0, 1, 2, 3, 4]}))
    (path,) = pack(output, output / "histories")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    named = {name.replace("jobs/", "jobs/old-"): text for name, text in files.items()}
    write_zip(path, named)  # as under a name that jobs had before
    job.write_text(json.dumps(about))
    with pytest.raises(
        ValueError, match=r"has the seeds \[0, 1, 2, 3, 4\], but .* only \[0, 1, 2\]"
    ):
        pack(output, output / "histories")


def test_an_archive_of_one_code_does_not_become_one_of_two(output):
    (path,) = pack(output, output / "histories")
    before = path.read_bytes()
    (attempt, *_) = output.glob("runs/*/attempt")
    later = shutil.copytree(attempt, attempt.with_name("later")) / "manifest.json"
    later.write_text(json.dumps(json.loads(later.read_text()) | {"code": ["sources 1"]}))
    message = rf"has runs of one code \({OTHER}\), but .* runs of sources 1, and runs of"
    with pytest.raises(ValueError, match=message):
        pack(output, output / "histories")
    assert path.read_bytes() == before


def test_an_archive_does_not_change_the_verdict_on_another_with_the_same_runs(output, tmp_path):
    """FedCKA's Tables 1 and 2 share FedAvg with alpha 5."""
    before = summary_of(output)
    other = tmp_path / "other"
    changes = {"source": f"folder:{tmp_path}/private/cifar10-jpg", "num-rounds": 41}
    make_table(other, "fedcka-table-1", ["FedAvg", "CIFAR-10"], changes=changes, seeds=2)
    pack(other, output / "histories")
    after = summary_of(output)
    name = "FedCKA above FedAvg on CIFAR-10, alpha 5"
    assert after.count("keel experiments run fedcka-table-1 --only") == 1
    for row in [line for line in before.splitlines() if line.startswith(f"| {name}")]:
        assert row in after


def test_runs_on_data_of_different_content_are_not_judged(output):
    """A folder of one name may hold other files: on each side, or from seed to seed."""
    paths = sorted(output.glob("runs/*/attempt/manifest.json"))
    for digests, cell in (
        ("aaabbb", f"64.00 ± 1.00 (5); {EARLY}"),
        ("aabaab", f"runs on different data; {EARLY}"),
    ):
        for path, data in zip(paths, digests, strict=True):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"data": data}))
        page = summary_of(output)
        assert "(no verdict on runs on different data)" in page
        assert "Runs on different data, never averaged or judged together." in page
        assert f"| FedCKA | 67.86 | {cell} |" in page


@pytest.mark.parametrize("name", ["missing.zip", "README.md"])
def test_what_is_no_archive_is_refused(tmp_path, refusal, name):
    (tmp_path / "README.md").write_text("not a zip")
    error = refusal("experiments", "restore", str(tmp_path / name), "--output", str(tmp_path))
    assert error.startswith(f"error: {tmp_path / name}: ")
    assert "keel experiments archive" in error
    assert ("does not exist" in error) == (name == "missing.zip")


def test_an_archive_that_was_cut_is_called_damaged(output, refusal):
    """As by a full disk: it was said to be no archive at all."""
    (path,) = pack(output, output / "histories")
    path.write_bytes(path.read_bytes()[:500])
    error = refusal("experiments", "restore", str(path), "--output", str(output / "again"))
    assert error.startswith(f"error: {path} is damaged: ")
    assert not (output / "again").exists()


def test_a_copy_counts_the_updates_that_were_left_out_and_names_no_client(output):
    (path, *_) = sorted(output.glob("runs/*/attempt/history.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["left_out"] = {"site-a": "values that are not finite", "site-b": "no answer"}
    lines[4]["evaluation_left_out"] = {"site-a": "personal-loss is nan, not finite"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = dict(copies(path.parent))
    assert "site-" not in texts["history.jsonl"]
    found = History(map(json.loads, texts["history.jsonl"].splitlines()))
    assert (found.num_left_out, found.rounds_not_finite) == (2, 1)
    assert (found.num_not_evaluated, found.rounds_partial) == (1, 1)


def test_a_copy_keeps_the_sign_of_divergence(output):
    """Of many updates left out in a round, and of a long status."""
    (path, *_) = sorted(output.glob("runs/*/attempt/history.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["left_out"] = {"a": "not finite"} | {f"b{n}": "no answer" for n in range(150)}
    lines[4]["global"] = {"accuracy": 0.1, "loss": None}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = f"failed: {'x' * 300} is not finite"
    path.with_name("summary.json").write_text(json.dumps({"status": status}))
    copy = output / "copy"
    copy.mkdir()
    for name, text in copies(path.parent):
        (copy / name).write_text(text)
    assert status_of(path.parent) == status_of(copy) == "diverged"
    found = History(read_history(copy))
    assert (found.num_left_out, found.rounds_not_finite) == (151, 1)
    assert found.rounds_diverged == 1


@pytest.mark.parametrize(
    "reason",
    [
        "OSError: [Errno 28] No space left on device: '/home/jane doe/keel/runs/a/history.jsonl'",
        "FileNotFoundError: source = 'folder:/home/jane doe/x': /home/jane/x/train does not exist",
        'ValueError: resume = "/home/jane/it\'s" cannot be read',
    ],
)
def test_a_copy_of_a_failed_run_contains_no_path(output, reason):
    (path, *_) = sorted(output.glob("runs/*/attempt/summary.json"))
    path.write_text(json.dumps({"status": f"failed: {reason}"}))
    found = json.loads(dict(copies(path.parent))["summary.json"])["status"]
    assert found.startswith(f"failed: {reason.partition(':')[0]}")
    assert not {"home", "jane", "doe", "history"} & set(re.findall(r"\w+", found))


def test_apostrophes_in_a_copied_status_are_no_quotes(output):
    reason = "a client's share, 3/4 of the site's data, is too large"
    (path, *_) = sorted(output.glob("runs/*/attempt/summary.json"))
    path.write_text(json.dumps({"status": f"failed: {reason}"}))
    found = json.loads(dict(copies(path.parent))["summary.json"])["status"]
    assert found == f"failed: {reason}"


def test_the_page_and_the_table_say_what_an_archive_holds(output):
    pack(output, output / "histories")
    page, readme = output / "papers.md", output / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    *_, picture = write_summary(output / "histories", page, readme)
    row = "| FedCKA above FedAvg on CIFAR-10, alpha 5 (FedCKA Table 2) "
    row += f"| +3.49 | +3.00 [+3.00, +3.00] | 3 | reproduced; {EARLY}; "
    remark = load_recipe("fedcka-table-2").remark
    row += f"{remark}; not the paper's setting |"
    for made in (page, readme):
        assert row in made.read_text()
    assert readme.read_text().startswith(f"before\n{BEGIN}\n| claim")
    assert readme.read_text().endswith(f"{END}\nafter\n")
    text = page.read_text()
    other = "FedRCL above FedAvg on CIFAR-10, alpha 0.6, 500 rounds"
    assert f"| {other} (FedRCL Table 1) | +5.07 | –" in text
    assert "6 runs on cpu: some: 41 min 0 s of rounds, the longest 6 min 50 s." in text
    assert "Processor time of the clients: 246.0 core hours." in text
    assert f"Code: {OTHER}. Precision: fp32. Packages: keel 0.2.0 51716e2fbfa1." in text
    assert f"alpha 5: reproduced; {EARLY}; {remark}.** Difference +3.00 [+3.00, +3.00]" in text
    assert "num-rounds 41 (paper: 100); source folder:cifar10-jpg (paper: cifar10)" in text
    assert f"| FedCKA | 67.86 | 64.00 ± 1.00 (5); {EARLY} |" in text
    assert f"](curves/{picture.name})" in text
    assert (
        "keel experiments run fedrcl-table-1 --only 'FedRCL;CIFAR-10, alpha 0.6, 500R;FedAvg'"
        in text
    )
    # a claim that the archive no longer holds leaves no curve behind
    (picture.parent / "of-another-claim.svg").touch()
    assert write_summary(output / "histories", page, readme) == [page, readme, picture]
    assert list(picture.parent.iterdir()) == [picture]


def test_runs_that_diverged_took_their_hours(output):
    """The note of a run that was killed is of no hours."""
    noted, *others = sorted(output.glob("runs/fedcka*/attempt"))
    for path in others:
        status = {"status": "failed: round 42: values that are not finite"}
        (path / "summary.json").write_text(json.dumps(status))
    shutil.move(noted, noted.with_name("failed"))
    (noted.with_name("failed") / "summary.json").write_text('{"status": "failed: killed"}')
    page = summary_of(output)
    assert "5 runs on cpu: some: 34 min 10 s of rounds, the longest 6 min 50 s." in page
    assert "Processor time of the clients: 205.0 core hours." in page
    assert "| FedCKA | 67.86 | –; diverged 2/3, failed 1/3 |" in page


def shown(folder: Path, name: str, only: list[str], text: str):
    """The headline with this text of two seeds of these cells, and its picture."""
    make_table(folder, name, only, seeds=2)
    pictures = {}
    (found,) = [e for e in headlines(evidence_in(folder), pictures) if e.text == text]
    return found, list(pictures.values())


def test_a_claim_about_seconds_has_no_picture_of_accuracies(tmp_path):
    only = ["FedCKA", "MOON", "50 layers, without cache"]
    text = "FedCKA faster than MOON on Tiny ImageNet, 50 layers, without cache"
    found, pictures = shown(tmp_path, "fedcka-table-4", only, text)
    assert found.evidence
    assert (found.picture, pictures) == ("", [])


def test_a_picture_ends_at_the_round_that_the_claim_reads(tmp_path):
    only = ["FedRCL", "FedAvg", "CIFAR-10, alpha 0.6, 500R"]
    text = "FedRCL above FedAvg on CIFAR-10, alpha 0.6, 500 rounds"
    found, (picture,) = shown(tmp_path, "fedrcl-table-1", only, text)
    assert found.claim.read_at == 500
    assert ">round 500<" in picture


def test_a_picture_has_the_seeds_that_both_sides_have(output):
    """FedAvg's mean over three seeds beside FedCKA's one was that of other seeds."""
    for path in output.glob("runs/fedcka-*seed[01]-*"):
        shutil.rmtree(path)
    (found,) = evidence_in(output)
    (claim,) = [c for c in found.recipe.claims if c.text == "FedCKA above FedAvg in alpha 5"]
    ends = {name: curve[-1][:2] for name, (curve, _) in curves_of(claim, found).items()}
    assert ends == {"FedCKA": (41, pytest.approx(65)), "FedAvg": (41, pytest.approx(62))}


def test_rows_of_other_seeds_are_compared_over_those_that_all_have(output):
    """A row's mean over one seed beside the mean over three was that of other seeds."""
    (found,) = evidence_in(output)
    assert [*found.about_seeds] == []
    for path in output.glob("runs/fedcka-*seed[01]-*"):
        shutil.rmtree(path)
    (found,) = evidence_in(output)
    (sentence,) = found.about_seeds
    assert sentence == "alpha 5, over the seed that all rows have (2): FedAvg 62.00, FedCKA 65.00."
    shutil.rmtree(next(output.glob("runs/fedavg-*seed2-*")))
    (found,) = evidence_in(output)
    assert [*found.about_seeds] == []  # no common seed


def test_a_table_says_that_fewer_seeds_than_the_recipes_were_asked_for(tmp_path):
    (found,) = evidence_in(fake_job(tmp_path, {}, 0.03, seeds=(0, 1)))
    assert [*found.about_seeds] == ["These are 2 of the recipe's 3 seeds."]


@pytest.mark.parametrize(("rounds", "num_lines"), [(1000, 2), (500, 0)])
def test_a_picture_has_no_paper_value_of_a_round_after_its_last(tmp_path, rounds, num_lines):
    only = ["FedRCL", "FedAvg", "CIFAR-10, alpha 0.6, 1000R"]
    make_table(tmp_path, "fedrcl-table-1", only, changes={"num-rounds": rounds}, seeds=1)
    (found,) = evidence_in(tmp_path)
    claim = next(c for c in found.recipe.claims if c.text == f"FedRCL above FedAvg in {only[2]}")
    picture = svg_of(curves_of(claim, found), "title")
    assert picture.count("stroke-dasharray") == num_lines


@pytest.mark.parametrize(
    ("recipe", "claim", "text"),
    [
        ("fedcka-table-2", "alpha 5 above alpha 0.1 in FedAvg",
         "FedAvg: alpha 5 above alpha 0.1 on CIFAR-10"),
        ("fedcka-table-4", "FedCKA below MOON in 50 layers, without cache",
         "FedCKA faster than MOON on Tiny ImageNet, 50 layers, without cache"),
        ("fedreco-table-3", "FedReCo (0.2, 0.1) above FedAvg (0.2, 0.1) in FMNIST",
         "FedReCo (0.2, 0.1) above FedAvg (0.2, 0.1) on Fashion-MNIST"),
    ],
)  # fmt: skip
def test_a_claim_names_its_data_set(recipe, claim, text):
    loaded = load_recipe(recipe)
    assert in_full(next(c for c in loaded.claims if c.text == claim), loaded) == text


def test_a_readme_without_markers_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("text")
    with pytest.raises(ValueError, match="expected the lines"):
        write_summary(tmp_path, tmp_path / "page.md", tmp_path / "README.md")


def test_a_missing_or_empty_archive_is_refused_and_no_curve_removed(tmp_path):
    readme, curve = tmp_path / "README.md", tmp_path / "curves" / "old.svg"
    readme.write_text(f"{BEGIN}\n{END}\n")
    curve.parent.mkdir()
    curve.touch()
    with pytest.raises(ValueError, match=r"--histories .*/missing is not a directory"):
        write_summary(tmp_path / "missing", tmp_path / "page.md", readme)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--histories .*/empty: no zip there has runs of Keel's"):
        write_summary(tmp_path / "empty", tmp_path / "page.md", readme)
    assert readme.read_text() == f"{BEGIN}\n{END}\n"
    assert curve.exists()


def test_a_picture_has_both_curves_and_the_papers_values():
    """From 0 % in round 1 to 100 % in round 2: from the bottom's middle to the upper right."""
    curves = {"a < b": ([(1, 0.0, 0), (2, 100.0, 0)], 50.0), "c": ([], None)}
    tree = ElementTree.fromstring(svg_of(curves, "t"))
    name = "{http://www.w3.org/2000/svg}"
    first, second = tree.iter(f"{name}polyline")
    assert first.get("points") == "210.0,110.0 380.0,40.0"
    assert second.get("points") == ""
    (path,) = tree.iter(f"{name}path")
    assert path.get("d") == "M40.0,75.0 L380.0,75.0"
    assert "a < b" in [each.text for each in tree.iter(f"{name}text")]


def test_a_curve_of_one_round_is_a_dot():
    curves = {"a": ([(1, 0.0, 0), (2, 100.0, 0)], None), "c": ([(2, 50.0, 0)], None)}
    tree = ElementTree.fromstring(svg_of(curves, "t"))
    (dot,) = tree.iter("{http://www.w3.org/2000/svg}circle")
    assert (dot.get("cx"), dot.get("cy")) == ("380.0", "75.0")


def test_a_picture_is_cut_where_the_first_rounds_are_lower_than_all_later_ones():
    curves = {"a": ([(1, 10.0, 0), (10, 80.0, 0), (100, 90.0, 0)], None), "c": ([], None)}
    tree = ElementTree.fromstring(svg_of(curves, "t"))
    first, _ = tree.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [point.split(",")[1] for point in first.get("points").split()]
    assert heights == ["110.0", "40.0"]  # bottom, top; round 1 is not drawn as 80 %


def test_page_table_and_curves_of_this_repository_are_those_of_its_archive(tmp_path):
    """`keel experiments summary` makes them."""
    page, readme = tmp_path / "papers.md", tmp_path / "README.md"
    readme.write_text((root / "README.md").read_text())
    written = write_summary(RESULTS / "histories", page, readme)
    committed = [RESULTS / "papers.md", root / "README.md", *sorted(RESULTS.glob("curves/*.svg"))]
    assert [path.name for path in written] == [path.name for path in committed]
    for ours, theirs in zip(written, committed, strict=True):
        assert ours.read_text() == theirs.read_text(), f"{theirs}: run `keel experiments summary`"
    assert not re.search(r"/(tmp|root|home|work)/", page.read_text())


@pytest.mark.parametrize(
    "path", sorted((RESULTS / "histories").glob("*.zip")), ids=lambda p: p.stem
)
def test_an_archive_has_the_name_that_its_job_has_today(path):
    """Otherwise archiving more seeds would write another one beside it."""
    with zipfile.ZipFile(path) as archive:
        about = json.loads(archive.read(f"jobs/{path.stem}.json"))
    recipe = parse_recipe(about["text"], Path(about["recipe"]))
    options = Options(about["scale"], about["changes"], about["seeds"], about["full_grid"])
    assert job_name(recipe, options) == path.stem


@pytest.mark.parametrize("name", ["README.md", "docs/results/papers.md"])
def test_what_chance_decides_is_said_in_the_same_words(name):
    """The pages and the reports had a sentence each."""
    text = " ".join((root / name).read_text().split())
    assert CHANCE[0].upper() + CHANCE[1:] in text
