"""`keel watch`: one run, live in the terminal."""

from typing import Annotated

import typer


def watch(
    run: Annotated[str, typer.Argument(show_default=False)] = "",
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is and exit.")] = False,
) -> None:
    """Follow a run: rounds, curves as sparklines, clients at work; without RUN, the newest.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one. It ends with the run;
    Ctrl-C ends only the view. Where the output is no terminal, the run is shown once.
    """
    from keel.runs import find_run
    from keel.views.terminal import watch_run

    watch_run(find_run(run).directory, once)
