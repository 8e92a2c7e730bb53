"""Counts what docs/development/size.md reports: lines, long functions, modules of a round.

    python tools/size.py

Six packages: server_app, client_app, strategies, models, data, protocol. Their tests: tests/*.py
and tests/methods. Lines include comments, docstrings and blank lines.

Modules of a round: files of the six packages and of the adapter whose functions are called more
often in an inline run of FedIntR with three rounds than in one with two. Climbs before round 1:
pairs of files in which a function of a lower package calls one of a higher package, or imports its
module, between the call of `keel.run` and the first call of the method's `train`.
"""

import ast
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIX = ("server_app", "client_app", "strategies", "models", "data", "protocol")
# from the top: a call from a package to one on its left is a climb
LAYERS = {
    "keel": 5,
    "server_app": 4,
    **{"client_app": 3, "strategies": 3},
    **{"models": 2, "data": 2},
    **{"flower_adapter": 1, "protocol": 1},
}
MAX_FUNCTION, MAX_FILE = 60, 400
RUN: dict[str, Any] = {
    "source": "digits",
    "data-fraction": 0.2,
    "model": "cnn-fedreco",
    "method": "fedintr",
    "device": "cpu",
}


def tracked(*patterns: str) -> list[Path]:
    """The Python files that Git tracks and that exist, such as of "tests/*.py"."""
    command = ["git", "-C", str(ROOT), "ls-files", *patterns]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    return [ROOT / n for n in names if n.endswith(".py") and (ROOT / n).exists()]


def num_lines(files: list[Path]) -> int:
    """The lines of all files."""
    return sum(file.read_bytes().count(b"\n") for file in files)


def long_functions(files: list[Path]) -> list[str]:
    """The functions of more than MAX_FUNCTION lines, from `def` to the last line."""
    return [
        f"{file.relative_to(ROOT)}: {node.name} {length}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION
    ]


class Profile:
    """The calls among Keel's functions in a run.

    calls: of each file. climbs: files of (caller, callee), from a lower to a higher package, before
    the first training.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.climbs: set[tuple[str, str]] = set()
        self.has_trained = False
        self.known: dict[str, str] = {}  # code's file to the file below ROOT, "" for others

    def file_of(self, frame: FrameType) -> str:
        """The file below ROOT, "" if it is not one of the packages."""
        path = frame.f_code.co_filename
        if path not in self.known:
            inside = path.removeprefix(f"{ROOT}/")
            is_own = path.startswith(f"{ROOT}/") and inside.split("/")[0] in LAYERS
            self.known[path] = inside if is_own else ""
        return self.known[path]

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a call; what `sys.setprofile` takes."""
        if event != "call" or not (file := self.file_of(frame)):
            return
        self.calls[file] += 1
        if self.has_trained:
            return
        if file.startswith("client_app/methods/") and frame.f_code.co_name == "train":
            self.has_trained = True
        caller = frame.f_back
        while caller and not self.file_of(caller):
            caller = caller.f_back
        if caller:
            came_from = self.file_of(caller)
            if LAYERS[came_from.split("/")[0]] < LAYERS[file.split("/")[0]]:
                self.climbs.add((came_from, file))


def profile(num_rounds: int) -> Profile:
    """The calls of an inline run."""
    import keel

    found = Profile()
    with tempfile.TemporaryDirectory(prefix="keel-size-") as folder:
        threading.setprofile(found)
        sys.setprofile(found)
        try:
            keys = {**RUN, "num-rounds": num_rounds, "output-dir": folder}
            keel.run(keys, clients=4, quiet=True)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # as sys.setprofile
    return found


def num_keys(table: dict[str, Any]) -> int:
    """The keys of the app's config, in sections too."""
    return sum(num_keys(v) if isinstance(v, dict) else 1 for v in table.values())


def main() -> None:
    """Print all figures; the lists below them say which they are."""
    import tomllib

    sys.path.insert(0, str(ROOT))
    source = {package: tracked(f"{package}/*.py") for package in (*SIX, "flower_adapter", "keel")}
    for package, files in source.items():
        print(f"{package:32} {num_lines(files):7,} lines {len(files):4} files")
    six = [file for package in SIX for file in source[package]]
    own_tests = [f for f in tracked("tests/*.py") if f.parent.name in ("tests", "methods")]
    functions = long_functions(six)
    files = [f"{f.relative_to(ROOT)} {n}" for f in six if (n := num_lines([f])) > MAX_FILE]
    first, two, three = profile(1), profile(2), profile(3)
    modules = [f for f, n in three.calls.items() if n > two.calls[f] and not f.startswith("keel/")]
    climbs = [f"{caller} -> {callee}" for caller, callee in first.climbs]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    figures = {
        "the six packages, lines": num_lines(six),
        "their tests, lines": num_lines(own_tests),
        "all tests, lines": num_lines(tracked("tests/*.py")),
        f"functions over {MAX_FUNCTION} lines": len(functions),
        f"files over {MAX_FILE} lines": len(files),
        "modules in a round of FedIntR": len(modules),
        "climbs before round 1": len(climbs),
        "config keys": num_keys(project["tool"]["flwr"]["app"]["config"]),
    }
    for what, value in figures.items():
        print(f"{what:32} {value:7,}")
    lists = {"Long functions": functions, "Long files": files, "Modules": modules, "Climbs": climbs}
    for title, lines in lists.items():
        print(f"\n{title}:", *sorted(lines), sep="\n  ")


if __name__ == "__main__":
    main()
