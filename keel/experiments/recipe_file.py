"""The YAML file of a recipe: its keys, validated by pydantic, with line numbers in errors.

Example: `docs/sweep.yaml`. `keel.experiments.recipe` expands the file into the cells of a table.
"""

from typing import Annotated, Any, Literal

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
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from keel.curve_names import check_curve_name
from keel.experiments.measure import Take, parse_take
from protocol.config import default_config
from protocol.options import OptionValue, did_you_mean

RUNNER_KEYS = {"seed", "resume", "output-dir", "run-name"}
ENTRY_KEYS = ("of", "take", "at", "tune", "tuned", "paper")
MAX_SHOWN = 80  # characters of a refused value
MAX_SEEDS = 10_000


class LineError(ValueError):
    """A mistake in a line of the file."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


class Lines(dict[str, Any]):
    """A YAML mapping with the line number of each key. Keys are text, as written."""

    lines: dict[str, int]


def read_yaml(text: str) -> Lines:
    """The mapping in a YAML 1.2 file. LineError for what is not YAML, or not a mapping."""
    yaml = YAML(typ="safe", pure=True)
    try:
        top = yaml.compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise LineError(mark.line + 1 if mark else 1, f"not YAML: {said}") from error

    def value_of(node: Node) -> Any:
        if isinstance(node, MappingNode):
            return mapping_of(node)
        if isinstance(node, SequenceNode):
            return [value_of(each) for each in node.value]
        try:
            return yaml.constructor.construct_object(node)
        except (ValueError, LookupError) as error:  # such as the date 2020-13-45
            raise LineError(line_of(node), f"not YAML: {node.value!r}: {error}") from error

    def mapping_of(node: MappingNode) -> Lines:
        found, own = Lines(), dict[str, int]()
        found.lines = {}
        for key, value in node.value:
            line = line_of(key)
            if not isinstance(key, ScalarNode) or not key.value.strip():
                raise LineError(line, "expected a name before the colon")
            if key.value == "<<":  # what follows overrides it
                merged = value_of(value)
                found |= merged
                found.lines |= dict.fromkeys(merged, line)
                continue
            if key.value in own:
                raise LineError(line, f"{key.value!r} is a duplicate of line {own[key.value]}")
            own[key.value] = found.lines[key.value] = line
            found[key.value] = value_of(value)
        return found

    if not isinstance(top, MappingNode):
        raise LineError(1, "expected a mapping; see docs/how-to/experiments.md")
    return mapping_of(top)


def line_of(node: Node) -> int:
    """The line in which a node begins, from 1."""
    return int(node.start_mark.line) + 1


def _config_key(key: str) -> str:
    known = default_config()
    table, dot, _ = key.partition(".")
    if dot and not any(name.startswith(f"{table}.") for name in known):
        return key  # perhaps of an own method, which the config checks
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


def _seeds(value: object) -> object:
    seeds = list(range(value)) if type(value) is int and value <= MAX_SEEDS else value
    are_seeds = isinstance(seeds, list) and all(type(s) is int and s >= 0 for s in seeds)
    if are_seeds and 0 < len(seeds) == len({*seeds}):  # type: ignore[arg-type, misc]
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
ConfigKeys = dict[ConfigKey, ConfigValue]
ConfigLists = dict[ConfigKey, Annotated[list[ConfigValue], Field(min_length=1)]]
Text = Annotated[str, AfterValidator(str.strip)]
Texts = Annotated[list[Text], BeforeValidator(_as_list)]
PaperNumber = Annotated[float, Field(strict=True, allow_inf_nan=False)] | None


class Reading(BaseModel):
    """How a cell's number is read: which curve, how it becomes one number, at which round."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    of: Annotated[str, BeforeValidator(check_curve_name)] | None = None
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


def read_recipe_file(text: str) -> tuple[RecipeFile, Lines]:
    """The validated file and its mapping with line numbers. LineError for the first mistake."""
    top = read_yaml(text)
    try:
        return RecipeFile.model_validate(top), top
    except ValidationError as error:
        line, message = min(_described(details, top) for details in error.errors())
        raise LineError(line, message) from error


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
        hint = did_you_mean(path[-1], RecipeFile.model_fields)
        return line, f"{path[-1]!r} is no key of a recipe{hint}"
    expected = own_message or error["msg"].replace("Input should be ", "expected ")
    if error["type"] in ("model_type", "dict_type"):
        expected = "expected a mapping"
    value = repr(error["input"])
    value = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."
    return line, f"{'.'.join(path)} = {value}: {expected}"
