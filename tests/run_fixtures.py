"""Small runs on digits, what they leave, and messages made by hand."""

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch import Tensor

import server_app.report
from protocol.messages import DatasetSpec, TrainReply, reply_content
from protocol.options import OptionValue
from server_app.inline import run_inline
from server_app.record import SCORES
from server_app.run_directory import read_arrays
from server_app.run_reader import RunReader

Overrides = Mapping[str, OptionValue]

# Four clients share 143 of the 1,438 training digits, of a quarter of the pixels.
SMALL: dict[str, OptionValue] = {
    "source": "digits",
    "data-fraction": 0.1,
    "image-size": "16",
    "model": "cnn-fedreco",
    "alpha": 5.0,
    "batch-size": 32,
    "lr": 0.05,
    "num-rounds": 2,
    "keep-state": True,  # for tests that continue finished runs
}
NUM_CLIENTS = 4
FACTS = DatasetSpec(
    (1, 32, 32), tuple("0123456789"), (0.5,), (0.25,)
)  # where only a record is needed


@contextmanager
def without_pictures() -> Iterator[None]:
    """Runs on the inline engine draw nothing: their pictures take as long as they do."""
    with pytest.MonkeyPatch.context() as patch:
        for picture in ("plot_accuracy", "plot_label_distribution"):
            patch.setattr(server_app.report, picture, lambda *what: None)
        yield


@contextmanager
def keel_run(*arguments: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """`keel run` in a process of its own, which is killed at the end."""
    command = [sys.executable, "-m", "keel", "run", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process: subprocess.Popen[str] = subprocess.Popen(command, **pipes, text=True, **how)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def resume(folder: Path, num_clients: int = NUM_CLIENTS, **given: OptionValue) -> Path:
    """Go on with the run in `folder`; underscores in the keys given stand for hyphens."""
    keys = {name.replace("_", "-"): value for name, value in given.items()}
    return run_inline({"resume": str(folder)} | keys, num_clients)


def only_run(home: Path) -> Path:
    """The directory of the one run in this Keel home."""
    [directory] = (home / "runs").iterdir()
    return directory


def history_of(folder: Path) -> list[dict[str, Any]]:
    """Every round as one dict: its lines in history.jsonl and clients.jsonl.

    A key that both have, such as "personal", has what is about single clients under "clients".
    """
    run = RunReader(folder)
    rounds = []
    for line, of_clients in zip(run.history, run.clients(), strict=True):
        both = {key: line[key] | {"clients": of_clients[key]} for key in SCORES if key in line}
        rounds.append({**of_clients, **line, **both})
    return rounds


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history less what differs between two runs of the same: how long it took, and the bytes
    sent, as a message holds the folder's name."""
    timed = ("seconds", "client_seconds", "client_cpu_seconds")
    differing = (*timed, "bytes_down", "evaluation_bytes_down")
    lines = [{k: v for k, v in line.items() if k not in differing} for line in history]
    for line in lines:  # each client's seconds too
        for client, update in line.get("updates", {}).items():
            line["updates"][client] = {k: v for k, v in update.items() if k != "seconds"}
    return lines


def summary_of(folder: Path) -> dict[str, Any]:
    """summary.json."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def accuracy_of(folder: Path) -> float:
    """The final accuracy of the global model."""
    accuracy: float = summary_of(folder)["results"]["global.accuracy"]["final"]
    return accuracy


def audit_of(folder: Path, event: str = "") -> list[dict[str, Any]]:
    """The lines of audit.jsonl, of this event alone if it is given."""
    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [line for line in lines if event in ("", line["event"])]


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


def assert_same_run(one: Path, other: Path) -> None:
    """Equal models, client state and histories, but for times."""
    assert same_bits(all_models(one), all_models(other))
    assert without_times(history_of(one)) == without_times(history_of(other))


def inheriting(variable: str, value: str) -> list[tuple[int, str]]:
    """(process id, command) of the living processes with this variable in their environment."""
    entry, found = f"{variable}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(folder.name), command))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def wait_until(
    holds: Callable[[], object],
    limit_s: float = 100.0,
    process: "subprocess.Popen[Any] | None" = None,
) -> None:
    """Return once it holds; fails after `limit_s`, or if the process ends meanwhile."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
