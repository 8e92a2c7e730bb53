"""Kills and stops processes of a loopback deployment at random moments; counts what was lost.

    python -m tests.tools.faults --kills 100 --hangs 40 --deployments 4 --seed 0

Runs FedReCo and FedIntR on `digits` in turn. Every few seconds one process gets SIGKILL, or SIGSTOP
for 20 to 95 seconds: the ServerApp, the SuperLink, a client's SuperNode, its executor, its
ClientApp or its worker, each equally likely. The run of a ServerApp that has ended is resumed.
Prints a table, with the accuracies of the same runs undisturbed; `--json` has it as data. The time
for which a process was stopped does not count towards the limit of a run; `--per-run` spreads kills
and hangs over several runs. With `--deployments`, so many deployments share kills and hangs and run
beside each other, since a hang is mostly waiting.

A personal model is lost if its client's state is damaged at the end, or older than the last round
in which the server accepted it. A result is wrong if the rounds in the history are not 1, 2, ...,
if a file or the audit log does not have the digest in the manifest, or if the model of a run in
which no client was left out differs in a bit from that of the undisturbed run (`compared`: the
number of such runs). A failure is unnamed if a client took no part in a round and the history does
not say why, or if a ServerApp that was not killed ended and the run's status does not say why.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from client_app.state import StateFolder
from keel.deployment.loopback import Loopback, partitions, running
from keel.tables import markdown
from protocol.files import digest
from protocol.options import OptionValue
from server_app.audit import audit_problem
from server_app.history import Line, read_history
from server_app.inline import run_inline
from server_app.run_directory import read_arrays, saved_id
from server_app.summary import read_manifest
from tests.tools.processes import client_app_pid, descendants

kinds = ("serverapp", "superlink", "supernode", "executor", "clientapp", "worker")
methods: dict[str, dict[str, OptionValue]] = {
    "fedreco": {
        "method": "fedreco",
        "fedreco.eta-0": 0.05,
        "fedreco.eta-u": 0.05,
        "fedreco.eta-v": 0.05,
    },
    "fedintr": {"method": "fedintr", "evaluate-clients": "none"},
}
common: dict[str, OptionValue] = {
    "source": "digits",
    "model": "cnn-fedreco",
    "alpha": 5.0,
    "lr": 0.05,
    "local-epochs": 3,
    "batch-size": 32,
    "local-test-fraction": 0.2,
    "round-timeout": 250.0,  # more than a hang, which is to cost time only
    "device": "cpu",
}
start_timeout_s, resume_pause_s = 300.0, 5.0
hang_s = (20.0, 95.0)
client_app_wait_s = 5.0  # for a ClientApp, of which there is one for each message


@dataclass
class Outcome:
    """The result of one run."""

    method: str
    finished: bool = False
    kills: Counter[str] = field(default_factory=Counter)
    hangs: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    left_out: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unnamed: int = 0
    compared: bool = False  # with the undisturbed run, to the bit
    reasons: list[str] = field(default_factory=list)  # of clients left out and ServerApps' ends
    accuracy: float = 0.0
    seconds: float = 0.0
    stopped_s: float = 0.0  # of these, with a process stopped


def send(number: signal.Signals, local: Loopback, kind: str, client: str) -> list[int]:
    """Send a signal to one process of this kind; its id, if one is running."""
    if kind == "serverapp":
        below = descendants(local.pid("serverapp-executor"))
        found = [pid for pid, command in below.items() if "keel.deployment.serverapp" in command]
    elif kind == "clientapp":
        found = [pid for pid in [client_app_pid(local, client, client_app_wait_s)] if pid]
    else:
        name = kind if kind == "superlink" else f"{kind}-{client}"
        is_running = local.processes[name].process.poll() is None
        found = [local.pid(name)] if is_running else []
    for pid in found[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return [pid]
    return []


def proceed(stopped: dict[int, float], pid: int) -> None:
    """Let a stopped process go on, if it still exists."""
    del stopped[pid]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def status(folder: Path) -> str:
    """The status in the run's summary; "" if there is none yet."""
    path = folder / "summary.json"
    return str(json.loads(path.read_text())["status"]) if path.exists() else ""


def lost_models(local: Loopback, folder: Path) -> list[str]:
    """Clients whose state is damaged, or older than their last accepted round."""
    last: dict[str, int] = {}
    for line in read_history(folder):
        last |= dict.fromkeys(line["participants"], int(line["round"]))
    lost = []
    for client, round_ in last.items():
        state = local.root / client / "keel" / "clients" / folder.name / client
        newest = max((int(p.name.split("-")[1]) for p in state.glob("round-*")), default=0)
        try:
            is_complete = bool(StateFolder(state, run_id=saved_id(folder)).load(newest + 1))
        except ValueError:
            is_complete = False
        if list(state.glob("*.damaged")) or not is_complete or newest < round_:
            lost.append(client)
    return lost


def wrong_results(folder: Path, undisturbed: Path, rounds: int) -> tuple[list[str], bool]:
    """What is wrong with a finished run's files; whether its model could be compared."""
    history, manifest = read_history(folder), read_manifest(folder)
    wrong = []
    if [line["round"] for line in history] != list(range(1, rounds + 1)):
        wrong.append("rounds are missing")
    for name, expected in manifest.get("files", {}).items():
        if digest((folder / name).read_bytes()) != expected:
            wrong.append(f"{name} has another digest")
    if problem := audit_problem(folder, manifest.get("audit")):
        wrong.append(problem)
    models = [read_arrays(path / "model.safetensors")[0] for path in (folder, undisturbed)]
    is_whole = not any(line["left_out"] or line["backed_off"] for line in history)
    is_same = models[0].keys() == models[1].keys() and all(
        torch.equal(array, models[1][name]) for name, array in models[0].items()
    )
    if is_whole and not is_same:
        wrong.append("no client was left out, and the model is another")
    return wrong, is_whole


def unnamed_failures(lines: Sequence[Line], clients: Iterable[str]) -> list[tuple[int, str]]:
    """(round, client) of those that took no part in a round, without a reason."""
    return [
        (line["round"], c)
        for line in lines
        for c in clients
        if not (c in line["participants"] or line["left_out"].get(c) or c in line["backed_off"])
    ]


def accuracy(folder: Path) -> float:
    """The last evaluation: of the personal models if there are any, else of the global one."""
    for line in reversed(read_history(folder)):
        for key, entry in (("personal", "mean"), ("global", "accuracy")):
            if key in line:
                return float(line[key][entry])
    raise ValueError(f"{folder}: no evaluation")


def submit_until(local: Loopback, keys: dict[str, OptionValue], deadline: float) -> None:
    """Submit a run; try again while the SuperLink is down, killed in the previous run."""
    while True:
        try:
            local.superlink.submit(keys)
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def one_run(
    local: Loopback,
    method: str,
    undisturbed: Path,
    rounds: int,
    epochs: int,
    draw: random.Random,
    kills_left: int,
    hangs_left: int,
    pause_s: tuple[float, float],
    limit_s: float,
) -> Outcome:
    """One run with kills and hangs, until it has finished or the limit is reached.

    limit_s: without the time for which a process is stopped.
    """
    outcome, started = Outcome(method), time.monotonic()
    runs = local.root / "server" / "keel" / "runs"
    before = set(runs.glob("*"))
    overrides = common | methods[method] | {"num-rounds": rounds, "local-epochs": epochs}
    submit_until(local, overrides, started + start_timeout_s)
    while not (new := set(runs.glob("*")) - before):
        if time.monotonic() - started > start_timeout_s:
            raise TimeoutError(f"{method}: the run has not started after {start_timeout_s:g} s")
        time.sleep(0.2)
    folder = new.pop()
    next_kill = time.monotonic() + draw.uniform(*pause_s)
    resume_at, was_killed = 0.0, False
    killed = set[int]()
    stopped: dict[int, float] = {}  # process id: when it goes on
    looked_at = time.monotonic()
    while time.monotonic() - started - outcome.stopped_s < limit_s:
        if status(folder) == "finished":
            outcome.finished = True
            break
        below = descendants(local.pid("serverapp-executor"))
        # A killed process takes a while to go: it is not the next ServerApp.
        alive = any(
            "keel.deployment.serverapp" in command and pid not in killed
            for pid, command in below.items()
        )
        now = time.monotonic()
        outcome.stopped_s += now - looked_at if stopped else 0.0
        looked_at = now
        if not alive and not resume_at:
            resume_at = now + resume_pause_s
            said = status(folder)
            if not was_killed and said != "finished":  # it has ended by itself
                outcome.reasons.append(f"the ServerApp ended: {said}")
                outcome.unnamed += not said.startswith("failed: ")
                print(local.log_file("serverapp-executor").read_text()[-3000:], flush=True)
        elif not alive and now >= resume_at:
            with contextlib.suppress(RuntimeError):  # the SuperLink may be away
                local.superlink.submit({"resume": str(folder)})
                outcome.resumes += 1
            resume_at = time.monotonic() + 60
        elif alive:
            resume_at, was_killed = 0.0, False
        for pid in [pid for pid, until in stopped.items() if now >= until]:
            proceed(stopped, pid)
        kills, hangs = kills_left - outcome.kills.total(), hangs_left - outcome.hangs.total()
        if now >= next_kill and not stopped and kills + hangs > 0:
            kind, client = draw.choice(kinds), draw.choice(local.clients)
            is_kill = draw.random() * (kills + hangs) < kills
            number = signal.SIGKILL if is_kill else signal.SIGSTOP
            for pid in send(number, local, kind, client):
                (outcome.kills if is_kill else outcome.hangs)[kind] += 1
                was_killed |= is_kill and kind == "serverapp"
                seconds = 0.0 if is_kill else draw.uniform(*hang_s)
                if is_kill:
                    killed.add(pid)
                else:
                    stopped[pid] = now + seconds
                what = "killed" if is_kill else f"stopped for {seconds:g} s:"
                print(f"  {what} {kind} {client if kind in kinds[2:] else ''}", flush=True)
            next_kill = time.monotonic() + draw.uniform(*pause_s)
        time.sleep(0.2)
    for pid in list(stopped):
        proceed(stopped, pid)
    outcome.seconds = time.monotonic() - started
    left_out = [pair for line in read_history(folder) for pair in line["left_out"].items()]
    outcome.left_out = len(left_out)
    outcome.reasons += [f"{client}: {reason}" for client, reason in left_out]
    outcome.lost = lost_models(local, folder)
    outcome.unnamed += len(unnamed_failures(read_history(folder), local.clients))
    if outcome.finished:
        outcome.wrong, outcome.compared = wrong_results(folder, undisturbed, rounds)
    with contextlib.suppress(ValueError):
        outcome.accuracy = accuracy(folder)
    return outcome


def table(outcomes: Sequence[Outcome], undisturbed: dict[str, float]) -> str:
    """The outcomes as a Markdown table, one line for each run, and their sum."""
    rows = [
        {
            "run": o.method,
            f"kills: {', '.join(kinds)}": ", ".join(str(o.kills[k]) for k in kinds),
            "hangs": ", ".join(str(o.hangs[k]) for k in kinds),
            "resumed": o.resumes,
            "left out": o.left_out,
            "finished": "yes" if o.finished else "no",
            "models lost": len(o.lost),
            "wrong results": len(o.wrong),
            "unnamed failures": o.unnamed,
            "compared": "yes" if o.compared else "no",
            "accuracy": f"{100 * o.accuracy:.1f}",
            "undisturbed": f"{100 * undisturbed[o.method]:.1f}",
            "seconds": f"{o.seconds:.0f}",
            "of these stopped": f"{o.stopped_s:.0f}",
        }
        for o in outcomes
    ]
    total = sum((o.kills for o in outcomes), Counter[str]())
    hangs = sum((o.hangs for o in outcomes), Counter[str]())
    done, lost = sum(o.finished for o in outcomes), sum(len(o.lost) for o in outcomes)
    return (
        f"{markdown(rows[0] if rows else (), (row.values() for row in rows))}\n\n"
        f"{total.total()} kills ({', '.join(f'{k} {total[k]}' for k in kinds)}), "
        f"{hangs.total()} hangs ({', '.join(f'{k} {hangs[k]}' for k in kinds)}): "
        f"{done} of {len(outcomes)} runs finished, {lost} personal models lost, "
        f"{sum(len(o.wrong) for o in outcomes)} wrong results "
        f"({sum(o.compared for o in outcomes)} models compared to the bit), "
        f"{sum(o.unnamed for o in outcomes)} unnamed failures."
    )


def one_deployment(arguments: argparse.Namespace, plain: dict[str, Path]) -> list[Outcome]:
    """Runs of one deployment until its kills and hangs are spent, or the time is."""
    draw, outcomes = random.Random(arguments.seed), list[Outcome]()
    deadline = time.monotonic() + arguments.limit_s
    with (
        tempfile.TemporaryDirectory(prefix="keel-faults-") as name,
        running(Path(name), partitions(arguments.clients)) as local,
    ):
        left, hangs = arguments.kills, arguments.hangs
        while left + hangs > 0 and time.monotonic() < deadline:
            method = list(methods)[(len(outcomes) + arguments.seed) % len(methods)]
            print(f"{method}: {left} kills and {hangs} hangs left", flush=True)
            most = arguments.per_run or left + hangs
            kills = min(left, round(most * left / (left + hangs)))
            pause, limit_s = tuple(arguments.pause), arguments.run_limit_s
            outcomes.append(
                one_run(
                    *(local, method, plain[method], arguments.rounds, arguments.epochs, draw),
                    *(kills, min(hangs, most - kills), pause, limit_s),
                )
            )
            left -= outcomes[-1].kills.total()
            hangs -= outcomes[-1].hangs.total()
            print(f"  {outcomes[-1]}", flush=True)
    return outcomes


def share(total: int, number: int, of: int) -> int:
    """Of `total`, what falls to one of so many."""
    return total // of + (number < total % of)


def deployments(arguments: argparse.Namespace, plain: dict[str, Path]) -> list[Outcome]:
    """`one_deployment` in a process each; RuntimeError if one fails."""
    of = arguments.deployments
    if of == 1:
        return one_deployment(arguments, plain)
    context = multiprocessing.get_context("spawn")
    shares = [
        argparse.Namespace(
            **vars(arguments)
            | {"kills": share(arguments.kills, n, of), "hangs": share(arguments.hangs, n, of)}
            | {"seed": arguments.seed * of + n}
        )
        for n in range(of)
    ]
    with ProcessPoolExecutor(of, mp_context=context) as pool:
        found = list(pool.map(one_deployment, shares, [plain] * of))
    return [outcome for outcomes in found for outcome in outcomes]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--hangs", type=int, default=0)
    parser.add_argument("--deployments", type=int, default=1, help="beside each other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, nargs=2, default=(4.0, 20.0), metavar="SECONDS")
    parser.add_argument("--per-run", type=int, default=0, help="kills and hangs; 0: no bound")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="after which no run starts")
    parser.add_argument("--run-limit-s", type=float, default=1800.0, help="for one run, see above")
    parser.add_argument("--json", type=Path, help="a file for the outcomes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keel-faults-") as name:
        plain = {
            method: run_inline(
                common
                | keys
                | {"num-rounds": arguments.rounds, "local-epochs": arguments.epochs}
                | {"output-dir": f"{name}/inline"},
                arguments.clients,
            )
            for method, keys in methods.items()
        }
        undisturbed = {method: accuracy(path) for method, path in plain.items()}
        outcomes = deployments(arguments, plain)
    print(table(outcomes, undisturbed))
    if arguments.json:
        rows = [vars(o) | {"kills": dict(o.kills), "hangs": dict(o.hangs)} for o in outcomes]
        found = {"undisturbed": undisturbed, "runs": rows}
        arguments.json.write_text(json.dumps(found, indent=1))
    done = sum(o.kills.total() + o.hangs.total() for o in outcomes)
    is_done = done == arguments.kills + arguments.hangs
    is_whole = all(o.finished and not (o.lost or o.wrong or o.unnamed) for o in outcomes)
    return 0 if is_done and is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
