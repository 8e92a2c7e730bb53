"""`keel doctor`: check this machine; one line per finding, with the remedy."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import click
import typer

from keel.deployment.doctor import Finding
from protocol.text import num_of

app = typer.Typer(add_completion=False)

Credentials = Annotated[
    Path | None, typer.Option(help="This machine's credentials directory.", show_default=False)
]
Fleet = Annotated[str, typer.Option(help="HOST:PORT of the SuperLink that clients connect to.")]
Inside = Annotated[
    bool, typer.Option("--inside", help="Check only the environment that this command runs in.")
]
Code = Annotated[str, typer.Option(hidden=True)]  # digest that Keel's client code must have


@app.callback(invoke_without_command=True)
def doctor(ctx: typer.Context) -> None:
    """Check this machine for simulation, or a `client` or `server` of a deployment.

    Exits with 1 if it finds a problem. Changes nothing, except that `client` decodes the data into
    Keel's cache, as a run would.
    """
    if ctx.invoked_subcommand is None:
        from keel.deployment.doctor_runtime import check_simulation

        report(check_simulation())


@app.command()
def client(
    credentials: Credentials = None,
    fleet: Fleet = "",
    source: Annotated[
        str, typer.Option(help="folder:PATH or npz:PATH. Default: $KEEL_SOURCE.")
    ] = "",
    classes: Annotated[str, typer.Option(help="The run's classes, separated by commas.")] = "",
    model: Annotated[str, typer.Option(help="The run's model, for the image size.")] = "",
    device: Annotated[str, typer.Option(help="Default: $KEEL_DEVICE, else auto.")] = "",
    worker: Annotated[
        Path | None, typer.Option(help="The worker's socket. Default: $KEEL_WORKER.")
    ] = None,
    inside: Inside = False,
    code: Code = "",
) -> None:
    """Check a client's machine: files, port, key and clock, then the environment of its code.

    The code runs in Keel's containers if there are any, else on this machine. --source and --worker
    apply only to a machine without containers: containers define their own.
    """
    from client_app.worker_client import default_socket
    from keel.deployment.doctor import check_client, check_containers
    from keel.deployment.doctor_runtime import check_runtime
    from protocol.code import code_digest

    def findings() -> Iterable[Finding]:
        inner = check_runtime(
            "client",
            code,
            device or os.environ.get("KEEL_DEVICE") or "auto",
            source or os.environ.get("KEEL_SOURCE", ""),
            [name for name in classes.split(",") if name],
            model,
            worker or default_socket(),
            os.environ.get("KEEL_CLASSES", ""),
        )
        if inside:
            yield from inner
            return
        yield from check_client(*required(credentials, fleet))
        options = ["--code", code_digest()]
        for name, value in (("classes", classes), ("model", model), ("device", device)):
            options += [f"--{name}", value] if value else []
        yield from check_containers("client", options, lambda: inner)

    report(findings())


@app.command()
def server(
    credentials: Credentials = None,
    fleet: Fleet = "",
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the SuperLink's HTTP API.")] = "",
    inside: Inside = False,
    code: Code = "",
) -> None:
    """Check a server's machine: files, port, clients, then the environment of its code."""
    from keel.deployment.doctor import check_containers, check_server
    from keel.deployment.doctor_runtime import check_runtime
    from protocol.code import code_digest

    def findings() -> Iterable[Finding]:
        inner = check_runtime("server", code)
        if inside:
            yield from inner
            return
        yield from check_server(*required(credentials, fleet), superlink)
        yield from check_containers("server", ["--code", code_digest()], lambda: inner)

    report(findings())


def required(credentials: Path | None, fleet: str) -> tuple[Path, str]:
    """Both options; UsageError if one is missing."""
    if credentials is None or not fleet:
        raise click.UsageError(
            "--credentials and --fleet are required; --inside checks the code's environment alone"
        )
    return credentials, fleet


def report(findings: Iterable[Finding]) -> None:
    """Print the findings as they arrive; exit with status 1 if any is a problem."""
    num_problems = 0
    for finding in findings:
        print(finding, flush=True)
        num_problems += finding.is_problem
    if num_problems:
        print(num_of("problem", num_problems))
        raise typer.Exit(1)
    print("no problems found")
