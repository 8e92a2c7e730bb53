"""The YAML file of a recipe: its keys, validated by pydantic, with line numbers in errors.

Example: `docs/sweep.yaml`. `keel.experiments.recipe` expands the file into the cells of a table.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from keel.experiments.measure import Curve, Take, parse_take
from protocol.config import default_config, refuse_unknown
from protocol.options import OptionValue, did_you_mean

RUNNER_KEYS = {"seed", "resume", "output-dir", "run-name"}
ENTRY_KEYS = ("of", "take", "at", "tune", "tuned", "paper")
MAX_SHOWN = 80  # characters of a refused value
MAX_SEEDS = 10_000
MAX_VALUES = 1_000_000  # of a file, each as often as YAML's aliases repeat it


class LineError(ValueError):
    """A mistake in a line of the file."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")


class Lines(dict[str, Any]):
    """A YAML mapping with the line number of each key."""

    lines: Mapping[str, int]


# libyaml's parser reads a recipe ten times as fast; PyYAML is built without it on some machines
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):  # type: ignore[misc, valid-type]
    """Keeps line numbers; refuses a duplicate key, where YAML would let the last one win."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As YAML's. LineError for a value that is not of its type, such as 2020-13-45."""
        try:
            return super().construct_object(node, deep)
        except LineError:
            raise
        except ValueError as error:
            raise LineError(node.start_mark.line + 1, f"not YAML: {error}") from error
        except (AttributeError, IndexError, KeyError) as error:  # PyYAML's, as for `!!bool maybe`
            kind = node.tag.rpartition(":")[2]
            message = f"not YAML: {node.value!r} is not a valid !!{kind}"
            raise LineError(node.start_mark.line + 1, message) from error


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """As YAML's, except that 010 and 1:30 are refused: YAML 1.1 takes them for 8 and 90."""
    number: int = loader.construct_yaml_int(node)
    if re.match(r"[-+]?0[0-9_]", node.value) or ":" in node.value:
        line = node.start_mark.line + 1
        raise LineError(
            line, f"YAML takes {node.value} for {number}: write a decimal number, or text in quotes"
        )
    return number


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> Lines:
    """Keys are text as written, whatever YAML takes them for: `off` would be False, 010 8."""

    def key_of(key_node: yaml.Node) -> str:
        if not isinstance(key_node, yaml.ScalarNode) or not key_node.value.strip():
            raise LineError(key_node.start_mark.line + 1, "expected a name before the colon")
        return str(key_node.value)

    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        if key_node.value == "<<":
            continue
        key, line = key_of(key_node), key_node.start_mark.line + 1
        if key in lines:
            raise LineError(line, f"{key!r} is a duplicate of line {lines[key]}")
        lines[key] = line
    loader.flatten_mapping(node)
    for key_node, value in node.value:
        key = key_of(key_node)
        if isinstance(default_config().get(key), str):
            _take_words_as_text(value)
    mapping = Lines(
        {key_of(key): loader.construct_object(value, True) for key, value in node.value}
    )
    mapping.lines = {key: lines.get(key, node.start_mark.line + 1) for key in mapping}
    return mapping


def _take_words_as_text(value: yaml.Node) -> None:
    """Let off, no, on and yes be text in a value or list, as in `norm-bound: off`, not booleans."""
    for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        if node.tag == "tag:yaml.org,2002:bool":
            node.tag = "tag:yaml.org,2002:str"


# YAML 1.1 reads numbers without a point (1e-2), or without a sign in the exponent (2.0e2), as text
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _config_key(key: str) -> str:
    known = default_config()
    if key not in known:
        hint = did_you_mean(key, [*known, *ENTRY_KEYS]) or "; `keel keys` lists the keys"
        raise ValueError(f"config key = {key!r} is unknown{hint}")
    if key in RUNNER_KEYS:
        raise ValueError(f"{key} is set by the runner: use seeds and --output")
    return key


def _config_value(value: object) -> object:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(
            "expected a number, true, false or text; a list belongs under grid (each value is a "
            "row) or tune (the best value is reported)"
        )
    return value


def _values(value: object) -> object:
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of values")
    return value


def _config_keys(value: object) -> object:
    return {} if value is None else value


def _seeds(value: object) -> object:
    seeds = list(range(value)) if type(value) is int and value <= MAX_SEEDS else value
    if isinstance(seeds, list) and all(type(s) is int and s >= 0 for s in seeds):
        are_different = len(set(seeds)) == len(seeds)
        if seeds and are_different:
            return seeds
    raise ValueError(
        f"expected the number of seeds, from 1 to {MAX_SEEDS:,}, or a list of different seeds "
        ">= 0, such as [42]"
    )


def _as_list(value: object) -> object:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


ConfigKey = Annotated[str, AfterValidator(_config_key)]
ConfigValue = Annotated[Any, AfterValidator(_config_value)]
ConfigValues = Annotated[list[ConfigValue], BeforeValidator(_values)]
ConfigKeys = Annotated[dict[ConfigKey, ConfigValue], BeforeValidator(_config_keys)]
ConfigLists = Annotated[dict[ConfigKey, ConfigValues], BeforeValidator(_config_keys)]
Text = Annotated[str, AfterValidator(str.strip)]
Texts = Annotated[list[Text], BeforeValidator(_as_list)]
PaperNumber = Annotated[float, Field(strict=True, allow_inf_nan=False)] | None


class Reading(BaseModel):
    """How a cell's number is read: which curve, how it becomes one number, at which round."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    of: Curve | None = None
    take: Annotated[Take | None, BeforeValidator(parse_take)] = None
    at: Annotated[int, Field(strict=True, ge=0)] = 0


class Entry(Reading):
    """A row or a column: config keys, beside the keys of recipes.

    parts: its name on each axis; line: 0 if it is not in the file; lines: of its keys.
    """

    keys: ConfigKeys = {}
    tune: ConfigLists = {}
    tuned: Annotated[list[OptionValue | None], BeforeValidator(_as_list)] = []
    paper: Annotated[list[PaperNumber], BeforeValidator(_as_list)] = []
    parts: tuple[str, ...] = ()
    line: int = 0
    lines: dict[str, int] = {}

    @model_validator(mode="before")
    @classmethod
    def _collect_config_keys(cls, body: Any) -> Any:
        if not isinstance(body, Lines):
            return {} if body is None else body
        entry: dict[str, Any] = {key: body[key] for key in body if key in ENTRY_KEYS}
        return entry | {"keys": {key: body[key] for key in body if key not in ENTRY_KEYS}}

    @property
    def name(self) -> str:
        """Its parts as one name."""
        return ", ".join(self.parts)


class RecipeFile(Reading):
    """The keys of a recipe."""

    title: Text = ""
    paper: Text = ""
    item: Text = ""
    notes: Texts = []
    remark: Text = ""
    shows: Literal["table", "curves", "labels"] = "table"
    seeds: Annotated[list[int], BeforeValidator(_seeds)] = [0]
    config: ConfigKeys = {}
    columns: Annotated[list[dict[str, Entry]], BeforeValidator(_as_list)] = []
    rows: Annotated[list[dict[str, Entry]], BeforeValidator(_as_list)] = []
    grid: ConfigLists = {}
    claims: Texts = []
    headlines: Texts = []


def num_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """How many values a part of the file has, each as often as aliases repeat it.

    known: of the parts that were counted; one within itself counts once, and is refused later.
    """
    if node not in known:
        known[node] = 1
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[node] += sum(num_values(part, known) for part in parts)
    return known[node]


def loaded(text: str) -> Any:
    """The content of a YAML file. LineError if its aliases expand to over MAX_VALUES values."""
    loader = _Loader(text)  # a SafeLoader
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if num_values(node, {}) > MAX_VALUES:
            raise LineError(1, f"its aliases stand for more than {MAX_VALUES:,} values: use fewer")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def read_recipe_file(text: str) -> tuple[RecipeFile, Lines]:
    """The validated file and its mapping with line numbers. LineError for the first mistake."""
    if odd := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        raise LineError(line, f"not YAML: the character {odd[0]!r} is not allowed")
    try:
        top = loaded(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = "; indent with spaces, not with tabs" if re.search(r"(?m)^\s*\t", text) else ""
        raise LineError(line, f"not YAML: {error.problem}{hint}") from error
    if not isinstance(top, Lines):
        raise LineError(1, "expected a mapping; see docs/how-to/experiments.md")
    try:
        return RecipeFile.model_validate(top), top
    except ValidationError as error:
        raise LineError(*min([_described(details, top) for details in error.errors()])) from error


def _described(error: ErrorDetails, top: Lines) -> tuple[int, str]:
    """Line and message of an error of pydantic's: key, value, what is allowed."""
    node, line, path = top, 1, []
    for part in error["loc"]:
        if isinstance(node, list) and isinstance(part, int):
            node = node[part]
        elif isinstance(node, Lines) and (key := str(part)) in node:
            # others are parts of the model alone, such as `keys`
            line, node = node.lines[key], node[key]
            path.append(key)
    own_message = str(error.get("ctx", {}).get("error", ""))
    if error["loc"] and error["loc"][-1] == "[key]":
        return line, own_message
    if error["type"] == "extra_forbidden":
        try:
            refuse_unknown("recipe key", path[-1], list(RecipeFile.model_fields))
        except ValueError as unknown:
            return line, str(unknown)
    expected = own_message or error["msg"].replace("Input should be ", "expected ")
    if error["type"] in ("model_type", "dict_type"):
        expected = "expected a mapping"
    value = repr(error["input"])
    value = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."
    return line, f"{'.'.join(path)} = {value}: {expected}"
