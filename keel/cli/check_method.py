"""`keel check-method`: checks a method against the contract of all methods."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from keel.interrupts import uninterrupted
from protocol.catalogue import method_names
from protocol.config import refuse_unknown
from protocol.models import MODELS
from protocol.own_code import is_spec


def check_method(
    name: Annotated[str, typer.Argument()],
    model: Annotated[str, typer.Option(help="The network, such as resnet20.")] = "cnn-fedreco",
) -> int:
    """Check a method: options, gradients, state, determinism, resuming, flags.

    NAME is a method's, or where your own is: mine.py:FedPull, my_package.pull:FedPull.
    Prints one line per check and exits with 1 if any fails. Takes a few seconds, or minutes
    with a large network. A method that needs BatchNorm is checked with `--model resnet20`.
    """
    if not is_spec(name):
        refuse_unknown("method", name, list(method_names()))
    refuse_unknown("model", model, list(MODELS))
    with uninterrupted():
        from keel.method_checks import check_method as results
        from keel.model_checks import model_problems

    if problems := model_problems(model):
        raise ValueError(problems[0])
    failed = 0
    with tempfile.TemporaryDirectory(prefix="keel-check-") as directory:
        for result in results(name, Path(directory), model):
            failed += result.outcome == "FAIL"
            reason = f": {result.reason}" if result.reason else ""
            print(f"{result.outcome}  {result.check}{reason}", flush=True)
    print(f"{name}: {failed} failed" if failed else f"{name}: all checks pass")
    return int(failed > 0)
