"""What the tests share: a Keel home of their own, fixtures, and the order of the files.

Nothing heavy is imported here: xdist's controller, which runs no test, would import it too and all
workers wait for it.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from run_fixtures import Overrides

    from data.sources import Source

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's: xdist has a worker for each core
gc.disable()  # until everything is imported, of which nothing is garbage
pytest.register_assert_rewrite("run_fixtures")  # its assertions, too, show both sides

# These take longest and start first, or one worker would wait for the others at the end.
LONGEST = (
    *("test_loopback.py", "test_own_methods.py", "test_recipe_runs.py", "test_keel_run_flower.py"),
    *("test_flwr_run.py", "test_keel_check_method.py", "test_tutorials.py", "test_worker.py"),
    *("test_wheel.py", "test_keel_run.py", "test_library_networks.py", "test_api.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shuffle SEED`: files, and the tests within a file, in an order drawn with this seed."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run in a random order")


def pytest_configure() -> None:
    """Give examples of Hypothesis any time: on a busy machine a deadline would be a timed test.

    Half as many as by default: the other half takes seconds of every check.
    """
    from hypothesis import settings

    settings.register_profile("keel", deadline=None, max_examples=50)
    settings.load_profile("keel")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests in end_to_end/, and run the longest first, or all in a random order."""
    for item in items:
        if "end_to_end" in item.path.parts:
            item.add_marker(pytest.mark.end_to_end)
    seed = config.getoption("shuffle")
    if seed is None:
        items.sort(key=order)
        return
    draw = random.Random(seed)
    rank = {path: draw.random() for path in sorted({item.path for item in items})}
    draw.shuffle(items)
    items.sort(key=lambda item: rank[item.path])


def order(item: pytest.Item) -> int:
    """Long files first, then the other end-to-end tests; unit tests fill the gaps."""
    if item.path.name in LONGEST:
        return LONGEST.index(item.path.name) - len(LONGEST)
    return int("end_to_end" not in item.path.parts)


def pytest_collection_finish() -> None:
    """What is imported stays: that the collector need not look at it saves a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.fixture(autouse=True)
def undisturbed(keel_home: Path) -> Iterator[None]:
    """No test sees what another has changed in the process, or the method it has replaced."""
    from process_fixtures import put_back

    with put_back():
        yield
    if "client_app.methods" in sys.modules:
        sys.modules["client_app.methods"].method_of.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def keel_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$KEEL_HOME for the whole session: no test reads or writes the user's own.

    `os.fsync` does nothing, because no test depends on what survives a power failure.
    """
    import torch

    torch.set_num_threads(1)  # xdist has a worker for each core
    home = tmp_path_factory.mktemp("keel-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEEL_HOME", str(home))
        patch.setenv("OMP_NUM_THREADS", "1")  # of processes too: threads that wait for a core spin
        patch.setattr(os, "fsync", lambda descriptor: None)
        # else the first `assert_close` imports distributed tensors, of which no test has any
        unwrap = "torch.testing._comparison._unwrap_dtensor_for_comparison"
        patch.setattr(unwrap, lambda *both: both, raising=False)
        yield home


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Source]:
    """load_source with its directories below tmp_path."""
    from data.sources import Reading, load_source

    def loaded(spec: str, **reading: Any) -> Source:
        return load_source(spec, tmp_path / "data", tmp_path / "cache", Reading(**reading))

    return loaded


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """`without_pictures` for one test."""
    from run_fixtures import without_pictures

    with without_pictures():
        yield


@pytest.fixture
def run(tmp_path: Path, no_pictures: None) -> Callable[..., Path]:
    """run(overrides, num_clients) -> folder: a small run on the inline engine, without pictures."""
    from run_fixtures import NUM_CLIENTS, SMALL

    from server_app.inline import run_inline

    def run_small(overrides: Overrides, num_clients: int = NUM_CLIENTS) -> Path:
        return run_inline(SMALL | {"output-dir": str(tmp_path)} | dict(overrides), num_clients)

    return run_small


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """client-0001 fails in round 2 of FedAvg."""
    from client_app.methods.fedavg import FedAvg

    train = FedAvg.train

    def train_or_fail(method: FedAvg, ctx: Any) -> Any:
        if (ctx.client, ctx.round) == ("client-0001", 2):
            raise ValueError("no power")
        return train(method, ctx)

    monkeypatch.setattr(FedAvg, "train", train_or_fail)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Path:
    """A Keel home of one test's own; its runs draw nothing."""
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal("run", "lr=x"): the error of such a command, one line; its exit code is 2."""
    from keel.cli.main import main

    def error_of(*words: str) -> str:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    return error_of


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """printed("list"): what such a command prints; its exit code is 0."""
    from keel.cli.main import main

    def output_of(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    return output_of


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks and batches of the clients in float64.

    In float32, two pixels of a pool can tie on one processor and not on another, and a training
    that is compared with a formula then differs from it by a thousand roundings.
    """
    import torch

    import client_app.process_cache
    from client_app.samples import Pixels
    from client_app.setup import build_network

    normalise = Pixels.normalise
    monkeypatch.setattr(Pixels, "normalise", lambda *a: normalise(*a).double())
    monkeypatch.setattr(
        client_app.process_cache, "build_network", lambda *a, **k: build_network(*a, **k).double()
    )
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower's runtimes set before an app starts; a Message cannot be made without."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
