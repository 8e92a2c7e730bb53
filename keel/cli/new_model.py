"""`keel new-model`: the file of a new network, a complete example to change."""

import re
from typing import Annotated

import typer

from keel.cli.new_method import filled, write_new


def new_model(name: Annotated[str, typer.Argument()]) -> None:
    """Write the file of a new network, in the current folder.

    NAME is the function's that makes it, such as small_net. The file holds a complete example, and
    it runs unchanged: replace it with your network.
    """
    path = write_new(name, model_text(name))
    print(f"{path.name}: change the example into your network, then")
    print(f"  keel run model={path.name}:{name} num-rounds=2 --clients 4")


def model_text(name: str) -> str:
    """The text of a new network's file. ValueError if its name is not allowed."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
        raise ValueError(f"{name!r}: expected the name of a function, such as small_net")
    return filled("model.py.j2", name=name)
