"""The runner, its report and `keel experiments verify` on runs of a small sweep."""

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cluster_fixtures import assert_only_who_has_the_token_joins
from run_fixtures import final_model, history_of, same_bits, summary_of, wait_until, without_times

from keel.cli.main import main as keel
from keel.experiments.rendering import write_report
from keel.experiments.tasks import RayTasks
from keel.experiments.verify import checks
from keel.runs import holders, is_locked
from server_app.inline import run_inline
from server_app.run_reader import RunReader

pytestmark = pytest.mark.timeout(900)
root = Path(__file__).parent.parent.parent
sweep = root / "docs" / "sweep.yaml"
NUM_ROUNDS = 40  # for seconds: a worker takes two to end after its runner was killed
ONCE = (
    *("--seeds", "1", "--only", "heterogeneous"),
    *("--set", f"num-rounds={NUM_ROUNDS}", "--set", "data-fraction=0.4"),
)
wait_s = 300.0


def main(*arguments: str) -> int:
    """`keel experiments` in this process; runs are executed by workers of a Ray of its own.

    Ray is imported first, because that once kept it from starting: it then had no token for the
    servers that it started, which required one.
    """
    import ray  # noqa: F401

    before = signal.getsignal(signal.SIGTERM)
    try:
        return keel(["experiments", *arguments])
    finally:
        signal.signal(signal.SIGTERM, before)


def folders(output: Path) -> list[Path]:
    """The folders of all attempts, by the name of their run."""
    return [path.parent for path in sorted(output.glob("runs/*/*/config.json"))]


@contextlib.contextmanager
def started(recipe: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A runner in a process and a process group of its own, one run at a time."""
    words = ["run", str(recipe), "--output", str(output), *ONCE, "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "keel", "experiments", *words],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell that started us in the background has it ignored, which is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its runs
            process.wait(60)


def rounds_in(output: Path) -> int:
    """Rounds in the histories of all attempts."""
    return sum(len(history_of(f)) for f in folders(output) if (f / "history.jsonl").exists())


def worker_of(output: Path, rounds: int = 2) -> int:
    """The process that executes the one run under way, once `rounds` rounds are done in all."""
    wait_until(lambda: rounds_in(output) >= rounds, wait_s)
    [worker] = {pid for lock in output.glob("runs/*/.lock") for pid in holders(lock)}
    return worker


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def raylet_of(worker: int) -> Path:
    """The folder in /proc of the raylet that started it."""
    parent = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{parent}")


def session_of(worker: int) -> Path:
    """The folder of its Ray, which the raylet has in its command line."""
    found = re.search(r"/tmp/keel-ray-\w+", (raylet_of(worker) / "cmdline").read_text())
    assert found
    return Path(found[0])


def test_further_presses_of_ctrl_c_end_it_at_once(tmp_path):
    """They ended in a traceback of Ray's, which was interrupted while it ended."""
    with started(sweep, tmp_path) as process:
        worker = worker_of(tmp_path, 1)
        session = session_of(worker)
        os.kill(worker, signal.SIGSTOP)  # the runner waits for it
        for _ in range(3):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.5)
        message, _ = process.communicate(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
    assert process.returncode == 130, message
    assert "Traceback" not in message
    assert message.count("stopping; Ctrl-C again ends at once") == 1
    assert message.splitlines()[-1] == (
        "ended; repeat the command to resume from the last finished rounds"
    )
    wait_until(lambda: not is_alive(worker))  # as its raylet is gone
    assert not session.exists()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The output folder of two runners that did not finish, and the history of the run that they
    began: the first was interrupted by Ctrl-C in a terminal, which reaches every process of the
    group, after its run had been killed; the second was killed itself.
    """
    output = tmp_path_factory.mktemp("experiments")
    with started(sweep, output) as process:
        os.kill(worker_of(output), signal.SIGKILL)
        worker = worker_of(output, rounds_in(output) + 1)
        session = session_of(worker)
        os.kill(worker, signal.SIGSTOP)  # or it would be over before the interrupt
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
        os.kill(worker, signal.SIGCONT)
        message, _ = process.communicate(timeout=wait_s)
    assert message.count("seed 0: Ray lost its process: killed, out of memory, or") == 1
    assert (process.returncode, "interrupted" in message) == (130, True), message
    assert 2 <= rounds_in(output) < NUM_ROUNDS, "it was over before it was interrupted"
    wait_until(lambda: not is_alive(worker))  # its raylet was killed, not ended
    assert not session.exists()
    (attempt,) = folders(output)  # the killed run was resumed, not started from scratch
    assert summary_of(attempt)["status"] == "stopped"
    before = history_of(attempt)

    with started(sweep, output) as process:
        worker = worker_of(output, len(before) + 1)
        session = session_of(worker)
        os.kill(worker, signal.SIGSTOP)
        assert_only_who_has_the_token_joins(raylet_of(worker))
        process.kill()
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: not is_alive(worker))
    shutil.rmtree(session)
    [lock] = output.glob("runs/*/.lock")
    assert not is_locked(lock)
    return output, before


@pytest.fixture(scope="module")
def shared(interrupted: tuple[Path, list[dict[str, Any]]]) -> tuple[list[str], str]:
    """What two runners printed that have finished these runs at once, and a third run, which
    diverges; and the report's text. What came of the third run is removed.
    """
    output, _ = interrupted
    recipe = output / "diverging.yaml"
    recipe.write_text(sweep.read_text().replace("[0.01, 1.0]", "[0.01, 1.0, 1.0e+30]"))
    with started(recipe, output) as one, started(recipe, output) as other:
        printed = [process.communicate(timeout=2 * wait_s)[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], printed
    with pytest.MonkeyPatch.context() as patch:  # a run that diverged is not run again
        patch.setattr(RayTasks, "connect", lambda self: pytest.fail("Ray was started"))
        assert main("run", str(recipe), "--output", str(output), *ONCE) == 0
    _, text = write_report(output)
    report = text.read_text()
    for folder in folders(output):
        if summary_of(folder)["status"] != "finished":
            shutil.rmtree(folder.parent)
    (job,) = output.glob("jobs/diverging*")
    job.unlink()
    return printed, report


@pytest.fixture(scope="module")
def swept(interrupted: tuple[Path, list[dict[str, Any]]], shared: tuple[list[str], str]) -> Path:
    """The output folder of half of the documented example, of more rounds: two finished runs."""
    return interrupted[0]


def test_the_documented_sweep_gives_what_the_same_runs_give_by_hand(swept, tmp_path, no_pictures):
    """Also of the run that was killed twice and interrupted once."""
    assert len(folders(swept)) == 2
    for folder in folders(swept):
        given = json.loads((folder / "config.json").read_text())["overrides"]
        assert given["alpha"] == 0.5
        by_hand = run_inline({**given, "output-dir": str(tmp_path)}, 4)
        assert same_bits(final_model(folder), final_model(by_hand))
        assert [line["round"] for line in history_of(folder)] == list(range(1, NUM_ROUNDS + 1))


def test_what_is_finished_is_not_run_again(swept, monkeypatch, capsys):
    """Though another recipe has finished it."""
    monkeypatch.setattr(RayTasks, "connect", lambda self: pytest.fail("Ray was started"))
    assert main("run", str(sweep), "--output", str(swept), *ONCE) == 0
    assert "2 runs already finished" in capsys.readouterr().out


def test_only_rounds_in_flight_were_run_again(interrupted, swept):
    """Such a line may be there before its checkpoint is."""
    _, before = interrupted
    [after] = [h for f in folders(swept) if (h := history_of(f)[: len(before)])[0] == before[0]]
    assert after[:-1] == before[:-1]
    assert without_times(after[-1:]) == without_times(before[-1:])


def test_two_runners_share_the_runs_of_a_recipe(swept, shared):
    """Each run once; both return when all have ended."""
    printed, _ = shared
    attempts = folders(swept)
    assert len(attempts) == len({path.parent for path in attempts}) == 2
    for path in attempts:
        assert summary_of(path)["status"] == "finished"
    assert all("seed 0" in text for text in printed)  # each names what the other has done


def test_a_run_that_diverges_is_survived_and_named(shared):
    printed, report = shared
    [message] = [text for text in printed if "values that are not finite" in text]
    assert re.search(r"diverged fedprox\.mu = \S+, heterogeneous, seed 0: ", message)
    assert "| fedprox.mu = 1e+30 | –; diverged 1/1 |" in report


class Cells(HTMLParser):
    """The cells of a page's tables, row by row, and every address that the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.in_cell = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attributes if k in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.rows[-1][-1] = self.rows[-1][-1].strip()
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[-1][-1] += data


def test_the_report_holds_the_numbers_of_the_histories(swept):
    page, text = write_report(swept)
    cells = Cells()
    cells.feed(page.read_text())
    for folder in folders(swept):
        mu = json.loads((folder / "config.json").read_text())["overrides"]["fedprox.mu"]
        last = history_of(folder)[-2:]  # "mean 2", whatever num-rounds is set to
        mean = statistics.fmean(100 * line["global"]["accuracy"] for line in last)
        (row,) = [row for row in cells.rows if row and row[0] == f"fedprox.mu = {mu}"]
        assert row[1:] == [f"{mean:.2f}"]  # a sweep has no numbers of a paper
        assert f"| fedprox.mu = {mu} | {mean:.2f} |\n" in text.read_text()
    assert "homogeneous above heterogeneous" not in page.read_text()  # half of it was not asked for
    assert sum(a.startswith("data:image/") for a in cells.addresses) == 1  # the split
    (figure,) = re.findall(
        r'<script type="application/json" id="\S+">(.*?)</script>', page.read_text()
    )
    assert len({trace["name"] for trace in json.loads(figure)["data"]}) == 2
    assert all(a.startswith(("data:", "#")) for a in cells.addresses)  # it opens offline
    for line in text.read_text().splitlines():
        if line.startswith("!["):
            assert (swept / line.rpartition("(")[2].rstrip(")")).is_file()


def test_where_curves_are_shown_they_come_before_the_numbers(swept, tmp_path):
    output = tmp_path / "copy"
    shutil.copytree(swept, output)
    (job,) = output.glob("jobs/*.json")
    about = json.loads(job.read_text())
    for shows in ("table", "curves"):
        message = about | {"text": f"shows: {shows}\n{about['text']}"}
        job.write_text(json.dumps(message))
        page, text = (path.read_text() for path in write_report(output))
        is_first = shows == "curves"
        assert (page.index('class="chart') < page.index('<table class="sortable')) is is_first
        assert "Curves: [report.html]" in text


def browser() -> str:
    """A headless browser, if there is one; skips without."""
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
    )
    if not found:
        pytest.skip("no Chromium or Chrome on PATH: sorting is not tried in a browser")
    return found


def test_a_click_on_a_heading_sorts_in_a_real_browser(swept, tmp_path):
    page, _ = write_report(swept)
    click = """<script>
      const heads = document.querySelectorAll("table.sortable thead tr:last-child button");
      const read = () => [...document.querySelectorAll("table.sortable tbody tr")].map(
        row => row.cells[1].textContent.trim()).join();
      const seen = [];
      heads[1].click(); seen.push(read()); heads[1].click(); seen.push(read());
      document.title = seen.join(";");
    </script>"""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</html>", click + "</html>"))
    dump = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    falling, rising = dump.partition("<title>")[2].partition("</title>")[0].split(";")
    values = [float(value) for value in falling.split(",")]
    assert len(values) == 2
    assert values == sorted(values, reverse=True)
    assert rising.split(",") == falling.split(",")[::-1]


def wrong(folder: Path) -> list[str]:
    """What verify finds wrong, replaying two rounds."""
    return [check.found for check in checks(RunReader(folder), 2) if not check.passed]


@pytest.fixture
def copied(swept: Path, tmp_path: Path) -> Path:
    """A copy of one finished run, to be tampered with."""
    return Path(shutil.copytree(folders(swept)[0], tmp_path / "run"))


def test_a_finished_run_verifies_to_the_bit(swept, capsys):
    assert main("verify", str(folders(swept)[0])) == 0
    message = capsys.readouterr().out
    assert "split: " in message
    assert message.count("bit-identical (") == 2
    assert "1 run, 0 checks failed" in message


def test_files_that_are_not_the_runs_are_found(copied):
    model = copied / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x01")
    assert [found.partition(":")[0] for found in wrong(copied)] == ["model.safetensors"]


def test_accuracies_that_the_replay_does_not_give_are_found(copied):
    lines = history_of(copied)
    lines[1]["global"]["accuracy"] += 0.05
    (copied / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [found.partition(":")[0] for found in wrong(copied)] == ["history.jsonl", "round 2"]


def test_another_split_and_other_weights_are_found(copied):
    """A manifest that fits its files, but not the run: only the replay can tell."""
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["split"] = manifest["rounds"]["1"] = "0" * 16
    (copied / "manifest.json").write_text(json.dumps(manifest))
    assert [found.partition(":")[0] for found in wrong(copied)] == ["split", "round 1"]


def test_a_run_that_did_not_end_is_not_verified(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["files"] = {}
    (copied / "manifest.json").write_text(json.dumps(manifest))
    assert wrong(copied) == ["the run has not ended: its manifest is incomplete"]
    assert main("verify", str(copied.parent / "nothing")) == 2


def test_of_several_runs_one_that_was_killed_is_skipped_by_name(copied, capsys):
    killed = Path(shutil.copytree(copied, copied.parent / "killed"))
    manifest = json.loads((killed / "manifest.json").read_text())
    manifest["files"] = {}
    (killed / "manifest.json").write_text(json.dumps(manifest))
    assert main("verify", str(killed)) == 1
    assert main("verify", str(copied.parent), "--rounds", "1") == 0
    assert "2 runs, 1 skipped, 0 checks failed" in capsys.readouterr().out
    shutil.copytree(killed, copied, dirs_exist_ok=True)
    assert main("verify", str(copied.parent)) == 1  # nothing was looked at
