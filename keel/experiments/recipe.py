"""A recipe: one table or figure as a YAML file, parsed once, refused with its line.

    title, paper, item   what it is of; `note` says what a reader has to know beside it
    shows                table, curves (these before the numbers), or labels (how a split lies over
                         clients: nothing is run)
    config               config keys of every run
    seeds                a number, or a list of seeds
    of, take, at         which curve of the history, how it becomes one number, at which round
    columns, rows        mappings of name to config keys; a list of mappings is their product
    grid                 config key to list of values: every combination is a row
    claims               "FedIntR above FedAvg in CIFAR-10": judged by the report

An entry of rows or columns may also hold `of`, `take`, `at`; `tune` (a config key to the list of
values tried), `tuned` (the paper's best of them, one for all columns or one a column), and, in
rows, `paper`: its numbers, one a column, null where there is none.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from keel.experiments.measure import Take, curves_known, parse_take
from protocol.config import default_config, refuse_unknown
from protocol.options import OptionValue

recipe_folder = Path(__file__).parent / "recipes"
shows = ("table", "curves", "labels")
entry_words = ("of", "take", "at", "tune", "tuned", "paper")
recipe_words = (
    *("title", "paper", "item", "note", "shows", "config", "seeds", "of", "take", "at"),
    *("columns", "rows", "grid", "claims"),
)
runner_keys = {"seed", "resume", "output-dir"}
claim_form = re.compile(r"(?P<left>.+?) (?P<sign>above|below) (?P<right>.+?) in (?P<where>.+)")
everywhere = {"every column": "columns", "every row": "rows"}


class Lines(dict[Any, Any]):
    """A mapping of a YAML file that knows the line of each of its keys."""

    lines: Mapping[Any, int]


class _Loader(yaml.SafeLoader):
    """Keeps line numbers; refuses a key that is there twice, where YAML lets the last one win."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Lines:
    lines: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.value == "<<":
            continue
        key, line = loader.construct_object(key_node), key_node.start_mark.line + 1
        if key in lines:
            raise ValueError(f"line {line}: {key!r} is there twice, first in line {lines[key]}")
        lines[key] = line
    loader.flatten_mapping(node)
    mapping = Lines(loader.construct_mapping(node, deep=True))
    mapping.lines = {key: lines.get(key, node.start_mark.line + 1) for key in mapping}
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


@dataclass(frozen=True)
class Entry:
    """A row or a column: the names of its parts, its line, its config keys, what it reports.

    line: 0 of one that is not in the file. lines: of each of its keys.
    """

    parts: tuple[str, ...]
    line: int
    keys: Mapping[str, OptionValue]
    of: str = ""
    take: Take | None = None
    at: int = 0
    lines: Mapping[str, int] = field(default_factory=dict)
    tune: Mapping[str, Sequence[OptionValue]] = field(default_factory=dict)
    tuned: Sequence[OptionValue | None] = ()
    paper: Sequence[float | None] = ()

    @property
    def name(self) -> str:
        """Its parts, as one name."""
        return ", ".join(self.parts)


@dataclass(frozen=True)
class Claim:
    """left above (or below) right: two rows in a column, or two columns in a row."""

    text: str
    left: str
    right: str
    above: bool
    where: str


@dataclass(frozen=True)
class Cell:
    """One number of the table: what is run for it, and how it is read.

    read_at: the rounds that any cell of the recipe is read at, the last left out; runs evaluate
    them all, so that cells can share runs.
    """

    row: Entry
    column: Entry
    keys: Mapping[str, OptionValue]
    candidates: Sequence[Mapping[str, OptionValue]]
    paper_candidate: Mapping[str, OptionValue] | None
    of: str
    take: Take
    at: int
    read_at: Sequence[int]
    paper: float | None


@dataclass(frozen=True)
class Recipe:
    """A whole, checked recipe; `text` is the file's, `lines` are of its keys, `config`'s too."""

    path: Path
    text: str
    lines: Mapping[str, int]
    title: str
    paper: str
    item: str
    note: str
    shows: str
    seeds: Sequence[int]
    rows: Sequence[Entry]
    columns: Sequence[Entry]
    cells: Sequence[Cell]
    claims: Sequence[Claim]

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.stem

    def cell(self, row: str, column: str) -> Cell:
        """The cell of this row and column."""
        return next(c for c in self.cells if c.row.name == row and c.column.name == column)

    def place(self, cell: Cell, message: str) -> str:
        """The line of the key that a message `KEY = ...` is about; else the row's and column's."""
        key = message.partition(" = ")[0]
        for lines in (cell.row.lines, cell.column.lines, self.lines):
            if key in lines:
                return f"line {lines[key]}"
        found = [str(entry.line) for entry in (cell.row, cell.column) if entry.line]
        return f"lines {' and '.join(found)}" if len(found) > 1 else f"line {found[0]}"


def known_recipes() -> dict[str, Path]:
    """The recipes that come along, by name."""
    return {path.stem: path for path in sorted(recipe_folder.glob("*.yaml"))}


def load_recipe(name: str) -> Recipe:
    """The recipe called `name`, or the file of that path; ValueError, one line, if it is bad."""
    known = known_recipes()
    path = known.get(name) or Path(name).expanduser()
    if name not in known and path.suffix not in (".yaml", ".yml"):
        refuse_unknown("recipe", name, list(known))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe = {name!r}: {path} cannot be read: {error}") from error
    return parse_recipe(text, path)


def parse_recipe(text: str, path: Path) -> Recipe:
    """The recipe in `text`; ValueError, one line, naming file, line and what is allowed."""

    def refuse(line: int, message: str) -> NoReturn:
        raise ValueError(f"{path}, line {line}: {message}")

    try:
        top = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}, line {line}: not YAML: {error.problem}") from error
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from error
    if not isinstance(top, Lines):
        refuse(1, "a recipe is a mapping; see docs/experiments.md")
    return _Parser(path, text, top, refuse).recipe()


class _Parser:
    def __init__(
        self, path: Path, text: str, top: Lines, refuse: Callable[[int, str], NoReturn]
    ) -> None:
        self.path, self.text, self.top, self.refuse = path, text, top, refuse

    def recipe(self) -> Recipe:
        top = self.top
        self.known_words(top, recipe_words)
        shown = self.text_of("shows", "table")
        if shown not in shows:
            self.refuse(top.lines["shows"], f"shows = {shown!r}: it is one of {', '.join(shows)}")
        config = self.mapping("config")
        base = self.keys_of(config, ())
        columns = self.entries("columns") or [Entry(("result",), 0, {})]
        rows = self.product([*self.axes("rows"), *self.grid()])
        if not rows:
            self.refuse(1, "there is nothing to run: rows or grid is needed")
        for row in rows:
            if row.paper and len(row.paper) != len(columns):
                self.refuse(
                    row.line,
                    f"paper of {row.name} has {len(row.paper)} numbers for {len(columns)} columns",
                )
        for entry, what in [*((r, "row") for r in rows), *((c, "column") for c in columns)]:
            same = [e for e in (rows if what == "row" else columns) if e.name == entry.name]
            if len(same) > 1:
                self.refuse(same[1].line, f"two {what}s are called {entry.name!r}")
        self.read_at = sorted({self.round_of(top), *(e.at for e in [*rows, *columns])} - {0})
        cells = [
            self.cell(base, row, column, c, len(columns))
            for row in rows
            for c, column in enumerate(columns)
        ]
        return Recipe(
            path=self.path,
            text=self.text,
            lines={**top.lines, **config.lines},
            title=self.text_of("title", self.path.stem),
            paper=self.text_of("paper", ""),
            item=self.text_of("item", ""),
            note=self.text_of("note", ""),
            shows=shown,
            seeds=self.seeds(),
            rows=rows,
            columns=columns,
            cells=cells,
            claims=list(self.claims(rows, columns)),
        )

    def known_words(self, mapping: Lines, words: Sequence[str]) -> None:
        for key in mapping:
            try:
                refuse_unknown("recipe key", str(key), list(words))
            except ValueError as error:
                self.refuse(mapping.lines[key], str(error))

    def text_of(self, key: str, default: str) -> str:
        value = self.top.get(key, default)
        if not isinstance(value, str):
            self.refuse(self.top.lines[key], f"{key} = {value!r}: it has to be text")
        return value.strip()

    def mapping(self, key: str) -> Lines:
        value = self.top.get(key)
        if value is None:
            value = Lines()
            value.lines = {}
        if not isinstance(value, Lines):
            self.refuse(self.top.lines[key], f"{key} has to be a mapping")
        return value

    def seeds(self) -> Sequence[int]:
        value = self.top.get("seeds", 1)
        seeds = list(range(value)) if type(value) is int else value
        whole = isinstance(seeds, list) and all(type(s) is int and s >= 0 for s in seeds)
        if not whole or not seeds or len(set(seeds)) < len(seeds):
            self.refuse(
                self.top.lines["seeds"],
                f"seeds = {value!r}: it has to be a number >= 1, or a list of different seeds >= 0",
            )
        return list(seeds)

    def keys_of(self, mapping: Lines, words: Sequence[str]) -> dict[str, OptionValue]:
        """The config keys of a mapping that may hold `words` too."""
        keys: dict[str, OptionValue] = {}
        for key, value in mapping.items():
            if key in words:
                continue
            line = mapping.lines[key]
            try:
                refuse_unknown("config key", str(key), [*default_config(), *words])
            except ValueError as error:
                self.refuse(line, str(error))
            if key in runner_keys:
                self.refuse(line, f"{key} is the runner's: seeds and --output say it")
            if not isinstance(value, bool | int | float | str):
                self.refuse(
                    line,
                    f"{key} = {value!r}: a number, true, false or text is needed; a list belongs "
                    "under grid (every value is a row) or tune (the best is reported)",
                )
            keys[key] = value
        return keys

    def axes(self, key: str) -> list[list[Entry]]:
        value = self.top.get(key)
        if value is None:
            return []
        found = []
        for axis in value if isinstance(value, list) else [value]:
            if not isinstance(axis, Lines) or not axis:
                self.refuse(self.top.lines[key], f"{key} has to be a mapping of names, or several")
            found.append([self.entry(name, axis, key) for name in axis])
        return found

    def entries(self, key: str) -> list[Entry]:
        return self.product(self.axes(key))

    def entry(self, name: object, axis: Lines, kind: str) -> Entry:
        line, body = axis.lines[name], axis[name]
        if body is None:
            body = Lines()
            body.lines = {}
        if not isinstance(body, Lines):
            self.refuse(line, f"{name}: a mapping of config keys is needed, not {body!r}")
        words = [word for word in entry_words if kind == "rows" or word != "paper"]
        numbers = body.get("paper", [])
        if not isinstance(numbers, list):
            numbers = [numbers]
        for number in numbers:
            if number is not None and type(number) not in (int, float):
                self.refuse(body.lines["paper"], f"paper = {number!r}: a number or null is needed")
        tune = body.get("tune", {})
        if not isinstance(tune, dict):
            self.refuse(body.lines["tune"], f"tune = {tune!r}: a mapping of config keys is needed")
        for key, values in tune.items():
            if key not in default_config() or not isinstance(values, list) or not values:
                self.refuse(
                    body.lines["tune"], f"tune: {key}: a config key with the list of its values"
                )
        tuned = body.get("tuned", [])
        if "tuned" in body and len(tune) != 1:
            self.refuse(body.lines["tuned"], "tuned: there has to be one key under tune with it")
        return Entry(
            parts=(str(name),),
            line=line,
            keys=self.keys_of(body, words),
            of=self.curve(body),
            take=self.take(body),
            at=self.round_of(body),
            lines={**body.lines, **(tune.lines if isinstance(tune, Lines) else {})},
            tune=tune,
            tuned=tuned if isinstance(tuned, list) else [tuned],
            paper=numbers,
        )

    def curve(self, body: Lines) -> str:
        if "of" in body and body["of"] not in curves_known:
            self.refuse(
                body.lines["of"], f"of = {body['of']!r}: it is one of {', '.join(curves_known)}"
            )
        return str(body.get("of", ""))

    def round_of(self, body: Lines) -> int:
        at = body.get("at", 0)
        if type(at) is not int or at < 0:
            self.refuse(body.lines["at"], f"at = {at!r}: a round is needed")
        return at

    def take(self, body: Lines) -> Take | None:
        if "take" not in body:
            return None
        try:
            return parse_take(body["take"])
        except ValueError as error:
            self.refuse(body.lines["take"], str(error))

    def grid(self) -> list[list[Entry]]:
        """One axis a key of `grid`."""
        axes = []
        grid = self.mapping("grid")
        for key, values in grid.items():
            line = grid.lines[key]
            if not isinstance(values, list) or not values:
                self.refuse(line, f"grid: {key} = {values!r}: a list of values is needed")
            axis = []
            for value in values:
                one = Lines({key: value})
                one.lines = {key: line}
                keys = self.keys_of(one, ())
                axis.append(Entry((f"{key} = {value}",), line, keys, lines=one.lines))
            axes.append(axis)
        return axes

    def product(self, axes: Sequence[Sequence[Entry]]) -> list[Entry]:
        """Every combination of one entry of each axis."""
        if not axes:
            return []
        combined = []
        for entries in itertools.product(*axes):
            whole = entries[0]
            for entry in entries[1:]:
                whole = self.merged(whole, entry)
            combined.append(whole)
        return combined

    def merged(self, a: Entry, b: Entry) -> Entry:
        """Both at once; refused where they disagree on a key."""
        self.agree(a, b)
        return Entry(
            parts=a.parts + b.parts,
            line=b.line,
            keys={**a.keys, **b.keys},
            of=b.of or a.of,
            take=b.take or a.take,
            at=b.at or a.at,
            lines={**a.lines, **b.lines},
            tune={**a.tune, **b.tune},
            tuned=a.tuned or b.tuned,
            paper=a.paper or b.paper,
        )

    def agree(self, a: Entry, b: Entry) -> None:
        for key in [*a.keys, *a.tune]:
            theirs = b.keys.get(key, b.tune.get(key))
            if theirs is not None and theirs != a.keys.get(key, a.tune.get(key)):
                self.refuse(
                    b.line,
                    f"{key} is set by {a.name!r} (line {a.line}) and, to something else, by "
                    f"{b.name!r}: no run can have both",
                )

    def cell(
        self, base: Mapping[str, OptionValue], row: Entry, column: Entry, c: int, num_columns: int
    ) -> Cell:
        self.agree(column, row)
        tune = {**column.tune, **row.tune}
        values = itertools.product(*tune.values())
        candidates = [dict(zip(tune, each, strict=True)) for each in values]
        best = row.tuned[c % len(row.tuned)] if row.tuned else None
        if len(row.tuned) not in (0, 1, num_columns):
            self.refuse(row.line, f"tuned of {row.name}: one value, or one a column")
        paper_candidate = {next(iter(tune)): best} if best is not None else None
        if paper_candidate and paper_candidate not in candidates:
            candidates.append(paper_candidate)  # FedIntR, Table III: a best outside its grid
        take = row.take or column.take or self.take(self.top) or parse_take("final")
        return Cell(
            row=row,
            column=column,
            keys={**base, **column.keys, **row.keys},
            candidates=candidates,
            paper_candidate=paper_candidate,
            of=row.of or column.of or self.curve(self.top) or "global.accuracy",
            take=take,
            at=row.at or column.at or self.round_of(self.top),
            read_at=self.read_at,
            paper=row.paper[c] if row.paper else None,
        )

    def claims(self, rows: Sequence[Entry], columns: Sequence[Entry]) -> Iterator[Claim]:
        names = {"rows": [r.name for r in rows], "columns": [c.name for c in columns]}
        claimed = self.top.get("claims") or []
        for text in claimed if isinstance(claimed, list) else [claimed]:
            found = claim_form.fullmatch(str(text))
            line = self.line_of(str(text))
            if not found:
                self.refuse(line, f"{text!r}: a claim is 'ROW above ROW in COLUMN' (or below)")
            left, right, where = found["left"], found["right"], found["where"]
            compared = "rows" if left in names["rows"] else "columns"
            across = "columns" if compared == "rows" else "rows"
            for name, kind in ((left, compared), (right, compared), (where, across)):
                if name not in names[kind] and everywhere.get(name) != kind:
                    self.refuse(
                        line,
                        f"{text!r}: {name!r} is none of the {kind}: {', '.join(names[kind])}",
                    )
            for place in names[across] if where in everywhere else [where]:
                short = f"{left} {found['sign']} {right} in {place}"
                yield Claim(short, left, right, found["sign"] == "above", place)

    def line_of(self, text: str) -> int:
        lines = self.text.splitlines()
        return next((n for n, line in enumerate(lines, 1) if text in line), 1)
