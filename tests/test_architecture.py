"""The layout: no import cycle, arrows that point down, and no torch where none is needed.

Every import counts, also under TYPE_CHECKING, inside functions and by `import_module("NAME")`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_fixtures import imports_of

from keel.cli.main import COMMANDS

root = Path(__file__).parent.parent
# A package may import itself and those on the lines above it, not its neighbours.
LAYERS = (
    ("protocol",),
    ("flower_adapter",),
    ("models", "data"),
    ("client_app", "strategies"),
    ("server_app",),
    ("keel",),
)
LAYER_OF = {package: n for n, packages in enumerate(LAYERS) for package in packages}
WITH_TORCH = {f"protocol.{name}" for name in ("array_records", "arrays", "messages", "simulated")}

# What Keel uses of Flower; all else is in flower_adapter.
FLOWER = {
    "flwr",
    "flwr.app",
    "flwr.simulation",
    "flwr.clientapp",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
}
IMPORT_CALL = re.compile(r"""(?:import_module|__import__)\(\s*["']([\w.]+)["']""")


def module_name(file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(file): file for package in LAYER_OF for file in (root / package).rglob("*.py")
}


def imports(name: str) -> Iterator[str]:
    """Our modules that this one imports. A package's __init__ is one only if it is named."""
    for node in imports_of(MODULES[name]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{name}: relative import"
            names = [
                inner if (inner := f"{node.module}.{alias.name}") in MODULES else str(node.module)
                for alias in node.names
            ]
        yield from (imported for imported in names if imported in MODULES and imported != name)
    yield from set(IMPORT_CALL.findall(MODULES[name].read_text())) & MODULES.keys()


@cache
def graph() -> dict[str, list[str]]:
    """What each module imports of ours."""
    return {name: sorted(set(imports(name))) for name in MODULES}


WITHOUT_TORCH = """
import importlib, sys, traceback

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("torch is imported")

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        print(f"importing {name}: {error} by", [file for file in files if file[0] != "<"][-1])
from protocol.config import resolve_config

resolve_config({"method": "fedintr"})
for mistake in ({"lr": -1.0}, {"norm": "batch"}, {"source": "digit"}, {"method": "fedckaa"}):
    try:
        print("accepted", resolve_config(mistake))
    except ValueError:
        continue
"""


def test_no_import_cycle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_imports_point_down():
    wrong = [
        f"{name} imports {imported}"
        for name, all_imported in graph().items()
        for imported in all_imported
        if (importer := name.partition(".")[0]) != (package := imported.partition(".")[0])
        and LAYER_OF[package] >= LAYER_OF[importer]
    ]
    assert wrong == []


def test_only_flower_adapter_imports_what_flower_does_not_export():
    wrong = [
        f"{name} imports {imported}"
        for name, file in MODULES.items()
        if not name.startswith("flower_adapter")
        for node in imports_of(file)
        for imported in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
        )
        if imported.partition(".")[0] == "flwr" and imported not in FLOWER
    ]
    assert wrong == []


@pytest.mark.end_to_end
def test_the_command_line_is_imported_and_refuses_common_keys_without_torch():
    commands = {f"keel.cli.{module}" for module, *_ in COMMANDS.values()}
    light = [
        "keel.cli.main",
        "keel.saved_runs",
        "data.partitions",
        "data.sources",
        *sorted(commands),
    ]
    light += [name for name in MODULES if name.startswith("protocol") and name not in WITH_TORCH]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *light],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
