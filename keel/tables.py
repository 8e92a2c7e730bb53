"""Tables as text, for Markdown, and a console for those of a terminal."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 240  # columns, where the output is no terminal
MAX_SHORT = 16  # letters of a cell that is not broken
TEXT_WIDTH = 18  # of a column with longer cells at least


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


def is_too_wide(table: Table) -> bool:
    """Whether the terminal is too narrow to show the table without cutting words."""
    console = terminal_console()
    wide = console.options.update(max_width=10_000)
    return console.measure(table, options=wide).minimum > console.width


def add_column(
    table: Table,
    name: str,
    cells: Iterable[str],
    justify: Literal["left", "right"] = "left",
    is_whole: bool = False,
) -> None:
    """Add a column for these cells. Long ones that are neither numbers nor whole are broken.

    They are broken between words only, if these have at most 40 letters.
    """
    texts = [name, *cells]
    if is_whole or justify == "right" or max(map(len, texts)) <= MAX_SHORT:
        table.add_column(name, justify=justify, no_wrap=True, min_width=max(map(len, texts)))
        return
    longest = max(len(word) for text in texts for word in text.split() or [""])
    table.add_column(name, min_width=min(40, max(longest, TEXT_WIDTH)), overflow="fold")


def print_table(
    build: Callable[[Sequence[str]], Table], columns: Iterable[str], drop_first: Sequence[str] = ()
) -> None:
    """Print the table of these columns; to a pipe without the blanks that fill its lines.

    drop_first: columns that are left out, in this order, where the terminal is too narrow. Then the
    others are, from the right, but never the first: its cells are names to copy.
    """
    console, shown, left_out = terminal_console(), list(columns), []
    for name in (*drop_first, *(name for name in shown[:0:-1] if name not in drop_first)):
        if is_too_wide(build(shown)):
            shown.remove(name)
            left_out.append(name)
    table = build(shown)
    if console.is_terminal:
        console.print(table, width=PIPE_WIDTH if is_too_wide(table) else None, crop=False)
    else:
        with console.capture() as captured:
            console.print(table)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if left_out:
        console.print(f"Hidden at this width: {', '.join(left_out)}", style="dim")
