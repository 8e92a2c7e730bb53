"""Tables as text, for Markdown, and a console for those of a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 240  # columns, where the output is no terminal


def markdown(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; vertical bars in cells are escaped, line breaks become spaces."""
    head = list(header)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def terminal_console() -> Console:
    """A console as wide as the terminal; wide where the output goes to a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_table(table: Table) -> None:
    """Print the table; to a file or a pipe without the blanks that fill its lines."""
    console = terminal_console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
