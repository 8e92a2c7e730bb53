"""`keel new-method`: the file of a new method, a complete example to change."""

import re
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from protocol.config import names_taken

MAX_PAPER = 60  # characters, so that it fits into a line


def new_method(
    name: Annotated[str, typer.Argument()],
    server_half: Annotated[
        bool, typer.Option("--server-half", help="Also write a server half.")
    ] = False,
    paper: Annotated[
        str, typer.Option(help="The source, as tables show it: Acar et al. 2021.")
    ] = "",
) -> None:
    """Write the file of a new method, in the current folder.

    NAME is the class's, such as FedPull. The file holds a complete example, the squared distance of
    the features to the global model's: replace it with your method. It runs unchanged. `keel
    check-method FILE:NAME` checks your method; it fails until the placeholders for the source are
    replaced.
    """
    text = method_text(name, server_half, paper)
    if name.lower() in names_taken():
        raise ValueError(f"{name!r}: Keel has a {name.lower()!r}: choose another name")
    path = write_new(name, text)
    option = f"{name.lower()}.mu=0.3"
    print(f"{path.name}: change the example into your method, then")
    print(f"  keel check-method {path.name}:{name}")
    print(f"  keel run method={path.name}:{name} {option}")


def write_new(name: str, text: str) -> Path:
    """The new file of a class or function. ValueError if there is one."""
    path = Path(f"{name.lower()}.py")
    if path.exists():
        raise ValueError(f"{path} exists and is not overwritten: choose another name")
    path.write_text(text)
    return path


def method_text(name: str, server_half: bool = False, paper: str = "") -> str:
    """The text of a new method's file. ValueError if its name or source is not allowed."""
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
        raise ValueError(f"{name!r}: expected the name of a class, such as FedPull")
    if len(paper) > MAX_PAPER or not paper.isprintable() or set(paper) & set('"\\<>'):
        raise ValueError(
            f"--paper {paper!r}: expected at most {MAX_PAPER} characters, without quotes, such as "
            "'Acar et al. 2021 (FedDyn)'"
        )
    return filled("method.py.j2", name=name, server_half=server_half, paper=paper)


def filled(template: str, **values: object) -> str:
    """The text of a template in keel/cli/templates."""
    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    environment = Environment(loader=folder, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(template).render(values)


def placeholders() -> list[str]:
    """What stands for the source in a new method."""
    return re.findall("<[^<>]+>", method_text("FedNew"))
