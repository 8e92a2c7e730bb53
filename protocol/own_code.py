"""Own code: what a config names by a spec, because Keel itself has no such name.

    mine.py:FedPull             NAME in a file
    my_package.pull:FedPull     NAME in a module that can be imported
    own:FedPull                 an object that Python handed to `keel.run`

A run keeps the text of a file or module, and a pickle of an object, under `own/` in its directory.
With these it is resumed, verified and used for predictions. A file is loaded under a name that
holds the digest of its text: an edited file is another module. The text is of one file; what this
imports is not kept. Needs no torch; the code that is loaded may import it.
"""

import importlib
import json
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

from protocol.files import digest, write_atomically
from protocol.options import ConfigError, did_you_mean
from protocol.own_source import is_stale, source_text

SPEC = re.compile(r"(?P<place>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
VALUE = "own"  # the place of an object that Python handed over
FOLDER = "own"  # of the run directory
MODULE_PREFIX = "keel_own_"  # of modules that are loaded from a text


def is_spec(text: object) -> bool:
    """Whether a config value names own code. `folder:data` and `npz:data` look as if they did."""
    return isinstance(text, str) and SPEC.fullmatch(text) is not None


def table_of(spec: str) -> str:
    """The table of the options of an own method: `fedpull` of `mine.py:FedPull`; "" of a name."""
    return spec.rpartition(":")[2].lower() if is_spec(spec) else ""


def canonical(spec: str) -> str:
    """The spec with the file's name alone, wherever the file is; own:split of split.json."""
    if spec.endswith(".json"):
        stem = re.sub(r"\W", "_", Path(spec).stem)
        return f"{VALUE}:{stem}"
    place, _, name = spec.rpartition(":")
    return f"{Path(place).name if place.endswith('.py') else place}:{name}"


@dataclass(frozen=True, eq=False)
class Own:
    """One piece of own code, or an own value, that a run uses.

    spec: canonical. digest: the first 16 hex digits of the SHA-256 of the text, or of the pickle of
    an object without one. text: of the file or module; of an object, its source with what it uses
    of the same notebook or script. path: where the file was. live: the object itself, in the
    process that it comes from.
    """

    spec: str
    digest: str
    text: str = field(default="", repr=False)
    pickled: bytes = field(default=b"", repr=False)
    path: str = ""
    live: Any = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """The file's name, the module's, or `own`."""
        return self.spec.rpartition(":")[0]

    @property
    def name(self) -> str:
        """The name within its place."""
        return self.spec.rpartition(":")[2]

    @property
    def is_module(self) -> bool:
        """Whether it is named by a module, which other machines may have too."""
        return self.place != VALUE and not self.place.endswith(".py")

    @cached_property
    def value(self) -> Any:
        """The object, loaded when it is first used.

        ValueError, one line, if the code cannot be imported or unpickled, or lacks the name.
        """
        if self.live is not None:
            return self.live
        if self.place == VALUE:
            return unpickled(self)
        if self.is_module and (installed := installed_module(self)):
            return named(installed, self)
        package = self.place.rpartition(".")[0] if self.is_module else ""
        return named(module_of(self.text, self.path or self.place, self.digest, package), self)

    @property
    def files(self) -> tuple[str, str]:
        """The names, under `own/` of a run directory, of the files of the text and the pickle."""
        stem = self.spec.replace(":", ".") if self.place == VALUE else self.place
        stem = stem.removesuffix(".py")
        return f"{stem}.py", f"{stem}.pkl"


# --- where own code comes from --------------------------------------------------------------------


def find(spec: str, key: str) -> Own:
    """The own code that a spec names, read but, if it is in a file, not yet executed.

    ConfigError, one line, if there is no such file, or if the module cannot be imported.
    """
    place = spec.rpartition(":")[0]
    try:
        if place == VALUE:
            raise ValueError("names an object of another process: give the object to keel.run")
        if spec.endswith(".json"):
            return remembered(from_json(Path(spec).expanduser()))
        if not place.endswith(".py"):
            with import_errors(place):
                module = importlib.import_module(place)
            text, path = text_of(module)
        else:
            file = Path(place).expanduser().absolute()
            text, path = read_text(file), str(file)
        return remembered(Own(canonical(spec), digest(text.encode()), text, path=path))
    except ValueError as error:
        raise ConfigError(key, f"{key} = {spec!r}: {error}") from error


def from_json(path: Path) -> Own:
    """The value in a JSON file, as if Python had handed it over."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    pickled = pickle.dumps(value)
    return Own(canonical(str(path)), digest(pickled), pickled=pickled, path=str(path), live=value)


def own_of(name: str, value: Any) -> Own:
    """An object that Python hands over, as own code called `name`, unless a module has it.

    ValueError, one line, if it cannot be pickled: no other process could use it.
    """
    if spec := importable_as(value):
        place, _, _ = spec.rpartition(":")
        text, path = text_of(sys.modules[place])
        return remembered(Own(spec, digest(text.encode()), text, path=path, live=value))
    return by_value(name, value)


def by_value(name: str, value: Any) -> Own:
    """An object as own code called `name`, whatever module has it; ValueError as `own_of`."""
    import cloudpickle

    for module_name in [each for each in sys.modules if each.startswith(MODULE_PREFIX)]:
        cloudpickle.register_pickle_by_value(sys.modules[module_name])  # no other process has it
    try:
        pickled: bytes = cloudpickle.dumps(value)
        text = source_text(value)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{name} cannot be pickled, so that no other process could use it: {reason}"
        ) from error
    found = digest(text.encode() or pickled)
    return remembered(Own(f"{VALUE}:{name}", found, text, pickled, live=value))


def importable_as(value: Any) -> str:
    """`module:NAME` of a class or function that a module has under its name; else ""."""
    place, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    module = sys.modules.get(place) if isinstance(place, str) else None
    if module is None or place == "__main__" or not isinstance(name, str):
        return ""
    is_there = getattr(module, name, None) is value
    is_there = is_there and not module.__name__.startswith(MODULE_PREFIX)
    has_text = str(getattr(module, "__file__", "")).endswith(".py")
    return f"{place}:{name}" if is_there and has_text and is_spec(f"{place}:{name}") else ""


_known: WeakValueDictionary[tuple[str, str], Own] = WeakValueDictionary()
_held: list[Own] = []


def remembered(own: Own) -> Own:
    """The own code, which `known` finds for as long as anything uses it."""
    _known[own.spec, own.digest] = own
    return own


def known(spec: str, found: str) -> Own:
    """The own code of this digest: of this process, or else of a module that is installed here.

    A module is imported, and its digest compared, when it is first used. ValueError for a file or
    an object that this machine does not have.
    """
    own = _known.get((spec, found)) or Own(spec, found)
    if own.is_module or own.text or own.pickled:
        return own
    raise ValueError(
        f"{spec} is not on this machine: name a module that is installed on every machine, such as "
        "my_package.pull:FedPull"
    )


def check_on_all_machines(owns: Mapping[str, Own]) -> None:
    """ValueError, one line, unless all of a run's own code is in modules, as each site has it."""
    for own in owns.values():
        if not own.is_module:
            raise ValueError(
                f"{own.spec}: a deployment runs what is installed at each of its sites: name a "
                "module, such as my_package.pull:FedPull"
            )


def hold(owns: Iterable[Own]) -> None:
    """Have this process know own code until it ends; a simulation's workers call it first."""
    _held.extend(map(remembered, owns))


def shipped(owns: Iterable[Own]) -> list[Own]:
    """The own code as another process can take it, without live objects."""
    return [replace(own, live=None) for own in owns]


def edited(owns: Mapping[str, Own], values: Iterable[object]) -> list[str]:
    """A line for each file, named in these config values, that is another now than the run has."""
    lines = []
    for own in owns.values():
        for value in filter(is_spec, values):
            path = Path(str(value).rpartition(":")[0]).expanduser()
            is_its = canonical(str(value)) == own.spec and path.suffix == ".py" and path.is_file()
            if is_its and digest(read_text(path).encode()) != own.digest:
                lines.append(
                    f"{path} has changed since the run began: the run goes on with its own copy, "
                    f"{own.path}"
                )
    return lines


# --- the run directory ----------------------------------------------------------------------------


def save(directory: Path, owns: Mapping[str, Own]) -> None:
    """Write what a run keeps of its own code under `own/`."""
    for own in owns.values():
        for name, content in zip(own.files, (own.text.encode(), own.pickled), strict=True):
            if content:
                (directory / FOLDER).mkdir(exist_ok=True)
                write_atomically(directory / FOLDER / name, content)


def read(directory: Path, digests: Mapping[str, str]) -> dict[str, Own]:
    """The own code that a run has kept. ValueError naming a file that is missing or changed."""
    found: dict[str, Own] = {}
    for spec, expected in digests.items():
        own = Own(spec, expected)
        text, pickled = (directory / FOLDER / name for name in own.files)
        own = replace(
            own,
            text=read_text(text) if text.exists() else "",
            pickled=pickled.read_bytes() if pickled.exists() else b"",
            path=str(text),
        )
        if digest(own.text.encode() or own.pickled) != expected:
            raise ValueError(
                f"{text if own.text else pickled} is not as the run wrote it: its digest should be "
                f"{expected}: restore it from a backup"
            )
        found[spec] = remembered(own)
    return found


# --- loading --------------------------------------------------------------------------------------


def module_of(text: str, path: str, found: str, package: str = "") -> ModuleType:
    """The module of a text, executed once a process. ValueError with file and line if it fails.

    package: in which it was, for its relative imports.
    """
    stem = re.sub(r"\W", "_", Path(path).stem)
    name = f"{MODULE_PREFIX}{stem}_{found}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__, module.__package__ = path, package
    sys.modules[name] = module  # before it is executed: dataclasses look their module up

    try:
        with import_errors(path, path.__eq__):
            exec(compile(text, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def import_errors(place: str, is_its: Callable[[str], bool] | None = None) -> Iterator[None]:
    """Within, a module is imported that a user may have written; its errors are one line.

    ValueError with the file and the line that failed. place: the module's name, or its file.
    is_its: whether a file is the module's; by default by its name.
    """
    stem = place.rpartition(".")[2]
    try:
        yield
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_its = is_its or (lambda path: Path(path).stem == stem)
        lines = [frame for frame in frames if is_its(frame.filename)]
        where = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else place
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error


def installed_module(own: Own) -> ModuleType | None:
    """The module that is installed here; None if it is another, and the run has kept its text.

    ValueError if it is missing or another.
    """
    try:
        with import_errors(own.place):
            module = importlib.import_module(own.place)
        here = digest(text_of(module)[0].encode())
        if here != own.digest:
            raise ValueError(f"{own.place} has the digest {here} here, the run's {own.digest}")
        return module
    except ValueError as error:
        if own.text:
            return None
        raise ValueError(f"{own.spec}: {error}: install the same on every machine") from error


def named(module: ModuleType, own: Own) -> Any:
    """What the module has under the name. ValueError, with the nearest name, if it has nothing."""
    if not hasattr(module, own.name):
        near = did_you_mean(own.name, (n for n in vars(module) if not n.startswith("_")))
        raise ValueError(f"{own.spec}: {own.path or own.place} has no {own.name}{near}")
    return getattr(module, own.name)


def unpickled(own: Own) -> Any:
    """The object that Python handed over in another process."""
    try:
        return pickle.loads(own.pickled)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{own.spec} cannot be unpickled: {reason}") from error


def read_text(path: Path) -> str:
    """The text of a file; ValueError, one line, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise ValueError(f"{path}: {reason}") from error


def text_of(module: ModuleType) -> tuple[str, str]:
    """(text, path) of a module's file. ValueError if there is none, or if it is not what runs."""
    path = getattr(module, "__file__", None)
    if not str(path).endswith(".py"):
        raise ValueError(f"{module.__name__} has no Python file")
    text = read_text(Path(str(path)))
    if is_stale(module, text):
        raise ValueError(
            f"{path} has changed since this process imported it: restart Python, or "
            "importlib.reload the module"
        )
    return text, str(path)


def is_own_frame(frame: FrameType) -> bool:
    """Whether a frame executes own code: from a file, a module that a run names, or a notebook."""
    name = str(frame.f_globals.get("__name__"))
    modules = {own.place for own in _known.values()}
    return name.startswith(MODULE_PREFIX) or name == "__main__" or name in modules
