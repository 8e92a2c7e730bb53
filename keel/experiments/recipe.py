"""A recipe: one table or figure, expanded from its YAML file into the cells of a table.

    title, paper, item   what it is; `notes` are shown below the table, `remark` beside
                         the verdicts
    shows                table, curves (drawn above the numbers) or labels (how a partition
                         distributes classes over clients: nothing is run)
    config               config keys of every run
    seeds                a number, or a list of seeds
    of                   global.accuracy (the default; the test set), local_global.mean or
                         personal.mean (of the clients' test parts); or a score of `metrics`, such
                         as global.macro-f1
    take, at             how the curve becomes one number, and at which round: final (the default),
                         best, 'median N', 'mean N', 'ema DECAY', 'seconds to PERCENT' or 'seconds
                         a round'
    columns, rows        mappings of name to config keys; a list of mappings is their product
    grid                 config key to list of values: each combination is a row
    claims               "FedIntR above FedAvg in CIFAR-10" (or below, or "within 1 of", which is
                         points or seconds), judged in the report; with " from round 40" if the
                         paper makes it before the round that it reads
    headlines            the claims, without their rounds, that the report and the page of the
                         papers' claims show first

A row or column may also hold `of`, `take`, `at`; `tune` (config key to the list of values to try,
of which the first seed selects the best), `tuned` (the best in the paper: one, or one a column;
the others are then not tried) and, in rows, `paper`: the paper's numbers, one a column, null for
none.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keel.experiments.measure import Take
from keel.experiments.recipe_file import Entry, LineError, Lines, RecipeFile, read_recipe_file
from protocol.config import refuse_unknown
from protocol.options import OptionValue

RECIPES = Path(__file__).parent / "recipes"
CLAIM = (
    r"(?P<left>NAME) (?P<sign>above|below|within (?P<margin>\d+(\.\d+)?) of) (?P<right>NAME)"
    r" in (?P<place>PLACE)"
    r"( from round (?P<from_round>[1-9]\d*))?"
)
EVERYWHERE = ("every column", "every row")  # places of rows, of columns
Keys = Mapping[str, OptionValue]


@dataclass(frozen=True)
class Claim:
    """`left` above (or below) `right`: two rows in a column, or two columns in a row.

    margin: if not 0, the claim is that they differ by less than it, and `is_above` is ignored.
    from_round: first round for which the paper makes the claim; 0: the round it reports.
    line: of the file.
    """

    text: str
    left: str
    right: str
    is_above: bool
    place: str
    from_round: int = 0
    margin: float = 0.0
    line: int = 0
    is_headline: bool = False


@dataclass(frozen=True)
class Cell:
    """One number of the table: the config of its runs and how the number is read.

    candidates: the values to try of what is tuned; one, empty, if nothing is.
    is_timed: a cell of the recipe is read in seconds. only_last: all cells read the last accuracy,
    and no curve is shown.
    """

    row: Entry
    column: Entry
    keys: Keys
    candidates: Sequence[Keys]
    of: str
    take: Take
    at: int
    paper: float | None
    is_timed: bool
    only_last: bool

    @property
    def name(self) -> tuple[str, str]:
        """(row, column)."""
        return self.row.name, self.column.name


@dataclass(frozen=True)
class Recipe:
    """A validated recipe. `text`: the file's content; `lines`: of its keys and those of config."""

    path: Path
    text: str
    lines: Mapping[str, int]
    title: str
    paper: str
    item: str
    notes: Sequence[str]
    remark: str
    shows: str
    seeds: Sequence[int]
    rows: Sequence[Entry]
    columns: Sequence[Entry]
    cells: Sequence[Cell]
    claims: Sequence[Claim]

    @property
    def name(self) -> str:
        """The file's name without suffix."""
        return self.path.stem

    def cell(self, row: str, column: str) -> Cell:
        """The cell of this row and column."""
        return next(cell for cell in self.cells if cell.name == (row, column))

    def sides_of(self, claim: Claim) -> list[tuple[str, str]]:
        """(row, column) of the claim's left and right side."""
        is_rows = any(row.name == claim.left for row in self.rows)
        sides = (claim.left, claim.right)
        return [(name, claim.place) if is_rows else (claim.place, name) for name in sides]

    def lines_of(self, cell: Cell, key: str) -> str:
        """`line N` of this key; where the recipe does not set it, the cell's row and column."""
        for lines in (cell.row.lines, cell.column.lines, self.lines):
            if key in lines:
                return f"line {lines[key]}"
        found = [str(entry.line) for entry in (cell.row, cell.column) if entry.line]
        return f"lines {' and '.join(found)}" if len(found) > 1 else f"line {found[0]}"

    def narrowed(self, names: Sequence[Sequence[str]]) -> "Recipe":
        """The recipe with only these cells, given as (row, column), and claims on them."""
        wanted = {(row, column) for row, column in names}
        rows, columns = ({pair[axis] for pair in wanted} for axis in (0, 1))
        return replace(
            self,
            rows=[row for row in self.rows if row.name in rows],
            columns=[column for column in self.columns if column.name in columns],
            cells=[cell for cell in self.cells if cell.name in wanted],
            claims=[claim for claim in self.claims if wanted.issuperset(self.sides_of(claim))],
        )


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with Keel, by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def load_recipe(name: str) -> Recipe:
    """The shipped recipe called `name`, or the file at that path. ValueError, one line."""
    shipped = shipped_recipes()
    path = shipped.get(name) or Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        refuse_unknown("recipe", name, list(shipped))
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path}: {error}") from error
    return parse_recipe(text, path)


def parse_recipe(text: str, path: Path) -> Recipe:
    """The recipe in `text`. ValueError, one line: file, line, key, value, what is allowed."""
    try:
        file, top = read_recipe_file(text)
        return _recipe(file, top, text, path)
    except LineError as error:
        raise ValueError(f"{path}, {error}") from error


def _recipe(file: RecipeFile, top: Lines, text: str, path: Path) -> Recipe:
    columns = _product(_axes(file.columns, top, "columns")) or [Entry(parts=("result",))]
    rows = _product([*_axes(file.rows, top, "rows"), *_grid_axes(file, top)])
    if not rows:
        raise LineError(1, "there is nothing to run: expected rows or grid")
    _check_entries(rows, columns)
    recipe = Recipe(
        path=path,
        text=text,
        lines={**top.lines, **(top["config"].lines if top.get("config") else {})},
        title=file.title or path.stem,
        paper=file.paper,
        item=file.item,
        notes=file.notes,
        remark=file.remark,
        shows=file.shows,
        seeds=file.seeds,
        rows=rows,
        columns=columns,
        cells=list(_cells(file, rows, columns)),
        claims=list(_claims(file, rows, columns, text)),
    )
    for claim in recipe.claims:
        left, right = (recipe.cell(*side).take for side in recipe.sides_of(claim))
        if left != right and (left.is_time or right.is_time):
            both = (take.of("accuracy").removesuffix(", in %") for take in (left, right))
            raise LineError(claim.line, f"{claim.text!r} would compare {' and '.join(both)}")
    return recipe


def _check_entries(rows: Sequence[Entry], columns: Sequence[Entry]) -> None:
    """LineError for two of one name, and for numbers that do not fit the columns."""
    for kind, entries in (("row", rows), ("column", columns)):
        names = set()
        for entry in entries:
            if entry.name in names:
                raise LineError(entry.line, f"two {kind}s are called {entry.name!r}: rename one")
            names.add(entry.name)
    for column in columns:
        if column.paper:
            raise LineError(column.lines["paper"], f"paper of {column.name}: expected in rows only")
    for row in rows:
        if row.paper and len(row.paper) != len(columns):
            found = f"{len(row.paper)} numbers for {len(columns)} columns"
            raise LineError(
                row.line, f"paper of {row.name} has {found}: expected one a column, null for none"
            )
        if len(row.tuned) not in (0, 1, len(columns)):
            raise LineError(row.line, f"tuned of {row.name}: expected one value, or one a column")


def _axes(files: Sequence[Mapping[str, Entry]], top: Lines, kind: str) -> Iterator[list[Entry]]:
    """The entries of each axis of `columns` or `rows`."""
    raw = top.get(kind)
    for axis, lines in zip(files, raw if isinstance(raw, list) else [raw], strict=False):
        if not axis:
            raise LineError(top.lines[kind], f"{kind}: expected a mapping of names, or several")
        yield [_entry(name, file, lines.lines[name], lines[name]) for name, file in axis.items()]


def _entry(name: str, entry: Entry, line: int, body: Lines | None) -> Entry:
    lines = {} if body is None else dict(body.lines)
    if body is not None and entry.tune:
        lines |= body["tune"].lines
    for key in entry.tune.keys() & entry.keys.keys():
        raise LineError(lines[key], f"{key} of {name}: it is also under tune, which sets it")
    if entry.tuned and len(entry.tune) != 1:
        raise LineError(lines["tuned"], "tuned: expected exactly one key under tune")
    return entry.model_copy(update={"parts": (name,), "line": line, "lines": lines})


def _grid_axes(file: RecipeFile, top: Lines) -> Iterator[list[Entry]]:
    """One axis for each key of `grid`."""
    for key, values in file.grid.items():
        line = top["grid"].lines[key]
        yield [
            Entry.model_construct(
                parts=(f"{key} = {value}",), line=line, keys={key: value}, lines={key: line}
            )
            for value in values
        ]


def _product(axes: Iterator[list[Entry]] | Sequence[list[Entry]]) -> list[Entry]:
    """Each combination of one entry of each axis."""
    first, *others = list(axes) or [[]]
    for axis in others:
        first = [_merged(a, b) for a in first for b in axis]
    return first


def _merged(a: Entry, b: Entry) -> Entry:
    """Both at once. LineError if they set a key to different values."""
    ours, theirs = {**a.tune, **a.keys}, {**b.tune, **b.keys}
    for key in sorted(ours.keys() & theirs.keys()):
        if ours[key] != theirs[key]:
            raise LineError(
                b.line,
                f"{key} is set by {a.name!r} (line {a.line}) and, to another value, by {b.name!r}: "
                "a run has only one",
            )
    both = {name: {**getattr(a, name), **getattr(b, name)} for name in ("keys", "lines", "tune")}
    either = {n: getattr(b, n) or getattr(a, n) for n in ("of", "take", "at", "tuned", "paper")}
    return b.model_copy(update={"parts": a.parts + b.parts, **both, **either})


def _cells(file: RecipeFile, rows: Sequence[Entry], columns: Sequence[Entry]) -> Iterator[Cell]:
    is_read_earlier = file.at or any(entry.at for entry in [*rows, *columns])
    takes = {e.take or file.take or Take("final") for e in [*rows, *columns]}
    is_read_earlier = is_read_earlier or any(take.reads_earlier for take in takes)
    for row, (number, column) in itertools.product(rows, enumerate(columns)):
        both = _merged(column, row)
        best = row.tuned[number % len(row.tuned)] if row.tuned else None
        tried = both.tune.values() if best is None else [[best]]
        candidates = [dict(zip(both.tune, each, strict=True)) for each in itertools.product(*tried)]
        yield Cell(
            row=row,
            column=column,
            keys={**file.config, **both.keys},
            candidates=candidates,
            of=both.of or file.of or "global.accuracy",
            take=both.take or file.take or Take("final"),
            at=both.at or file.at,
            paper=row.paper[number] if row.paper else None,
            is_timed=any(take.is_time for take in takes),
            only_last=file.shows == "table" and not is_read_earlier,
        )


def _claims(
    file: RecipeFile, rows: Sequence[Entry], columns: Sequence[Entry], text: str
) -> Iterator[Claim]:
    """All claims: several of a line that says `every`."""
    found = [c for each in file.claims for c in _claims_of_line(each, rows, columns, text)]
    for headline in file.headlines:
        if headline not in {claim.text for claim in found}:
            raise LineError(_line_of(headline, text), f"{headline!r}: expected one of the claims")
    for claim in found:
        yield replace(claim, is_headline=claim.text in file.headlines)


def _line_of(claim: str, text: str) -> int:
    return next((n for n, each in enumerate(text.splitlines(), 1) if claim in each), 1)


def _claims_of_line(
    claim: str, rows: Sequence[Entry], columns: Sequence[Entry], text: str
) -> Iterator[Claim]:
    line, names = _line_of(claim, text), ([r.name for r in rows], [c.name for c in columns])
    for (compared, across), every in zip((names, names[::-1]), EVERYWHERE, strict=True):
        # names may contain the words of a claim; the longest name that fits is meant
        one, place = (
            "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
            for known in (compared, [*across, every])
        )
        found = re.fullmatch(CLAIM.replace("NAME", one).replace("PLACE", place), claim)
        if found:
            break
    else:
        raise LineError(
            line,
            f"{claim!r}: expected 'ROW above ROW in COLUMN' or 'COLUMN above COLUMN in ROW' (or "
            f"below, or within 1 of); rows: {', '.join(names[0])}; columns: {', '.join(names[1])}",
        )
    left, right, margin = found["left"], found["right"], float(found["margin"] or 0)
    if left == right or (found["margin"] and not margin):
        raise LineError(line, f"{claim!r}: expected two different names, and a margin above 0")
    for each in across if found["place"] == every else [found["place"]]:
        short = f"{left} {found['sign']} {right} in {each}"
        is_above, from_round = found["sign"] == "above", int(found["from_round"] or 0)
        yield Claim(short, left, right, is_above, each, from_round, margin, line)
