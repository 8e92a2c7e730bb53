"""Every method by name, with its options, without importing torch.

A method is one file, client_app/methods/<name>.py, and that file imports torch. What the config and
the command line need of it (options, capability flags, documentation) is read from its syntax tree:
`options_class` rebuilds the class with its fields, flags and `__post_init__`, without its other
functions. Options and flags therefore have to be literals or calls to `protocol.options`.
"""

import ast
import copy
import importlib
import re
import sys
import traceback
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from protocol.options import Constraint, did_you_mean, type_names, types_of

app_folder = Path(__file__).resolve().parent.parent
methods_folder = app_folder / "client_app" / "methods"


@dataclass(frozen=True)
class MethodSpec:
    """A method as its file declares it.

    options: a frozen dataclass of the method's options, with the same capability flags as class
    attributes; an instance has the flags of its options. documentation: the file's docstring.
    The flags are explained in client_app/method.py; where one follows an option, this is its value
    while that option is false.
    """

    name: str
    class_name: str
    documentation: str
    options: type[Any]
    paper: str
    regularises: str
    client_state: str
    extra_forwards: str
    is_local_objective: bool
    is_stateful: bool
    is_personal: bool
    is_adapted_from_global: bool
    has_global_model: bool
    sends_weights: bool
    supports_mixed_architectures: bool
    supports_privacy: bool
    supports_server_optimizer: bool
    supports_weighting: bool
    supports_batch_norm: bool
    has_own_server_half: bool
    default_weighting: str
    shared_part: str

    @property
    def summary(self) -> str:
        """The first line of the documentation."""
        return self.documentation.partition("\n")[0]


FLAGS = tuple(f.name for f in fields(MethodSpec))[4:]  # after `options`


def method_stem(name: str) -> str:
    """The file stem of a method: `fedavg-ft` is `fedavg_ft`."""
    return name.replace("-", "_")


@lru_cache(maxsize=1)
def method_names() -> tuple[str, ...]:
    """All methods, in alphabetical order: one a file of client_app/methods.

    Hidden files are ignored: editors and file systems leave some, such as `.#fedavg.py`.
    """
    stems = (path.stem for path in methods_folder.glob("*.py"))
    names = (stem.replace("_", "-") for stem in stems if not stem.startswith(("_", ".")))
    return tuple(sorted(names))


@lru_cache(maxsize=64)
def method_spec(name: str) -> MethodSpec:
    """The method as its file declares it. ValueError if the file defines no method, or two."""
    if name not in method_names():
        raise ValueError(f"method = {name!r}: expected one of {', '.join(method_names())}")
    path = methods_folder / f"{method_stem(name)}.py"
    if not path.stem.isidentifier() or not path.exists():
        stem = re.sub(r"\W+", "_", name.lstrip("-0123456789")) or "method"
        raise ValueError(
            f"{methods_folder / name}.py: the name of a method's file is a letter, then letters, "
            f"digits and underscores: rename it, for example to {stem}.py"
        )
    tree = _parsed(path)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [c for c in classes if not c.startswith("_") and _is_method(path, c)]
    if len(names) != 1:
        raise ValueError(
            f"{path} defines {len(names)} methods ({', '.join(names) or 'none'}): expected one "
            "subclass of Method or LocalObjective; begin the name of a base class in this file "
            "with _, and import one of another file with `from client_app.MODULE import NAME`"
        )
    options = options_class(path, names[0])
    documentation = ast.get_docstring(tree) or ""
    flags = {flag: getattr(options, flag) for flag in FLAGS}
    return MethodSpec(name, names[0], documentation, options, **flags)


def imported(name: str) -> ModuleType:
    """The module of one half of a method. ValueError, with file and line, if it has an error."""
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).stem == name.rpartition(".")[2]]
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else name
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error


EXPECTED_CLASS = (
    "expected @dataclass(frozen=True), flags such as uses_global: ClassVar[bool] = True, and "
    'options such as mu: float = option(at_least(0), "weight of the penalty"), of type bool, int, '
    "float or str"
)

FLAG_CHOICES = {
    "default_weighting": ("examples", "uniform"),
    "shared_part": ("model", "extractor", "nothing"),
}


@lru_cache(maxsize=64)
def options_class(path: Path, name: str) -> type[Any]:
    """Class `name` of a source file, reduced to its fields, flags and `__post_init__`.

    ValueError if a method's class has a public attribute that is neither an option nor a flag, or
    a public function that no base class has, which would never be called.
    """
    tree = _parsed(path)
    bases = _bases(path, name)
    try:
        namespace = _names_without_torch(tree)
    except Exception as error:  # an import of what is not there
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    namespace |= {base: options_class(home, base) for base, home in bases.items()}
    reduced = copy.copy(_class_node(path, name))
    reduced.bases = [ast.Name(base, ast.Load()) for base in bases]
    reduced.body = [part for part in reduced.body if _is_declaration(part)] or [ast.Pass()]
    module = ast.fix_missing_locations(ast.Module([reduced], []))
    try:
        exec(compile(module, str(path), "exec"), namespace)
    except NameError as error:
        raise ValueError(
            f"{path}: {error} in the options or flags of {name}: use literals and the functions of "
            "protocol.options, because the config is checked before torch is imported"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{path}: {name}: {type(error).__name__}: {error}; {EXPECTED_CLASS}"
        ) from error
    found: type[Any] = namespace[name]
    try:
        types = types_of(found) if is_dataclass(found) else {}
    except NameError as error:
        raise ValueError(f"{path}: {name}: {error}; {EXPECTED_CLASS}") from error
    for field in fields(found) if types else ():
        constraint, kind = field.metadata.get("constraint"), types[field.name]
        if not isinstance(constraint, Constraint) or kind not in type_names:
            raise ValueError(f"{path}: {name}.{field.name} is not an option; {EXPECTED_CLASS}")
    if undecorated := [n for n, v in vars(found).items() if isinstance(v, Field)]:
        raise ValueError(
            f"{path}: {name}.{undecorated[0]} is not an option, because the class lacks "
            f"@dataclass(frozen=True); {EXPECTED_CLASS}"
        )
    own = {each for each in vars(found) if not each.startswith("_")}
    inherited = {each for base in found.__mro__[1:] for each in vars(base)}
    options = {field.name for field in fields(found)} if is_dataclass(found) else set()
    if path.parent == methods_folder and (unknown := sorted(own - inherited - options)):
        flags = [each for each in inherited if not each.startswith("_")]
        raise ValueError(
            f"{path}: {name}.{unknown[0]}: neither an option (NAME: TYPE = option(...)) nor a flag "
            "of client_app/method.py; move a constant out of the class, or begin its name with _"
            + did_you_mean(unknown[0], flags)
        )
    for flag in sorted((own & inherited) - options):
        value, allowed = getattr(found, flag), FLAG_CHOICES.get(flag, (True, False))
        is_checked = flag in FLAG_CHOICES or isinstance(getattr(super(found, found), flag), bool)
        if is_checked and value not in allowed:
            names = ", ".join(map(repr, allowed))
            raise ValueError(f"{path}: {name}.{flag} = {value!r}: expected one of {names}")
    lacks_state = getattr(found, "uses_previous", False) and not getattr(found, "is_stateful", True)
    if lacks_state and not name.startswith("_"):  # a method may set what its base does not
        raise ValueError(
            f"{path}: {name}.uses_previous = True: the previous model is client state; set "
            "is_stateful: ClassVar[bool] = True"
        )
    if path.parent == methods_folder and not name.startswith("_"):
        _check_functions(path, name)
    return found


def _check_functions(path: Path, name: str) -> None:
    """ValueError if a method's class has a public function that no base class has."""
    inherited = _inherited_functions(path, name)
    for part in _class_node(path, name).body:
        if not isinstance(part, ast.FunctionDef) or part.name.startswith("_"):
            continue
        if part.name not in inherited:
            raise ValueError(
                f"{path}:{part.lineno}: {name}.{part.name}: no base class has a function of this "
                "name, so Keel never calls it; begin the name of a helper with _"
                + did_you_mean(part.name, inherited)
            )


def _inherited_functions(path: Path, name: str) -> set[str]:
    """The names of the functions that the bases of a class define or inherit."""
    found: set[str] = set()
    for base, home in _bases(path, name).items():
        body = _class_node(home, base).body
        found |= {part.name for part in body if isinstance(part, ast.FunctionDef)}
        found |= _inherited_functions(home, base)
    return found


@lru_cache(maxsize=64)
def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(), str(path))
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}: save it as UTF-8") from None


def _class_node(path: Path, name: str) -> ast.ClassDef:
    for node in _parsed(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"{path} defines no class {name}")


def _bases(path: Path, name: str) -> dict[str, Path]:
    """The bases of a class that client_app defines, each with its file."""
    homes: dict[str, Path] = {}
    for node in _parsed(path).body:
        if isinstance(node, ast.ClassDef):
            if node.name == name:
                break  # a base of the same name is defined or imported above
            homes[node.name] = path
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("client_app."):
            home = app_folder / f"{str(node.module).replace('.', '/')}.py"
            homes |= {alias.name: home for alias in node.names}
    named = [b.id for b in _class_node(path, name).bases if isinstance(b, ast.Name)]
    return {base: homes[base] for base in named if base in homes}


def _is_method(path: Path, name: str) -> bool:
    """Whether the class descends from client_app.method.Method."""
    if (path, name) == (app_folder / "client_app" / "method.py", "Method"):
        return True
    return any(_is_method(home, base) for base, home in _bases(path, name).items())


def _is_declaration(node: ast.stmt) -> bool:
    """A docstring, a field or flag, or `__post_init__`."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_check = isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
    return is_docstring or is_check or isinstance(node, ast.AnnAssign | ast.Assign)


def _names_without_torch(tree: ast.Module) -> dict[str, Any]:
    """What a file imports from the standard library and from `protocol.options`."""
    found: dict[str, Any] = {"__name__": __name__}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (
            node.module == "protocol.options"
            or str(node.module).partition(".")[0] in sys.stdlib_module_names
        ):
            module = importlib.import_module(str(node.module))
            found |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in sys.stdlib_module_names:
                    found[alias.asname or alias.name] = importlib.import_module(alias.name)
    return found
