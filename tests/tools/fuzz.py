"""Mutates replies and state files, and counts what is not handled as promised.

    python -m tests.tools.fuzz --inputs 1000000 --seed 0

Every input is a valid one with a few random changes: of bytes, of values within its JSON, or of
values within the header of its safetensors part. A crash is an exception other than the documented
ValueError, a message that is not one printable line, an accepted reply that breaks its rule, an
input that takes more than 5 seconds, or an interpreter that dies. Inputs that crashed are written
to --save.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    RecordDict,
)

from client_app.site_privacy import Ledger
from client_app.state import StateFolder
from flower_adapter import assign_source_node, begin_task, from_bytes, to_bytes
from keel.tables import markdown
from protocol.config import config_from_json, default_config
from protocol.files import digest
from protocol.messages import (
    PACKED,
    Arrays,
    RosterEntry,
    TrainReply,
    array_record,
    read_roster,
    reply_content,
    roster_content,
)
from protocol.text import in_one_line, is_client_name
from server_app.audit import AuditLog, audit_end, audit_problem
from server_app.history import append_history, truncate_history
from server_app.roster import read_saved_roster, save_roster
from server_app.run_directory import Checkpoint, RunDirectory, read_arrays, save_arrays
from server_app.summary import read_manifest, read_run_config, read_summary, summarise
from strategies.validation import ExpectedReply, NormReference, Validation

max_seconds = 5.0
batch = 2000  # inputs of one process: one that dies costs no more
ARRAYS: Arrays = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}
ENTRY = RosterEntry("site-a", [3, 4], [1, 2], [1, 8, 8], "cnn", 8, "flwr 1", 0)
ROUND = {
    "rejected": 1,
    "bytes_down": 10,
    "bytes_up": 20,
    "seconds": {"training": 1.0},
    "global": {"accuracy": 0.5, "loss": 1.0},
}
Check = Callable[[bytes], bool]  # whether the input was accepted; raises on a crash


class Crash(AssertionError):
    """A promise was broken."""


# --- mutations ------------------------------------------------------------------------------------

values: list[Any] = [
    *(None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, math.nan, math.inf),
    *("", "a", "x" * 5000, "../../x", "\x1b[31m", "\u202e", "<b>", "[red]", "\ud800", "0", "NaN"),
    *([], [[]], [1, 2, 3], {}, {"a": 1}, [0] * 300),
]
tokens = [json.dumps(value).encode() for value in values] + [
    *(b"\0", b"\xff" * 8, b"\n", b"\r\n", b"{", b"}", b"[" * 2000, b'"', b"\\u0000", b"1e999"),
    *(struct.pack(">Q", n) for n in (0, 1, 2**16, 2**32, 2**63)),
    *(struct.pack("<Q", n) for n in (0, 1, 2**16, 2**32, 2**63)),
]


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    """A few changes at random places."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at, kind = draw.randrange(len(changed) + 1), draw.randrange(6)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at:at] = draw.choice(tokens)
        elif kind == 2:
            del changed[at : at + draw.choice((1, 2, 8, 64))]
        elif kind == 3:
            changed[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        elif kind == 4:
            piece = changed[at : at + draw.randrange(64)]
            changed[at:at] = piece
        elif draw.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def mutate_json(value: Any, draw: random.Random) -> Any:
    """One value within it replaced, removed, renamed or doubled."""
    is_inner = isinstance(value, dict | list) and value
    if not is_inner or draw.random() < 0.1:
        return draw.choice(values)
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    key = draw.choice(list(changed)) if isinstance(value, dict) else draw.randrange(len(changed))
    kind = draw.randrange(8)
    if kind == 0:
        del changed[key]
    elif kind == 1 and isinstance(changed, dict):
        changed[str(draw.choice(values))] = changed.pop(key)
    elif kind == 1:
        changed.append(changed[key])
    else:
        changed[key] = mutate_json(changed[key], draw)
    return changed


def mutate_text(content: bytes, draw: random.Random) -> bytes:
    """JSON, or a JSON value a line: by value, or by byte."""
    if draw.random() < 0.4:
        return mutate_bytes(content, draw)
    try:
        return json.dumps(mutate_json(json.loads(content), draw)).encode()
    except ValueError:
        lines = content.splitlines()
        number = draw.randrange(len(lines))
        lines[number] = mutate_text(lines[number], draw)
        return b"\n".join(lines) + b"\n" * draw.randrange(2)


def mutate_tensors(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file: its header by value, or any byte."""
    if draw.random() < 0.5:
        return mutate_bytes(content, draw)
    length = int.from_bytes(content[:8], "little")
    header = mutate_text(content[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


# --- replies --------------------------------------------------------------------------------------


class PlainHalf:
    """The server half as validation needs it."""

    def update_of(self, reply: TrainReply) -> Arrays:
        return {"a": reply.arrays["a"]}

    def beside_model(self, reply: TrainReply) -> Arrays:
        return reply.extra

    def extra_reason(self, reply: TrainReply) -> str:
        return ""


def is_accepted(content: RecordDict) -> bool:
    """Validate a reply as the server does; Crash if an accepted one breaks its rule."""
    config = config_from_json(json.dumps(default_config() | {"norm-bound": "fixed"})).rounds
    reply = Message(content, reply_to=Message(RecordDict(), 1, MessageType.TRAIN))
    assign_source_node(reply, 1)
    expected = ExpectedReply(1, ARRAYS, {"x": torch.ones(2)}, {"site-a": 7})
    validation = Validation({1: ENTRY}, expected, config, PlainHalf(), NormReference())
    validation.add(reply)
    report = validation.report()
    for reason in report.left_out.values():
        check_line(reason)
    for reply in report.accepted:
        arrays = reply.arrays | reply.extra
        shapes = {name: (a.shape, a.dtype) for name, a in arrays.items()}
        wanted = {n: (a.shape, a.dtype) for n, a in (ARRAYS | {"x": torch.ones(2)}).items()}
        largest = max(float(a.abs().max()) for a in arrays.values() if a.is_floating_point())
        if shapes != wanted or not largest <= 1e4 or reply.metrics["num-examples"] != 7:
            raise Crash(f"accepted: {reply}")
    return bool(report.accepted)


def reply_envelope(content: bytes) -> bool:
    """The protobuf of a reply's records."""
    try:
        records = from_bytes(RecordDict, content)
    except Exception:  # as `Exchange` treats a reply that cannot be read
        return False
    return is_accepted(records)


def reply_arrays(content: bytes) -> bool:
    """What is packed into a reply's array."""
    reply = reply_of()
    packed = ArrayRecord({"arrays": Array("uint8", (len(content),), PACKED, content)})
    reply["arrays"] = packed
    return is_accepted(reply)


def reply_of() -> RecordDict:
    """A valid reply."""
    metrics = {"num-examples": 7.0, "loss.supervised": 2.0, "personal-accuracy": 0.5}
    return reply_content(TrainReply("site-a", 1, ARRAYS, {"x": torch.ones(2)}, metrics))


def roster_text(content: bytes) -> bool:
    """The JSON of a roster entry."""
    record = ConfigRecord({"entry": content.decode(errors="replace")})
    message = Message(RecordDict({"roster": record}), 1, MessageType.QUERY)
    entry = read_or_refuse(lambda: read_roster(message))
    if entry and not (is_client_name(entry.client) and in_one_line(entry.keel) == entry.keel):
        raise Crash(f"accepted: {entry}")
    return entry is not None


def check_line(text: str) -> None:
    """Crash unless this is one printable line of a bounded length."""
    if len(text) > 2000 or not text.isprintable():
        raise Crash(f"not one printable line: {text[:200]!r}")


def read_or_refuse(read: Callable[[], Any], is_ours: bool = False) -> Any:
    """What is read; None for a ValueError. is_ours: its text stays on the machine."""
    try:
        return read()
    except ValueError as error:
        if not is_ours:
            check_line(str(error))
        return None


# --- state files ----------------------------------------------------------------------------------


@contextlib.contextmanager
def files(folder: Path) -> Iterator[dict[str, tuple[bytes, Callable[..., bytes], Check]]]:
    """For each kind of state file: a valid one, how it is mutated, and who reads it."""
    os.environ["KEEL_HOME"] = str(folder / "home")
    run = folder / "run"
    run.mkdir()
    directory = RunDirectory(run)
    directory.append_releases(1, ["a", "b"])
    directory.append_releases(2, ["a"])
    for number in (1, 2):
        line = {"round": number, "participants": ["a", "b"], "left_out": {"c": "late"}}
        append_history(run / "history.jsonl", line | ROUND)
    save_roster(run / "roster.json", {1: ENTRY})
    config = {"config": default_config(), "overrides": {"method": "fedavg"}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").write_text(json.dumps({"status": "finished", "num_rounds": 2}))
    (run / "manifest.json").write_text(json.dumps({"versions": {}, "rounds": {"1": "ab"}}))
    for event in ("started", "joined"):
        AuditLog(run).note(event, round=1)
    end = audit_end(run)
    save_arrays(run / "model.safetensors", ARRAYS, {"model": "cnn"})
    directory.save_checkpoint(Checkpoint(2, ARRAYS, directory.release_state()), "cnn")
    [checkpoint] = (run / "checkpoints").glob("*")
    state = StateFolder(folder / "state")
    state.save(1, {"model": ARRAYS})
    [version] = (folder / "state").glob("*")
    privacy = config_from_json(json.dumps(default_config() | {"privacy.epsilon": 1.0}))
    ledger = Ledger({"source": "digits"})
    for round_ in (1, 2):
        ledger.charge(privacy, {"source": "digits"}, {"round": round_})

    def reader(path: Path, read: Callable[[], Any]) -> tuple[bytes, Check]:
        whole = path.read_bytes()

        def check(content: bytes) -> bool:
            path.write_bytes(content)
            try:
                return read_or_refuse(read, is_ours=True) is not None
            finally:
                path.write_bytes(whole)

        return whole, check

    def digested(path: Path, read: Callable[[], Any]) -> tuple[bytes, Check]:
        """Half of the inputs under their own digest, as damage before the write would have it."""
        whole, stem = path.read_bytes(), path.name.rpartition("-")[0]

        def check(content: bytes) -> bool:
            shutil.rmtree(path.parent)
            path.parent.mkdir()
            own = path.with_name(f"{stem}-{digest(content)}.safetensors")
            (own if len(content) % 2 else path).write_bytes(content)
            return read_or_refuse(read, is_ours=True) is not None

        return whole, check

    def resume() -> Any:
        lines = truncate_history(run / "history.jsonl", 2)
        return summarise(lines, default_config(), 10)

    def releases() -> Any:
        counts = directory.release_counts()
        if counts["a"] < 2 or counts["b"] < 1:  # what this process knows
            raise Crash(f"under-counted: {counts}")
        return RunDirectory.read_releases(directory)

    def audit() -> Any:
        return None if audit_problem(run, end) else True

    texts: list[tuple[str, Path, Callable[[], Any]]] = [
        ("history", run / "history.jsonl", resume),
        ("releases", run / "releases.jsonl", releases),
        ("roster", run / "roster.json", lambda: read_saved_roster(run / "roster.json")),
        ("config", run / "config.json", lambda: read_run_config(run)),
        ("summary", run / "summary.json", lambda: read_summary(run)),
        ("manifest", run / "manifest.json", lambda: read_manifest(run)),
        ("audit log", run / "audit.jsonl", audit),
        ("site ledger", ledger.path, ledger.spent),
    ]
    found: dict[str, tuple[bytes, Callable[..., bytes], Check]] = {}
    for name, path, read in texts:
        whole, check = reader(path, read)
        found[name] = whole, mutate_text, check
    model = run / "model.safetensors"
    whole, check = reader(model, lambda: read_arrays(model))
    found["model"] = whole, mutate_tensors, check
    whole, check = digested(checkpoint, lambda: directory.newest_checkpoint(ARRAYS, "cnn"))
    found["checkpoint"] = whole, mutate_tensors, check
    whole, check = digested(version, lambda: state.load(2, 1))
    found["client state"] = whole, mutate_tensors, check
    yield found
    directory.close()


# --- the runs -------------------------------------------------------------------------------------

kinds = (
    *("reply", "reply's arrays", "roster entry", "history", "releases", "roster"),
    *("config", "summary", "manifest", "audit log", "site ledger", "model", "checkpoint"),
    "client state",
)


@contextlib.contextmanager
def targets(folder: Path) -> Iterator[dict[str, tuple[bytes, Callable[..., bytes], Check]]]:
    """For each of `kinds`: a valid input, how it is mutated, and its check."""
    begin_task(1)
    logging.disable(logging.CRITICAL)
    packed = bytes(array_record(ARRAYS)["arrays"].data)
    entry = str(roster_content(ENTRY)["roster"]["entry"]).encode()
    found: dict[str, tuple[bytes, Callable[..., bytes], Check]] = {
        "reply": (to_bytes(reply_of()), mutate_bytes, reply_envelope),
        "reply's arrays": (packed, mutate_tensors, reply_arrays),
        "roster entry": (entry, mutate_text, roster_text),
    }
    try:
        with files(folder) as of_files:
            yield found | of_files
    finally:
        logging.disable(logging.NOTSET)


def fuzz(seed: str, count: int, folder: Path, save: Path | None) -> dict[str, Counter[str]]:
    """`count` inputs, of each kind in turn; for each kind: inputs, accepted, crashes."""
    outcomes = {kind: Counter[str]() for kind in kinds}
    with targets(folder) as found:
        for kind, (whole, _, check) in found.items():
            assert check(whole), f"{kind}: the valid input is refused"
        for number in range(count):
            kind = kinds[number % len(kinds)]
            whole, mutate, check = found[kind]
            draw = random.Random(f"{seed}/{number}")
            content, started = mutate(whole, draw), time.process_time()
            outcomes[kind]["inputs"] += 1
            try:
                outcomes[kind]["accepted"] += check(content)
                if (taken := time.process_time() - started) > max_seconds:
                    raise Crash(f"took {taken:.0f} s of processor time")
            except Exception as error:
                outcomes[kind]["crashes"] += 1
                print(f"{kind}, {seed}/{number}: {type(error).__name__}: {error}"[:300], flush=True)
                if save:
                    (save / f"{kind.replace(' ', '-')}-{digest(content)}").write_bytes(content)
    return outcomes


def in_child(seed: str, count: int, save: Path | None) -> dict[str, Counter[str]]:
    """As `fuzz`, in a process of its own; one that dies counts as a crash."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="keel-fuzz-", dir=base) as name:
        result = Path(name, "result.json")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                result.write_text(json.dumps(fuzz(seed, count, Path(name), save)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return {k: Counter(found) for k, found in json.loads(result.read_text()).items()}
    print(f"batch {seed}: the process ended with status {status}", flush=True)
    return {"process": Counter({"inputs": count, "crashes": 1})}


def table(outcomes: dict[str, Counter[str]]) -> str:
    """The outcomes as a Markdown table."""
    outcomes = outcomes | {"sum": sum(outcomes.values(), Counter[str]())}
    rows = (
        (kind, f"{found['inputs']:,}", f"{found['accepted']:,}", found["crashes"])
        for kind, found in outcomes.items()
    )
    return markdown(["input", "number", "accepted", "crashes"], rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="a folder for inputs that crashed")
    parser.add_argument("--json", type=Path, help="a file for the outcomes")
    arguments = parser.parse_args()
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for number, start in enumerate(range(0, arguments.inputs, batch)):
        count = min(batch, arguments.inputs - start)
        for kind, found in in_child(f"{arguments.seed}/{number}", count, arguments.save).items():
            outcomes.setdefault(kind, Counter()).update(found)
        if number % 25 == 24:
            print(f"{start + count:,} inputs", flush=True)
    print(table(outcomes))
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=1))
    return 1 if sum(found["crashes"] for found in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
