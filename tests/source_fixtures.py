"""What a source file imports, and a copy of the app with changed sources."""

import ast
import re
import shutil
from functools import cache
from pathlib import Path

from protocol.code import SERVER_PACKAGES, run_by_worker
from protocol.config import app_folder, project_file

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


def write_newer_app(app: Path) -> Path:
    """The Flower app of a checkout with one more name in `protocol`, used in `client_app`."""
    ignored = shutil.ignore_patterns("*.pyc.*")  # byte code that another process is writing
    for package in (*run_by_worker, *SERVER_PACKAGES):
        shutil.copytree(app_folder / package, app / package, ignore=ignored)
    shutil.copy(app_folder / "LICENSE", app)
    project = re.sub(r"(?m)^fab-exclude = .*\n", "", project_file().read_text())
    (app / "pyproject.toml").write_text(project)  # Flower refuses patterns that match nothing
    with (app / "protocol/text.py").open("a") as newer:
        newer.write("new_name = 1\n")
    with (app / "client_app/worker_client.py").open("a") as newer:
        newer.write("from protocol.text import new_name\n")
    return app
