"""Runs of the inline engine that train together, in one process (`stacked-runs`).

They differ in their seed and in numbers among the options of their method. Each is a run of its own
in a thread of its own, of which one works at a time. Where its clients would train, it waits until
all runs of that round wait; then the clients of all train as one batched model
(client_app/stacked.py). A run draws, sends, evaluates and writes what it would alone; only the last
bits of training differ. A run that ends early leaves the others.
"""

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from client_app.handlers import Trained, forget_data, process_caches, train_together
from client_app.method import Method
from client_app.round import RoundContext
from protocol.config import RunConfig, resolve_config
from protocol.files import digest, private_files
from protocol.options import OptionValue, key_of, types_of
from server_app.history import HISTORY_FILE, Line, truncate_history, whole_lines
from server_app.inline import Companions, run_inline
from server_app.manifest import update
from server_app.observers import RunInfo, RunObserver
from server_app.run_directory import RunDirectory
from server_app.summary import read_manifest, read_run_config, read_summary, round_of

Overrides = Mapping[str, OptionValue]
Outcome = Path | BaseException  # the directory of a run that finished, or why one did not
NOT_SHARED = {"output-dir", "run-name", "preset", "resume"}  # may differ, and change no result


# --- which runs can train together --------------------------------------------------------------


def own_keys(config: RunConfig) -> set[str]:
    """The keys in which runs that train together may differ and that change the result."""
    name, options = config.rounds.method, config.method_options()
    types = types_of(type(options))  # type: ignore[arg-type]  # hashable
    return {"seed"} | {f"{name}.{key_of(f)}" for f in fields(options) if types[f.name] is float}


def shared_keys(config: RunConfig) -> dict[str, OptionValue]:
    """The keys that are the same in runs that train together."""
    apart = own_keys(config) | NOT_SHARED
    return {key: value for key, value in config.flat.items() if key not in apart}


def check_group(configs: Sequence[RunConfig]) -> None:
    """ValueError, one line, if these runs cannot train together."""
    first, max_runs = shared_keys(configs[0]), configs[0].train.stacked_runs
    if len(configs) > max_runs:
        raise ValueError(
            f"stacked-runs = {max_runs}: {len(configs)} runs were to train together: expected at "
            f"most {max_runs}"
        )
    for config in configs[1:]:
        other = shared_keys(config)
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                able = ", ".join(sorted(own_keys(configs[0])))
                raise ValueError(
                    f"stacked-runs: {key} is {configs[0].flat[key]!r} in one run and "
                    f"{config.flat[key]!r} in another: only {able} may differ between runs that "
                    "train together"
                )


def members_of(configs: Sequence[RunConfig]) -> list[dict[str, OptionValue]]:
    """Of each run, the keys in which it differs from another."""
    flats = [config.flat for config in configs]
    keys = [k for k in sorted(own_keys(configs[0])) if any(f[k] != flats[0][k] for f in flats)]
    return [{key: flat[key] for key in keys or ["seed"]} for flat in flats]


# --- one run of several -------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Clients that a run waits to have trained; none: it waits for the others to come so far."""

    round: int
    methods: Sequence[Method] = ()
    ctxs: Sequence[RoundContext] = ()


class Member(RunObserver):
    """A run in a thread of its own, which works only within `proceed`."""

    def __init__(self, run: Callable[["Member"], Path]) -> None:
        self.run = run
        self.outcome: Outcome | None = None
        self.directory = Path()
        self.requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()  # None: it has ended
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_working = False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self._take()
            self.outcome = self.run(self)
        except BaseException as error:
            self.outcome = error
        self.requests.put(None)

    def _take(self) -> Any:
        answer = self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def proceed(self, answer: Any = None) -> Request | None:
        """Give the answer to its last request, or an error to raise there; its next request."""
        self.is_working = True
        self.answers.put(answer)
        return self.next_request()

    def next_request(self) -> Request | None:
        """The request up to which the run works."""
        request = self.requests.get()
        self.is_working = False
        return request

    def stop(self, reason: BaseException) -> None:
        """Raise this where the run waits, until it has ended."""
        request = self.next_request() if self.is_working else Request(0)
        while request is not None and self.outcome is None:
            request = self.proceed(reason)

    # what the run calls, in its thread

    def train(self, methods: Sequence[Method], ctxs: Sequence[RoundContext]) -> Trained:
        """What comes of these clients; other runs' train with them."""
        self.requests.put(Request(ctxs[0].round, methods, ctxs))
        trained: Trained = self._take()
        return trained

    def on_run_start(self, info: RunInfo) -> None:
        """Note the directory and the last round."""
        self.directory, self.num_rounds = info.directory, info.num_rounds

    def on_round(self, line: Line) -> None:
        """After the last round, wait for the others: before a run ends, all can be resumed."""
        if line["round"] == self.num_rounds:
            self.requests.put(Request(self.num_rounds + 1))
            self._take()


def trained_together(requests: Sequence[Request]) -> list[Trained | Exception]:
    """The answer to each of these requests of one round."""
    methods = [method for request in requests for method in request.methods]
    ctxs = [ctx for request in requests for ctx in request.ctxs]
    try:
        made = train_together(methods, ctxs) if ctxs else Trained([], 0, 0)
    except Exception as error:
        return [error] * len(requests)
    ends = accumulate((len(request.ctxs) for request in requests), initial=0)
    return [replace(made, updates=made.updates[a:b]) for a, b in pairwise(ends)]


def note_absent(members: Sequence[Member]) -> None:
    """Note in the others' manifests which runs failed before round 1: a resume is without them."""
    absent = [n for n, member in enumerate(members) if isinstance(member.outcome, BaseException)]
    for member in members if absent else ():
        if member.outcome is None:
            stacked = read_manifest(member.directory)["stacked"]
            update(member.directory, stacked=stacked | {"absent": absent})


def proceed_together(members: Sequence[Member], requests: dict[int, Request]) -> None:
    """Let these runs work to their ends; those in the lowest round train first."""
    while requests:
        lowest = min(request.round for request in requests.values())
        group = sorted(n for n, request in requests.items() if request.round == lowest)
        for n, answer in zip(group, trained_together([requests[n] for n in group]), strict=True):
            if request := members[n].proceed(answer):
                requests[n] = request
            else:
                del requests[n]


# --- a group ------------------------------------------------------------------------------------


@private_files()
def run_stacked(
    runs: Sequence[Overrides],
    num_clients: int,
    observers: Callable[[int], Sequence[RunObserver]] = lambda place: (),
) -> list[Outcome]:
    """Run these configs together, or resume all of a group (`resume`); the outcome of each.

    observers: of the run at this place. ValueError, one line, before anything is trained, if they
    cannot train together or not be resumed together. A run that fails does so alone, if the reason
    is its own.
    """
    paths = [Path(str(run["resume"])) for run in runs if "resume" in run]
    if paths and len(paths) < len(runs):
        raise ValueError(
            "stacked-runs: some runs of the group have the key resume, others do not: resume all "
            "of them, or none"
        )
    if paths:
        configs = [read_run_config(path) for path in paths]
        about = [read_manifest(path).get("stacked", {}) for path in paths]
        check_same_group(paths, about)
        outcomes: dict[int, Outcome] = rewind(paths, configs[0])
    else:
        configs = [resolve_config(run) for run in runs]
        group, names = secrets.token_hex(8), members_of(configs)
        about = [{"group": group, "place": n, "runs": names} for n in range(len(runs))]
        outcomes = {}
    check_group(configs)
    places = [n for n in range(len(runs)) if n not in outcomes]
    idents: set[int | None] = set()

    def run(n: int) -> Callable[[Member], Path]:
        def start(member: Member) -> Path:
            own = threading.get_ident()

            def is_own(record: logging.LogRecord) -> bool:
                return record.thread == own or record.thread not in idents

            companions = Companions(member.train, about[n], is_own)
            observed = [*observers(n), member]
            return run_inline(runs[n], num_clients, observers=observed, companions=companions)

        return start

    forget_data()
    process_caches.num = len(places) or 1
    logger = logging.getLogger("keel")
    level = logger.level
    if level == logging.NOTSET:  # for as long as a run has a log
        logger.setLevel(logging.INFO)
    members = [Member(run(n)) for n in places]
    idents |= {member.thread.ident for member in members}
    try:
        requests = {n: request for n, member in enumerate(members) if (request := member.proceed())}
        if not paths:
            note_absent(members)
        proceed_together(members, requests)
    except BaseException as reason:  # Ctrl-C or SIGTERM, in this thread
        for member in members:
            member.stop(reason)
        raise
    finally:
        logger.setLevel(level)
        process_caches.num = 1
        process_caches.clear()
    ended = [member.outcome for member in members]
    outcomes |= {n: outcome for n, outcome in zip(places, ended, strict=True) if outcome}
    return [outcomes[n] for n in range(len(runs))]


# --- resume -------------------------------------------------------------------------------------


def check_same_group(paths: Sequence[Path], about: Sequence[Mapping[str, Any]]) -> None:
    """ValueError unless these are all runs of one group, in their order."""
    for path, own in zip(paths, about, strict=True):
        if not own:
            raise ValueError(f"{path} trained alone: resume it with `keel resume`")
        if own["group"] != about[0]["group"]:
            raise ValueError(
                f"{path} did not train with {paths[0]}: resume each with its own group"
            )
    runs, absent = about[0]["runs"], about[0].get("absent", [])
    if [own["place"] for own in about] != [n for n in range(len(runs)) if n not in absent]:
        listed = ", ".join(str(run) for n, run in enumerate(runs) if n not in absent)
        raise ValueError(
            f"{paths[0]} is of a group of runs ({listed}): resume all of them, in this order"
        )


def resume_rounds(path: Path, interval: int) -> set[int]:
    """The rounds from which this run can resume; 0: the start, if it has got no further."""
    last = max((line["round"] for line in whole_lines(path)[0]), default=0)
    found = (path / "checkpoints").glob("round-*.safetensors")
    intact = {round_of(each) for each in found if digest(each.read_bytes()) in each.name}
    return {n for n in intact if n <= last} | ({0} if last <= interval else set())


def rewind(paths: Sequence[Path], config: RunConfig) -> dict[int, Outcome]:
    """Set a group back to the newest round from which all its runs can resume.

    Returns the runs that have ended, by place, which take no part; a run that failed in a round
    that is repeated does. ValueError, one line, if there is no such round.
    """
    statuses = [str(read_summary(path)["status"]) for path in paths]
    has_failed = [status.startswith("failed") for status in statuses]
    has_finished = [status == "finished" for status in statuses]
    rounds = [resume_rounds(path, config.rounds.checkpoint_interval) for path in paths]
    under_way = [n for n in range(len(paths)) if not (has_failed[n] or has_finished[n])]
    start: int | None = -1  # where none is under way, all have ended
    if under_way:
        start = max(set.intersection(*(rounds[n] for n in under_way)), default=None)
    repeats_none = bool(under_way) and any(has_finished)  # a finished run does not train again
    if start is None or (repeats_none and start < config.rounds.num_rounds):
        found = []
        for path, own, is_over in zip(paths, rounds, has_finished, strict=True):
            own_rounds = ", ".join(map(str, sorted(own))) or "none"
            found.append(f"{path.name}: {'finished' if is_over else own_rounds}")
        raise ValueError(
            "stacked-runs: there is no round of which all runs have a checkpoint "
            f"({'; '.join(found)}): restore their checkpoints, or start the unfinished runs again "
            "from round 1"
        )
    ended: dict[int, Outcome] = {}
    for n, path in enumerate(paths):
        if has_finished[n]:
            ended[n] = path
        elif has_failed[n] and start not in rounds[n]:
            ended[n] = RuntimeError(statuses[n].removeprefix("failed: "))
        else:
            set_back(path, start)
    return ended


def set_back(path: Path, to_round: int) -> None:
    """Remove what this run has of later rounds, which are repeated; ValueError if it is running."""
    with closing(RunDirectory(path)):
        for checkpoint in (path / "checkpoints").glob("round-*.safetensors"):
            if round_of(checkpoint) > to_round:
                checkpoint.unlink()
        truncate_history(path / HISTORY_FILE, to_round)
