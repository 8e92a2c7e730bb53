"""What a source file imports, and a copy of the app with changed sources."""

import ast
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from protocol.code import SERVER_PACKAGES, run_by_worker
from protocol.config import app_folder, project_file

PACKAGES = (
    "client_app",
    "data",
    "flower_adapter",
    "keel",
    "models",
    "protocol",
    "server_app",
    "strategies",
)
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # no import is within an expression


@cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """All imports, also those under TYPE_CHECKING and inside functions."""
    found: list[ast.Import | ast.ImportFrom] = []
    todo: list[ast.AST] = [ast.parse(file.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        todo += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, STATEMENTS)]
    return found


def copy_keel(to: Path, packages: Iterable[str] = PACKAGES) -> Path:
    """Copy these packages and pyproject.toml into `to`; returns `to`."""
    for package in packages:  # with byte code, except files that another process is writing
        shutil.copytree(
            app_folder / package, to / package, ignore=shutil.ignore_patterns("*.pyc.*")
        )
    shutil.copy(app_folder / "pyproject.toml", to)
    return to


def write_newer_app(app: Path) -> Path:
    """The Flower app of a checkout with one more name in `protocol`, used in `client_app`."""
    copy_keel(app, (*run_by_worker, *SERVER_PACKAGES))
    shutil.copy(app_folder / "LICENSE", app)
    project = re.sub(r"(?m)^fab-exclude = .*\n", "", project_file().read_text())
    (app / "pyproject.toml").write_text(project)  # Flower refuses patterns that match nothing
    with (app / "protocol/text.py").open("a") as newer:
        newer.write("new_name = 1\n")
    with (app / "client_app/worker_client.py").open("a") as newer:
        newer.write("from protocol.text import new_name\n")
    return app
