"""Compares what runs compute at a commit and in the working tree, to the bit.

    python tools/referee.py COMMIT [--only fedavg,fedintr] [--no-ray] [--allow-last-bits]
    python tools/referee.py --speed

28 short runs on digits: every method under FedAvg, FedIntR under three other server optimizers, one
run that is resumed in the middle, and one on Ray with two workers. Each run is made at COMMIT, from
a clone, and in the working tree, on the same machine, because bits differ between kinds of
processors. Compared are the final model, the newest state of each client, and the losses and mean
accuracies of each round. The resumed run and the one on Ray must also equal the plain run.

The exit code is 0 if all are equal, or, with --allow-last-bits, if losses and accuracies are equal
to six digits. What COMMIT computed is kept in the folder of temporary files for the next call.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHODS = [
    *("ditto", "fedavg", "fedavg-ft", "fedbabu", "fedcka", "fedcl", "fedcr", "feddecorr"),
    *("fedintr", "fedlc", "fedmlb", "fedntd", "fedpac", "fedproc", "fedprox", "fedrcl"),
    *("fedreco", "fedrep", "fedscl", "fitnet", "local", "moon", "scaffold"),
]
SERVER_OPTIMIZERS = ("fedavgm", "fedadam", "fedacg")
SETTINGS: dict[str, Any] = {
    "source": "digits",
    "data-fraction": 0.5,
    "model": "cnn-fedreco",
    "num-rounds": 3,
    "train-fraction": 0.75,  # three of four clients
    "local-epochs": 2,
    "lr": 0.05,
    "flip": True,
    "local-test-fraction": 0.2,
    "seed": 0,
    "device": "cpu",
    "threads": 1,
    "keep-state": True,
}
NUM_CLIENTS = 4
RESUMED, ON_RAY, PLAIN = "fedintr, resumed", "fedintr, on Ray", "fedintr"
RUNS: dict[str, dict[str, Any]] = (
    {method: {"method": method} for method in METHODS}
    | {f"fedintr, {o}": {"method": "fedintr", "server-optimizer": o} for o in SERVER_OPTIMIZERS}
    | {name: {"method": "fedintr"} for name in (RESUMED, ON_RAY)}
)
EQUAL, LAST_BITS, DIFFERENT = "equal", "last bits", "different"
client_name = re.compile(r"client-\d+")
version = re.compile(r"round-(\d+)")
Result = dict[str, Any]  # model, state: digests; history: values; or error, in one line


# --- in the process of one tree -------------------------------------------------------------------


def play(names: Iterable[str], into: Path) -> None:
    """Make the runs with the `keel` that PYTHONPATH names; their results go into a JSON file."""
    import keel

    home = str(Path(keel.__file__).parents[1])
    assert home == os.environ["PYTHONPATH"], f"{home} was imported"
    results: dict[str, Result] = {}
    for name in names:
        begin = time.perf_counter()
        try:
            results[name] = result_of(run(name, into.parent / "runs"))
        except Exception as error:  # the other runs go on
            results[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        results[name]["seconds"] = time.perf_counter() - begin
        into.write_text(json.dumps(results))


def run(name: str, directory: Path) -> Any:
    """The `keel.Run` of one entry of RUNS."""
    import keel
    from protocol.config import default_config, resolve_config
    from server_app.checks import unused_keys

    config = {**SETTINGS, **RUNS[name], "output-dir": str(directory)}
    if "train-fraction" not in default_config():  # an older commit
        config["fraction-train"] = config.pop("train-fraction")
    config["run-name"] = re.sub(r"\W+", "-", name)
    for key in unused_keys(resolve_config(config)):  # is refused: FedReCo has rates of its own
        config.pop(key, None)
    if name == ON_RAY:
        share = len(os.sched_getaffinity(0)) / 2
        return keel.run(
            config, clients=NUM_CLIENTS, engine="flower", cpus_per_client=share, quiet=True
        )
    if name == RESUMED:
        begun = keel.run(config | {"num-rounds": 2}, clients=NUM_CLIENTS, quiet=True)
        more = {"resume": str(begun.directory), "num-rounds": SETTINGS["num-rounds"]}
        return keel.run(more, clients=NUM_CLIENTS, quiet=True)
    return keel.run(config, clients=NUM_CLIENTS, quiet=True)


def result_of(finished: Any) -> Result:
    """Digests of what a run has left, and its losses and accuracies by round and column."""
    directory = Path(finished.directory)
    rows = finished.history
    if not isinstance(rows, list):  # pandas is installed
        rows = rows.reset_index().to_dict("records")
    history = {
        f"round {int(row['round'])} {column}": value
        for row in rows
        for column, value in row.items()
        if column.startswith(("loss/", "accuracy/")) and not math.isnan(value)
    }
    return {"model": model_of(directory), "state": state_of(directory), "history": history}


def model_of(directory: Path) -> dict[str, str]:
    """Digests of the final global model's arrays; of the newest checkpoint's if it has none."""
    if (path := directory / "model.safetensors").exists():
        return digests(path)
    return {
        name: digest
        for name, digest in digests(newest(directory.glob("checkpoints/*"))).items()
        if name.startswith("model/")
    }


def state_of(directory: Path) -> dict[str, str]:
    """Digests of the arrays of each client's newest state, whatever files it is in."""
    files: dict[str, list[Path]] = {}
    for path in directory.rglob("*.safetensors"):
        if names := client_name.findall(str(path.relative_to(directory))):
            files.setdefault(names[-1], []).append(path)
    return {
        f"{client}/{name}": digest
        for client in sorted(files)
        for name, digest in digests(newest(files[client])).items()
    }


def newest(paths: Iterable[Path]) -> Path:
    """The file with the highest round in its name."""

    def round_(path: Path) -> int:
        found = version.search(path.name)
        return int(found[1]) if found else 0

    return max(paths, key=round_)


def digests(path: Path) -> dict[str, str]:
    """The SHA-256 digest of each array of a file: its type, shape and bytes."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for name, array in sorted(load_file(path).items()):
        content = array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header = f"{array.dtype} {tuple(array.shape)} ".encode()
        found[name] = hashlib.sha256(header + content).hexdigest()
    return found


# --- both trees -----------------------------------------------------------------------------------


def results_of(tree: Path, names: Iterable[str]) -> dict[str, Result]:
    """What the code in a folder computes, in a process and with a KEEL_HOME of its own."""
    with tempfile.TemporaryDirectory(prefix="referee-", ignore_cleanup_errors=True) as folder:
        into = Path(folder) / "results.json"
        into.write_text("{}")
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "KEEL_HOME": f"{folder}/keel",
            "FLWR_HOME": f"{folder}/flwr",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, __file__, "--play", ";".join(names), "--into", str(into)]
        subprocess.run(command, cwd=tree, env=environment, check=False)
        return json.loads(into.read_text())


def results_at(commit: str, names: list[str]) -> dict[str, Result]:
    """What a commit computes; from the cache, if this version of the referee has made the runs."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"keel-referee-{os.getuid()}" / f"{commit}-{key}.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    if missing := [name for name in names if name not in known]:
        with tempfile.TemporaryDirectory(prefix="referee-") as folder:
            tree = Path(folder) / "keel"
            git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree))
            git("-C", str(tree), "checkout", "--quiet", commit)
            known |= results_of(tree, missing)
        cache.parent.mkdir(exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({n: r for n, r in known.items() if "error" not in r}))
        part.replace(cache)
    return known


def git(*arguments: str) -> str:
    """What `git` prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def compare(before: Result | None, after: Result | None) -> tuple[str, str]:
    """The verdict on a run, and the first difference."""
    if before is None or after is None:
        return DIFFERENT, "the process ended without a result"
    if "error" in before or "error" in after:
        return DIFFERENT, f"{before.get('error', 'no error')} | {after.get('error', 'no error')}"
    lines = before["history"], after["history"]
    common = [key for key in lines[0] if key in lines[1]]
    changed = [key for key in common if lines[0][key] != lines[1][key]]
    far = [key for key in changed if not math.isclose(lines[0][key], lines[1][key], rel_tol=1e-6)]
    if far:
        return DIFFERENT, f"{far[0]}: {lines[0][far[0]]:.9g} | {lines[1][far[0]]:.9g}"
    for what in ("model", "state"):
        difference = arrays_differ(before[what], after[what])
        if difference:
            has_same_names = before[what].keys() == after[what].keys()
            return LAST_BITS if has_same_names else DIFFERENT, f"{what}: {difference}"
    if lines[0].keys() != lines[1].keys():  # all else is equal
        return DIFFERENT, f"history: {only_one_has(*lines)}"
    if changed:
        first = changed[0]
        return LAST_BITS, f"{first}: {lines[0][first]!r} | {lines[1][first]!r}"
    return EQUAL, ""


def arrays_differ(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The first array that differs; "" if none does, apart from names under the same client."""

    def nameless(arrays: Mapping[str, str]) -> list[tuple[str, str]]:
        return sorted((name.split("/")[0] if "/" in name else "", d) for name, d in arrays.items())

    if before == after or nameless(before) == nameless(after):
        return ""
    if before.keys() != after.keys():
        return only_one_has(before, after)
    return next(name for name in before if before[name] != after[name])


def only_one_has(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first key of each that the other lacks."""
    only = [min(one, default="none") for one in (before.keys() - after, after.keys() - before)]
    return f"{only[0]} only before, {only[1]} only now"


def main() -> int:
    """Compare, print one row a run, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", metavar="COMMIT", default="HEAD")
    parser.add_argument("--only", metavar="NAMES", help="methods, comma-separated")
    parser.add_argument("--no-ray", action="store_true", help="without the run on Ray")
    parser.add_argument("--allow-last-bits", action="store_true")
    parser.add_argument("--speed", action="store_true", help="W1 and W2 beside bare processes")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(options.play.split(";"), options.into)
        return 0
    if options.speed:
        out = str(Path(tempfile.gettempdir()) / "referee-speed")
        command = [sys.executable, "-m", "tools.bench", "bare", "--out", out]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    names = [n for n in RUNS if not options.only or n.split(",")[0] in options.only.split(",")]
    if not names:
        parser.error(f"--only {options.only}: expected some of {', '.join(METHODS)}")
    if options.no_ray:
        names = [name for name in names if name != ON_RAY]
    begin = time.perf_counter()
    commit = git("rev-parse", "--verify", f"{options.commit}^{{commit}}")
    before, after = results_at(commit, names), results_of(ROOT, names)
    verdicts = {name: compare(before.get(name), after.get(name)) for name in names}
    for name in (RESUMED, ON_RAY):
        if name in names and PLAIN in names:
            verdicts[f"{name}, and plain"] = compare(after.get(PLAIN), after.get(name))
    for name, (verdict, difference) in verdicts.items():
        seconds = (results.get(name, {}).get("seconds", 0) for results in (before, after))
        times = " ".join(f"{s:5.1f}" for s in seconds)
        print(f"{name:28} {verdict:10} {times} s  {difference}".rstrip())
    counts = {v: sum(x == v for x, _ in verdicts.values()) for v in (EQUAL, LAST_BITS, DIFFERENT)}
    print(", ".join(f"{n} {v}" for v, n in counts.items()), end="; ")
    print(f"{commit[:8]} and the working tree, {time.perf_counter() - begin:.0f} s")
    is_well = counts[DIFFERENT] == 0 and (options.allow_last_bits or counts[LAST_BITS] == 0)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
