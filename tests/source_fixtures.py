"""What a source file imports."""

import ast
from functools import cache
from pathlib import Path

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
