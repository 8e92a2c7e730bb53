"""`keel status`: one run, once or while it trains."""

import json
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keel.cli.arguments import JsonOption, OptionalRun
from keel.cli.list_runs import percent, row_of
from keel.progress import SHORT, round_line
from keel.saved_runs import COLOURS, FINISHED, RUNNING, SavedRun, find_run, method_text
from keel.tables import terminal_console
from protocol.text import printable
from server_app.history import CURVES, curve, duration, privacy_text, score_curves, value_in
from server_app.participation import participation

RECENT_ROUNDS = 10  # whose left out clients are named
MAX_CLIENTS = 20  # of more, only those with a note have a line
MEASURED = ("seconds", "loss", "norm", "cosine")  # means over a client's last updates
SHOWN_ROUNDS = 15  # rows of the live table
POLL_S = 0.5


def status(
    run: OptionalRun = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show each round until the run ends.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the state of a run; without RUN, of the most recently changed one.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one. With --follow, a terminal
    shows a live table of the last rounds, any other output a line a round. Ctrl-C ends only the
    view.
    """
    if follow and as_json:
        raise ValueError("--follow and --json exclude each other: leave one out")
    saved = find_run(run)
    if follow:
        follow_run(saved.directory, terminal_console())
    elif as_json:
        print(json.dumps(status_row(saved), indent=2))
    else:
        print("\n".join(map(printable, status_lines(saved))))


def status_row(run: SavedRun) -> dict[str, Any]:
    """`row_of` the run, its seconds, the privacy spent, and whom the recent rounds left out.

    ValueError, one line, if its files are damaged.
    """
    recent = {line["round"]: line["left_out"] for line in recent_clients(run)}
    seconds = round(sum(sum(line["seconds"].values()) for line in run.history), 2)
    damaged, privacy = run.damaged_checkpoints(), run.summary.get("privacy")
    found = {"seconds": seconds, "privacy": privacy, "left_out": recent}
    return row_of(run) | found | {"damaged_checkpoints": damaged}


def recent_clients(run: SavedRun) -> list[dict[str, Any]]:
    """What the last rounds say of single clients."""
    return list(deque(run.clients(), maxlen=RECENT_ROUNDS))


def status_lines(run: SavedRun) -> list[str]:
    """The status of a run in a few lines. ValueError, one line, if its files are damaged."""
    lines = head_lines(run)
    for key, name, description in CURVES:
        points = curve(run.history, key, name)
        if points:
            shown = ", ".join(
                f"round {number}: {100 * value:.2f} %" for number, value in points[-3:]
            )
            lines.append(f"accuracy  {description}: {shown}")
    for key, name, description in score_curves(run.history):
        points = curve(run.history, key, name)[-3:]
        shown = ", ".join(f"round {number}: {value:.4f}" for number, value in points)
        lines.append(f"score     {description}: {shown}")
    if privacy := run.summary.get("privacy"):
        lines.append(f"privacy   {privacy_text(privacy)}")
    lines += client_lines(run)
    lines += [f"warning   {text}" for text in run.summary.get("warnings", ())]
    recent = recent_clients(run)
    for line in recent:
        for client, reason in line["left_out"].items():
            lines.append(f"left out  round {line['round']}: {client}: {reason}")
    if recent and recent[-1]["backed_off"]:
        lines.append(f"backoff   {', '.join(recent[-1]['backed_off'])}")
    for name in run.damaged_checkpoints():
        lines.append(f"damaged   checkpoints/{name}: a resume skips it")
    if run.state not in (RUNNING, FINISHED):
        lines.append(f"resume    {run.resume_command}")
    return lines


def client_lines(run: SavedRun) -> list[str]:
    """A line for each client with its last updates, if there are few, and for each odd one."""
    rows = participation(run.clients()).rows()
    shown = rows if len(rows) <= MAX_CLIENTS else [row for row in rows if row["notes"]]
    lines = []
    for row in shown:
        values = [f"{row['rounds']} of {run.last_round} rounds"]
        values += [f"{key} {row[key]:.3g}" for key in MEASURED if row[key] is not None]
        lines.append(f"client    {row['client']}: {', '.join(values + row['notes'])}")
    return lines


def head_lines(run: SavedRun) -> list[str]:
    """Directory, config, state and progress. ValueError, one line, if its files are damaged."""
    config, done = run.config, run.last_round
    seconds = [sum(line["seconds"].values()) for line in run.history]
    progress = f"{done} of {config['num-rounds']}"
    if seconds:
        progress += f", {duration(sum(seconds))}"
        if run.state == RUNNING:
            left = config["num-rounds"] - done
            progress += f" so far, {duration(left * sum(seconds) / len(seconds))} left"
    return [
        f"run       {run.directory}",
        f"config    {method_text(config)}, {config['source']}, {config['model']}",
        f"state     {run.state}",
        f"round     {progress}",
    ]


def follow_run(directory: Path, console: Console) -> None:
    """Show the run until it ends: a live table on a terminal, else a line a round."""
    num_shown, is_over = 0, False
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while not is_over:
            run = SavedRun(directory)
            is_over = run.state != RUNNING
            if console.is_terminal:
                live.update(live_view(run), refresh=True)
            else:
                for line in run.history[num_shown:]:
                    console.print(round_line(line, run.config["num-rounds"], ""), soft_wrap=True)
            num_shown = run.last_round
            if not is_over:
                time.sleep(POLL_S)
    if not console.is_terminal:
        console.print(printable(run.state), markup=False)


def live_view(run: SavedRun) -> Group:
    """The run as it is now. ValueError, one line, if its files are damaged."""
    lines = run.history[-SHOWN_ROUNDS:]
    columns = {"round": [str(line["round"]) for line in lines]}
    for key, name, _ in CURVES:
        if name != "worst_decile":
            columns[SHORT[key]] = [percent(line.get(key, {}).get(name)) for line in lines]
    for key, name, _ in score_curves(lines):
        values = [value_in(line, key, name) for line in lines]
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        columns[f"{name} {SHORT[key]}" if key != "global" else name] = cells
    for term in dict.fromkeys(name for line in lines for name in line["losses"]):
        losses = [line["losses"].get(term) for line in lines]
        columns[f"loss {term}"] = ["" if loss is None else f"{loss:.4f}" for loss in losses]
    columns["seconds"] = [f"{sum(line['seconds'].values()):.1f}" for line in lines]
    columns["left out"] = [str(line["num_left_out"] or "") for line in lines]
    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        table.add_column(Text(printable(name)), justify="right")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    style = COLOURS.get(run.state, "red")
    head = [
        Text(printable(line), style if line.startswith("state") else "") for line in head_lines(run)
    ]
    return Group(*head, table)
