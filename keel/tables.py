"""Tables and facts for people: in a terminal, in Markdown, or as JSON."""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.options import typed
from protocol.text import printable

PIPE_WIDTH = 240  # columns, where the output is no terminal
Row = dict[str, Any]


def markdown(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(header)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(markdown_cell, line))} |" for line in lines)


def markdown_cell(value: object) -> str:
    """A value in a Markdown table: vertical bars are escaped, line breaks become spaces."""
    return " ".join(str(value).splitlines()).replace("|", "\\|")


def terminal_console() -> Console:
    """A console as wide as the terminal; wide where the output goes to a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_table(
    columns: Mapping[str, Sequence[str | Text]], right: Container[str] = (), title: str = ""
) -> None:
    """Print columns of cells; to a pipe without the blanks that fill its lines.

    The first column, whose cells are names to copy, is never broken. right: columns of numbers.
    """
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        is_first = name == next(iter(columns))
        justify: Any = "right" if name in right else "left"
        table.add_column(
            name, justify=justify, no_wrap=is_first or name in right, overflow="fold",
            min_width=max(map(len, columns[name]), default=0) if is_first else None,
        )  # fmt: skip
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(c if isinstance(c, Text) else Text(printable(c)) for c in row))
    console = terminal_console()
    if console.is_terminal:
        console.print(table, crop=False)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def show(
    rows: Sequence[Row],
    as_json: bool,
    title: str,
    caption: str = "",
    hidden: Container[str] = (),
) -> None:
    """Rows with equal keys as JSON, or as a table without the hidden columns."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    shown = [name for name in rows[0] if name not in hidden]
    right = {n for n in shown if all(isinstance(row[n], int | float | None) for row in rows)}
    print_table({name: [cell(name, row[name]) for row in rows] for name in shown}, right, title)
    if caption:
        terminal_console().print(caption, highlight=False)


def show_one(facts: Row, tables: Mapping[str, Sequence[Row]], as_json: bool) -> None:
    """Facts, one per line, then tables; or everything as one JSON object."""
    if as_json:
        print(json.dumps(facts | dict(tables), indent=2))
        return
    console = terminal_console()
    for key, value in facts.items():
        console.print(Text.assemble((f"{key}: ", "bold"), text_of(value)), soft_wrap=True)
    for title, rows in tables.items():
        if rows:
            show(rows, False, title)


def cell(column: str, value: Any) -> str:
    """A cell of a table; values of config keys are shown as they are typed."""
    return typed(value) if column in ("default", "value") else text_of(value)


def text_of(value: Any) -> str:
    """A text for people: yes and no, thousands separated, lists with commas, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {text_of(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        separator = " x " if all(isinstance(v, int) for v in value) else ", "
        return separator.join(text_of(v) for v in value)
    return str(value)
