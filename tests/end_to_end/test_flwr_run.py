"""`flwr run` as a user types it: two rounds of every method, in one background SuperLink.

Each starts Ray, which takes most of its time, so all but one are slow tests: test_compared_runs.py
trains every method on the inline engine, and test_keel_run_flower.py one on two workers.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from method_fixtures import METHODS
from ray._private.utils import get_num_cpus
from run_fixtures import (
    SMALL,
    all_models,
    assert_same_run,
    final_model,
    history_of,
    same_bits,
    summary_of,
)
from superlink_fixtures import SuperLink

from protocol.code import sources_digest
from protocol.options import OptionValue
from protocol.processes import num_cores
from server_app.inline import run_inline

num_supernodes = 4
half = SMALL | {"fraction-train": 0.5, "local-test-fraction": 0.2, "cache-mb": 64}
num_cpus = min(num_cores(), int(get_num_cpus()))  # so many for each worker: there is one worker

fedintr = {"method": "fedintr", "local-epochs": 2, "evaluate-clients": "all"}
QUICK = "scaffold, one worker"  # from a second checkout, whose code differs
runs: dict[str, tuple[dict[str, OptionValue], int]] = {  # keys, CPUs for each worker
    QUICK: ({"method": "scaffold", "evaluate-clients": "all"}, num_cpus),
    "fedreco": ({"method": "fedreco", "fedreco.eta-0": 0.5}, 1),
    "fedavg": ({"method": "fedavg", "evaluate-clients": "all"}, 1),
    "fedintr": (fedintr, 1),
    "fedreco, one worker": ({"method": "fedreco", "fedreco.eta-0": 0.5}, num_cpus),
    "fedintr, one worker": (fedintr, num_cpus),
    "scaffold": ({"method": "scaffold"}, 1),
    "fedprox": ({"method": "fedprox", "evaluate-clients": "cohort"}, 1),
    "fedavgm": ({"server-optimizer": "fedavgm"}, 1),
    "fedadam": ({"server-optimizer": "fedadam"}, 1),
}
runs |= {name: ({"method": name}, 1) for name in METHODS if name not in runs}

Finished = Callable[[str], tuple[Path, str]]


def files_of(folder: Path) -> dict[str, str]:
    """Every file's digest, by its path in the folder; caches of Python aside."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def finished(superlink: SuperLink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """finished(name): folder and output of that run."""
    base = tmp_path_factory.mktemp("runs")
    other = base / "checkout"
    shutil.copytree(superlink.app, other)
    trainer = other / "client_app" / "trainer.py"
    trainer.write_text(trainer.read_text() + "# another version\n")
    before = [files_of(app) for app in (superlink.app, other)]

    @cache
    def run(name: str) -> tuple[Path, str]:
        keys, cpus_each = runs[name]
        output = base / name.replace(", ", "-").replace(" ", "-")
        keys = half | {"output-dir": str(output)} | keys
        app = other if name == QUICK else superlink.app
        printed = superlink.run(keys, num_supernodes, cpus_each, app)
        folders = list(output.glob("*"))
        assert len(folders) == 1, printed
        return folders[0], printed

    yield run
    # the CLI rewrote nothing, the runs left nothing
    assert [files_of(app) for app in (superlink.app, other)] == before


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == QUICK else [pytest.mark.slow]) for n in runs]
)
def test_every_method_runs_for_two_rounds_and_leaves_its_folder(finished, name):
    folder, printed = finished(name)
    summary, history = summary_of(folder), history_of(folder)
    assert summary["status"] == "finished", printed
    assert f"run directory: {folder}" in printed
    assert "Traceback" not in printed
    assert summary["rounds"] == len(history) == 2
    assert summary["left_out"] == 0
    keys, _ = runs[name]
    given = json.loads((folder / "config.json").read_text())["overrides"]
    assert keys.items() <= given.items()
    first, second = (set(line["participants"]) for line in history)
    assert first != second  # one joins only in round 2
    if METHODS[keys.get("method", "fedavg")].is_stateful:
        assert first | second <= {path.name for path in (folder / "clients").iterdir()}
    for line in history:
        assert len(line["participants"]) == 2
        assert line["left_out"] == {}
        scores = [line[key] for key in ("global", "personal") if key in line]
        assert scores
        assert all(0 <= s.get("mean", s.get("accuracy")) <= 1 for s in scores)
        asked = {"fedavg": 4, "fedintr": 4, "fedprox": 2, QUICK: 4}.get(name)
        if asked:
            assert len(line["local_global"]["clients"]) == asked
    assert all(array.isfinite().all() for array in final_model(folder).values())
    names = {path.name for path in folder.iterdir()}
    assert {"checkpoints", "accuracy.png", "labels.png"} <= names


@pytest.mark.parametrize(
    "names",
    [
        (QUICK,),
        pytest.param(("fedintr",), marks=pytest.mark.slow),
        pytest.param(("fedreco", "fedreco, one worker"), marks=pytest.mark.slow),
        pytest.param(("fedintr", "fedintr, one worker"), marks=pytest.mark.slow),
    ],
)
def test_the_model_is_the_same_to_the_bit_inline_with_one_worker_and_with_two(
    finished, tmp_path, no_pictures, names
):
    keys, _ = runs[names[0]]
    inline = run_inline(half | keys | {"output-dir": str(tmp_path)}, num_supernodes)
    for folder, _ in map(finished, names):
        assert same_bits(all_models(folder), all_models(inline))
        for line, expected in zip(history_of(folder), history_of(inline), strict=True):
            assert line["participants"] == expected["participants"]
            assert line["losses"] == expected["losses"]


@pytest.mark.slow
def test_more_workers_than_clients_and_cores_give_the_same_bits(superlink, tmp_path, no_pictures):
    keys = half | {"method": "fedintr", "num-clients": num_supernodes}
    base = tmp_path / "runs"
    printed = superlink.run(keys | {"output-dir": str(base)}, num_supernodes + 2, cpus_each=1)
    assert "Traceback" not in printed
    [folder] = base.glob("*")
    inline = run_inline(keys | {"output-dir": str(tmp_path / "inline")}, num_supernodes)
    assert_same_run(folder, inline)


@pytest.mark.slow
def test_a_mistake_ends_the_run_with_a_line_that_names_it_and_leaves_no_folder(superlink, tmp_path):
    keys = SMALL | {"output-dir": str(tmp_path / "runs"), "fraction-train": 7.0}
    printed = superlink.run(keys, num_supernodes, cpus_each=1)
    [line] = [text for text in printed.splitlines() if " error: " in text]
    assert line.endswith(" error: fraction-train = 7.0: expected a number in (0, 1]")
    assert not (tmp_path / "runs").exists()
    assert "finished:failed" in superlink.flwr("list").stdout


def test_a_second_checkout_trains_with_its_own_code(finished):
    """Through the SuperLink that the first one started, in the first one's folder.

    Ray's workers look for modules in the folder of that process first. A worker refuses a message
    that was made from other code, so a run that finishes was run by this checkout's alone.
    """
    folder, printed = finished(QUICK)
    assert summary_of(folder)["status"] == "finished", printed
    sources = json.loads((folder / "manifest.json").read_text())["versions"]["sources"]
    assert sources != sources_digest()


def test_every_process_is_one_of_ours_and_the_superlink_is_among_them(superlink):
    assert superlink.processes()
    commands = [
        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for pid in superlink.processes()
    ]
    assert any("flower-superlink" in command for command in commands)
    port = superlink.env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
    assert any(port in command for command in commands)
