"""What the tests share: a Keel home of their own, small runs on digits, messages made by hand,
and one SuperLink for the runs through `flwr run`.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from torch import Tensor

import server_app.report
from data.sources import Source, load_source
from keel.deployment.loopback import free_ports
from keel.deployment.superlink import toml
from protocol.messages import DatasetSpec, TrainReply, reply_content
from protocol.options import OptionValue
from server_app.inline import run_inline
from server_app.run_directory import read_arrays

Overrides = Mapping[str, OptionValue]

# Four clients share the 1,438 training digits; one round takes about a tenth of a second.
SMALL: dict[str, OptionValue] = {
    "source": "digits",
    "model": "cnn-fedreco",
    "alpha": 5.0,
    "batch-size": 64,
    "lr": 0.05,
    "num-rounds": 2,
}
NUM_CLIENTS = 4
FACTS = DatasetSpec(
    (1, 32, 32), tuple("0123456789"), (0.5,), (0.25,)
)  # where only a record is needed


# These take longest and start first, or one worker would wait for the others at the end.
LONGEST = (
    *("test_loopback.py", "test_loopback_supernodes.py", "test_flwr_run.py", "test_server_run.py"),
    *("test_keel_run_flower.py", "test_experiments_runs.py", "test_keel_run_deployment.py"),
    *("test_wheel.py", "test_compared_runs.py", "test_demo.py", "test_tutorials.py"),
)
torch.set_num_threads(1)  # xdist has a worker for each core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in end_to_end/, and run the longest files first."""
    for item in items:
        if "end_to_end" in item.path.parts:
            item.add_marker(pytest.mark.end_to_end)
    rank = {name: number for number, name in enumerate(LONGEST, start=-len(LONGEST))}
    last = {True: 0, False: 1}  # unit tests fill the gaps
    items.sort(key=lambda item: rank.get(item.path.name, last["end_to_end" in item.path.parts]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files in end_to_end/ stay on one worker, as their tests share costly fixtures.

    Other tests go to any worker. xdist's own groups have no effect under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            together = "end_to_end" in path or path.endswith("test_models_architectures.py")
            return path if together else nodeid

        def _reschedule(self, node: Any) -> None:
            """A worker gets its next file when one test is left, not three: none waits behind
            a test of minutes while another worker is idle.
            """
            is_file = "::" not in next(iter(self.workqueue), "::")
            if not (is_file and self._pending_of(self.assigned_work[node]) > 1):
                super()._reschedule(node)

    config.option.loadscopereorder = False  # the order of collection
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def keel_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$KEEL_HOME for the whole session: no test reads or writes the user's own."""
    home = tmp_path_factory.mktemp("keel-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEEL_HOME", str(home))
        yield home


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Source]:
    """load_source with its directories below tmp_path."""
    return partial(load_source, data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")


@contextmanager
def without_pictures() -> Iterator[None]:
    """Runs on the inline engine draw nothing: their pictures take as long as they do."""
    with pytest.MonkeyPatch.context() as patch:
        for picture in ("plot_accuracy", "plot_label_distribution"):
            patch.setattr(server_app.report, picture, lambda *what: None)
        yield


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """`without_pictures` for one test."""
    with without_pictures():
        yield


@pytest.fixture
def run(tmp_path: Path, no_pictures: None) -> Callable[..., Path]:
    """run(overrides, num_clients) -> folder: a small run on the inline engine, without pictures."""

    def run_small(overrides: Overrides, num_clients: int = NUM_CLIENTS) -> Path:
        return run_inline(SMALL | {"output-dir": str(tmp_path)} | dict(overrides), num_clients)

    return run_small


def resume(folder: Path, num_clients: int = NUM_CLIENTS, **given: OptionValue) -> Path:
    """Go on with the run in `folder`; underscores in the keys given stand for hyphens."""
    keys = {name.replace("_", "-"): value for name, value in given.items()}
    return run_inline({"resume": str(folder)} | keys, num_clients)


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of history.jsonl."""
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history less what differs between two runs of the same: how long it took, and the bytes
    sent, as a message holds the folder's name."""
    timed = ("seconds", "client_seconds", "client_cpu_seconds")
    differing = (*timed, "bytes_down", "evaluation_bytes_down")
    return [{k: v for k, v in line.items() if k not in differing} for line in history]


def summary_of(folder: Path) -> dict[str, Any]:
    """summary.json."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def final_model(folder: Path) -> dict[str, Tensor]:
    """The arrays of model.safetensors."""
    return read_arrays(folder / "model.safetensors")[0]


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal names, dtypes, shapes and bytes; a NaN equals itself, -0.0 is not 0.0."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and a[name].numpy().tobytes() == b[name].numpy().tobytes()
        for name in a
    )


def all_models(folder: Path) -> dict[str, Tensor]:
    """The final model and what every client keeps for the next round, by file and array name."""
    found = {f"model/{name}": array for name, array in final_model(folder).items()}
    for client in sorted((folder / "clients").glob("*")):
        newest = max(client.glob("round-*.safetensors"))
        kept = load_file(newest)
        found |= {f"{client.name}/{newest.name[:11]}/{k}": v for k, v in kept.items()}
    return found


@pytest.fixture
def task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower's runtimes set before an app starts; a Message cannot be made without."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def sent(messages: list[Message]) -> list[Message]:
    """The messages as a grid has sent them: with ids, so that they can be answered."""
    for message in messages:
        message.metadata.__dict__["_message_id"] = secrets.token_hex(8)
    return messages


def answer(message: Message, reply: TrainReply) -> Message:
    """The message that carries this reply to `message`."""
    return Message(reply_content(reply), reply_to=message)


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Float64 arrays of mixed signs and magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + seed % 3)
        for name, shape in shapes.items()
    }


# --- the SuperLink ---------------------------------------------------------------------------

root = Path(__file__).parent.parent
left_behind_s = 20.0  # what a process may take to end after it was asked to


class SuperLink:
    """A local SuperLink of our own: its own ports, home and Ray, and a copy of the app to run.

    `flwr` starts it with its first command, as for any user. Every process that comes of it has
    our mark in its environment: these, and no others, are ended by `close`.
    """

    def __init__(self, folder: Path) -> None:
        self.mark = f"KEEL_TEST_SUPERLINK={secrets.token_hex(16)}"
        self.app = folder / "app"
        self.ray = Path(tempfile.mkdtemp(prefix="keel-ray-"))  # short: it holds sockets' paths
        skip = (".*", "*.egg-info", "__pycache__", "build")
        shutil.copytree(root, self.app, ignore=shutil.ignore_patterns(*skip))
        shutil.copy(root / ".gitignore", self.app)
        http, control = free_ports(2)
        name, _, value = self.mark.partition("=")
        self.env = os.environ | {
            name: value,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "KEEL_HOME": str(folder / "keel"),
            "RAY_TMPDIR": str(self.ray),
            "COLUMNS": "200",
        }

    def flwr(
        self, *arguments: str, timeout_s: float = 280, app: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`flwr` with these arguments, in the folder of the app, or of another one."""
        return subprocess.run(
            ["flwr", *arguments],
            cwd=app or self.app,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run(
        self, keys: Overrides, num_supernodes: int, cpus_each: int, app: Path | None = None
    ) -> str:
        """`flwr run . --stream`; returns what it printed."""
        config = " ".join(f"{key}={toml(value)}" for key, value in keys.items())
        federation = f"num-supernodes={num_supernodes} client-resources-num-cpus={cpus_each}"
        options = ["--stream", "--run-config", config, "--federation-config", federation]
        return self.flwr("run", ".", *options, app=app).stdout

    def processes(self) -> list[int]:
        """Ids of the living processes that came of this SuperLink."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = self.mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has ended, or belongs to another user
                continue
            if is_ours and state not in "ZX":
                found.append(int(folder.name))
        return found

    def close(self) -> list[int]:
        """End all that was started; the ids of processes that are still there after that."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.processes():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + left_behind_s
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.2)
        shutil.rmtree(self.ray, ignore_errors=True)
        return self.processes()


@pytest.fixture(scope="session")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    """One SuperLink for all tests, ended with everything that it started."""
    link = SuperLink(tmp_path_factory.mktemp("superlink"))
    try:
        for _ in range(3):  # `flwr` gives a SuperLink 15 s, too few on a busy machine
            started = link.flwr("list")
            if started.returncode == 0:
                break
        assert started.returncode == 0, started.stdout
        yield link
    finally:
        left = link.close()
    assert left == [], f"processes are left behind: {left}"
