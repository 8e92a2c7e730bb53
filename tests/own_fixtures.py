"""An own method, as a file, as a notebook's cell, and as a module."""

import importlib
import itertools
import linecache
import sys
from pathlib import Path

PULL = '''"""Pull the features towards the global model's."""

from dataclasses import dataclass
from typing import ClassVar

from keel import LocalObjective, at_least, option

SCALE = 1.0


def distance(z, z_g):
    return SCALE * (z - z_g).square().sum(1).mean()


@dataclass(frozen=True)
class FedPull(LocalObjective):
    """Pull the features towards the global model's."""

    uses_global: ClassVar[bool] = True
    mu: float = option(at_least(0), "weight of the penalty", default=0.1)

    def layers(self, model):
        return ["features"]

    def penalty(self, batch):
        (z,), (z_g,) = batch.reps, batch.reps_global
        return self.mu * distance(z, z_g)
'''

numbers = itertools.count()


def execute(text, names):
    """Execute a notebook's cell with this text in these names."""
    file = f"<cell {next(numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)  # as IPython does
    exec(compile(text, file, "exec"), names)


def cell(text, name="FedPull"):
    """What a notebook's cell with this text defines under the name."""
    names = {"__name__": "__main__"}
    execute(text, names)
    return names[name]


def file(folder: Path, text=PULL, name="mine.py") -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text)
    return path


def module(folder: Path, monkeypatch, text=PULL, name="own_package"):
    """A module with this text, imported."""
    monkeypatch.syspath_prepend(str(folder))
    file(folder, text, f"{name}.py")
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module(name)
