"""The command line.

python -m keel.experiments list
python -m keel.experiments run fedintr-table-1 --scale hour --seeds 3
python -m keel.experiments report
python -m keel.experiments verify FOLDER
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keel.experiments.plan import Options, chosen
from keel.experiments.recipe import known_recipes, load_recipe, runner_keys
from keel.experiments.report import write_report
from keel.experiments.runner import run_recipe
from keel.experiments.scale import SCALES
from keel.experiments.verify import verify
from protocol.config import keel_home
from server_app.inline import parse_overrides


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    top = argparse.ArgumentParser(
        prog="python -m keel.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the recipes that come along")
    run = commands.add_parser("run", help="run a recipe; what is finished is skipped")
    run.add_argument("recipe", help="its name, or the path of a YAML file")
    run.add_argument("--scale", choices=list(SCALES), default="paper")
    run.add_argument("--only", action="append", default=[], metavar="NAMES", help="a;b")
    run.add_argument("--seeds", type=int, default=0, help="so many; 0: as the recipe says")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    run.add_argument("--grid", choices=["full", "paper"], help="all values under tune, or the best")
    run.add_argument("--workers", type=int, default=0, help="runs at a time; 0: one a GPU or core")
    report = commands.add_parser("report", help="report.html and report.md of all that was run")
    check = commands.add_parser("verify", help="replay the first rounds of finished runs")
    check.add_argument("folder", type=Path, help="a run's folder, or one that holds several")
    check.add_argument("--rounds", type=int, default=2)
    for command in (run, report):
        command.add_argument("--output", type=Path, default=keel_home() / "experiments")
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all went well, 1 if not, 130 after Ctrl-C."""
    arguments = parser().parse_args(words)
    console = Console(highlight=False, soft_wrap=True)
    try:
        if arguments.command == "list":
            list_recipes(console)
        elif arguments.command == "run":
            return run(arguments, console)
        elif arguments.command == "report":
            for path in write_report(arguments.output.expanduser().absolute()):
                console.print(str(path))
        else:
            return verify(arguments.folder, arguments.rounds, console)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def list_recipes(console: Console) -> None:
    """Name, paper, item and title of every recipe."""
    table = Table("recipe", "paper", "item", "title", box=None)
    for name in known_recipes():
        recipe = load_recipe(name)
        table.add_row(name, recipe.paper, recipe.item, recipe.title)
    console.print(table)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run a recipe; 1 if a run failed."""
    recipe = load_recipe(arguments.recipe)
    for name in ("seeds", "workers"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"--{name} {getattr(arguments, name)}: it has to be a number >= 0")
    changes = parse_overrides(arguments.changes)
    for key in sorted(changes.keys() & runner_keys):
        raise ValueError(f"--set {key}: it is the runner's: --seeds and --output say it")
    options = Options(
        scale=arguments.scale,
        changes=changes,
        seeds=list(range(arguments.seeds)) or recipe.seeds,
        full_grid=(arguments.grid or ("full" if arguments.scale == "paper" else "paper")) == "full",
    )
    names = [name.strip() for words in arguments.only for name in words.split(";")]
    cells = chosen(recipe, names)
    output = arguments.output.expanduser().absolute()
    signal.signal(signal.SIGTERM, interrupted)
    try:
        failed = run_recipe(recipe, cells, options, output, arguments.workers, console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last whole rounds")
        return 130
    for name, reason in failed.items():
        console.print(f"[red]failed[/] {name}: {escape(reason)}")
    if recipe.shows == "labels":
        console.print("nothing to train: the report draws the splits")
    console.print(f"results: {output}; python -m keel.experiments report --output {output}")
    return 1 if failed else 0


def interrupted(*_: object) -> NoReturn:
    """End as after Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
