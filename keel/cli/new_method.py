"""`keel new-method`: the files of a new method, a complete example to change.

The templates are complete files, in which FedNew, fednew and fed-new are placeholders for the
class, the file and the method's name.
"""

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from protocol.catalogue import method_names, method_stem
from protocol.config import app_folder, default_config

SERVER_FLAG = "    has_own_server_half: ClassVar[bool] = True\n"
SERVER_OPTION = (
    "    eta: float = option("
    'between(0, 1, open_low=True), "server learning rate", source="eq. (3)")\n'
)

MAX_PAPER = 60  # characters, so that it fits into a line

TABLE = """
[tool.flwr.app.config.fed-new]
mu = 0.1                       # weight of the distance
"""
SERVER_DEFAULT = "eta = 1.0                      # server learning rate\n"


def new_method(
    name: Annotated[str, typer.Argument()],
    server_half: Annotated[
        bool, typer.Option("--server-half", help="Also write the server half, in strategies/.")
    ] = False,
    paper: Annotated[
        str, typer.Option(help="The source, as the table of methods shows it: Acar et al. 2021.")
    ] = "",
) -> None:
    """Write the files of a new method: client half, test, config table.

    NAME is in lower case, such as fedavg-ft. The files contain a complete example, the squared
    distance of the features to the global model's: replace it with your method. They pass
    `make check` unchanged. `keel check-method NAME` checks your method; it fails until the
    placeholders for the source are replaced.
    """
    files = method_files(name, server_half, paper)
    pyproject = app_folder / "pyproject.toml"
    defaults = TABLE + SERVER_DEFAULT if server_half else TABLE
    config = with_table(pyproject.read_text(), named(defaults, name))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pyproject.write_text(config)
    for path in (*files, pyproject):
        print(path.relative_to(app_folder) if Path.cwd() == app_folder else path)
    print(f"change the example into your method, then run `keel check-method {name}`")


def method_files(name: str, server_half: bool, paper: str = "") -> dict[Path, str]:
    """Path to content.

    ValueError if the name is taken, it or the source is not allowed, or this is no checkout.
    """
    stem = method_stem(name)
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(
            f"{name!r}: expected a lower-case letter, then lower-case letters, digits and single "
            "hyphens, such as fedavg-ft"
        )
    if keyword.iskeyword(stem):
        raise ValueError(
            f"{name!r} is a keyword of Python: choose another name, such as fed-{name}"
        )
    if name in {key.partition(".")[0] for key in default_config()} | set(method_names()):
        raise ValueError(f"{name!r} exists: methods, server optimizers and config keys share names")
    if not (app_folder / "tests").is_dir():
        raise ValueError(
            f"{app_folder} is not a checkout of Keel, in which methods are written: clone the "
            "repository and install Keel from it (`make env`)"
        )
    if len(paper) > MAX_PAPER or not paper.isprintable() or set(paper) & set('"\\<>'):
        raise ValueError(
            f"--paper {paper!r}: expected at most {MAX_PAPER} characters, without quotes, such as "
            "'Acar et al. 2021 (FedDyn)'"
        )
    client, test = template("client_half"), template("test")
    if paper:
        client = client.replace('<authors>, "<title>", <venue>, <arXiv number>', paper)
        client = client.replace("<authors and year>", paper)
    test = test.replace("ETA", ", eta=1.0" if server_half else "")
    files = {}
    if server_half:
        client = client.replace("    uses_global", SERVER_FLAG + "    uses_global", 1)
        client = client.replace('source="eq. (2)")\n', f'source="eq. (2)")\n{SERVER_OPTION}', 1)
        client = client.replace("import at_least,", "import at_least, between,", 1)
        client = client.replace("Aggregation: weighted average.", "Aggregation: see strategies/.")
        files[app_folder / "strategies" / f"{stem}.py"] = template("server_half")
        test += template("test_of_server_half")
    files[app_folder / "client_app" / "methods" / f"{stem}.py"] = client
    files[app_folder / "tests" / "methods" / f"test_{stem}.py"] = test
    # a file of Keel in strategies/, such as sampling.py, would be taken for the server half
    taken = {*files, app_folder / "strategies" / f"{stem}.py"}
    if existing := sorted(path for path in taken if path.exists()):
        raise ValueError(f"{existing[0]} exists and is not overwritten: choose another name")
    return {path: named(text, name) for path, text in files.items()}


def placeholders() -> list[str]:
    """What stands for the source in a new method."""
    return re.findall("<[^<>]+>", template("client_half"))


def template(name: str) -> str:
    """The text of a file in keel/cli/templates."""
    return Path(__file__).with_name("templates").joinpath(f"{name}.py.txt").read_text()


def named(text: str, name: str) -> str:
    """The text with this method's names: fed-pull, fed_pull.py, FedPull; fedpull is FedPull."""
    parts = re.sub(r"^fed(?=[a-z])", "fed-", name).split("-")
    class_name = "".join(part.capitalize() for part in parts)
    stem = method_stem(name)
    for old, new in (("FedNew", class_name), ("fed-new", name), ("fednew", stem)):
        text = text.replace(old, new)
    return text


def with_table(pyproject: str, table: str) -> str:
    """pyproject.toml with one more table after the last [tool.flwr.app.config.*]."""
    pyproject = pyproject.rstrip("\n") + "\n"
    last = pyproject.rindex("\n[tool.flwr.app.config.")
    end = pyproject.find("\n\n", last) + 1 or len(pyproject)  # a user's table may end the file
    return pyproject[:end] + table + pyproject[end:]
