"""`keel bench`: speed as ratios measured within one run."""

from dataclasses import replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from keel.cli.interrupts import uninterrupted
from protocol.config import keel_home

# part: (module in keel.benchmarks, function from BenchOptions to rows)
PARTS = {
    "steps": ("steps", "overheads"),
    "engine": ("engine", "against_bare"),
    "scale": ("engine", "scale"),
    "million": ("engine", "million"),
    "personal": ("engine", "personal"),
    "memory": ("engine", "memory"),
    "resnet50": ("steps", "resnet50_overheads"),
    "deployment": ("deployment", "round_cost"),
    "precisions": ("steps", "precisions"),
    "frameworks": ("frameworks", "frameworks"),
    "gpu": ("gpu", "gpu"),
}
DEFAULT_PARTS = ("steps", "engine", "scale")
Part = StrEnum("Part", list(PARTS))  # type: ignore[misc]  # from the table


def bench(
    parts: Annotated[list[Part] | None, typer.Argument(metavar="[PART]...")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="The same as the part gpu.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smallest sizes, to check that the benchmark runs.")
    ] = False,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Repetitions of engine and frameworks.")
    ] = 2,
    rounds: Annotated[
        int, typer.Option(min=2, help="Rounds per measurement; the first is a warm-up.")
    ] = 4,
    device: Annotated[str, typer.Option(help="Device of the gpu part.")] = "cuda",
    cifar10: Annotated[
        Path | None, typer.Option(help="Images in train/CLASS/ and test/CLASS/, for the gpu part.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write OUT.json and OUT.md; default bench or bench-PART.")
    ] = None,
) -> None:
    """Measure speed on this machine, as ratios within one run; by default the first three parts.

    steps: local training by method. engine: whole rounds against bare loops. scale: up to 100,000
    clients. million: a million clients. personal: evaluation of 2,000 personal models. memory: of
    large models. resnet50: steps of a large model (12 minutes). deployment: cost of a deployed
    round. precisions: a step in bf16 and fp32. frameworks: rounds in one process against a bare
    loop, pfl, fluke and Flower's simulation, if they are installed. gpu: on a GPU; it starts no
    measurement after 8 minutes: repeat the command to continue with the rest.
    """
    with uninterrupted():
        from keel.benchmarks.report import BenchOptions, Row, earlier_rows, table, write

    chosen = [str(part) for part in parts or []]
    if gpu:
        chosen.append("gpu")
    to = out or Path("-".join(["bench", *chosen]))
    to = to.with_suffix("") if to.suffix in (".json", ".md") else to
    if not to.absolute().parent.is_dir():
        raise ValueError(f"--out {to}: {to.absolute().parent} is not a directory")
    options = BenchOptions(keel_home(), quick, repetitions, rounds, device, str(cifar10 or ""))
    rows: list[Row] = earlier_rows(to, options) if set(chosen) == {"gpu"} else []
    options = replace(options, done=frozenset(str(row["what"]) for row in rows))
    options.home.mkdir(parents=True, exist_ok=True)
    for part in chosen or DEFAULT_PARTS:
        module, function = PARTS[part]
        for row in getattr(import_module(f"keel.benchmarks.{module}"), function)(options):
            print(row, flush=True)
            rows.append(row)
            write(rows, to, options)  # so that an interrupted benchmark keeps what it has measured
    print(table(rows))
