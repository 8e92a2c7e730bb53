"""`keel deploy`: credentials, registration of clients, and a whole deployment on this machine."""

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Deploy a federation on several machines, or on one.",
)


@app.command()
def credentials(
    name: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address of the server; repeat it, or use commas."),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(help="For a trial: name of a client; repeat it, or use commas."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--credentials", help="Directory to write them to.")
    ] = Path("credentials"),
    days: Annotated[
        int,
        typer.Option(min=1, max=36500, help="Days for which the server's certificate is valid."),
    ] = 825,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the server's certificate; keep all keys.")
    ] = False,
) -> None:
    """Make a CA and the server's certificate; for a trial, also keys of clients.

    In a federation each site makes its own key, with `keel deploy key`. Existing files are never
    overwritten. With --renew, the server gets a new certificate from the same CA for the same key.

    Example: keel deploy credentials --name fl.example.org
    """
    from keel.deployment.credentials import make_credentials
    from keel.deployment.credentials import renew as renew_certificate

    if renew:
        if client:
            raise ValueError("--renew with --client: make keys of clients without --renew")
        print("\n".join(renew_certificate(folder, split(name), days)))
        return
    print("\n".join(make_credentials(folder, split(name), split(client), days)))


@app.command()
def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The site's name as a client.")],
    folder: Annotated[
        Path, typer.Option("--credentials", help="Directory to write its own directory to.")
    ] = Path("credentials"),
) -> None:
    """At a site: make its key, which never leaves it, and the request to be registered.

    Send the request, NAME.pub, to the server's operator, and read the fingerprint out by telephone.

    Example: keel deploy key site-a
    """
    from keel.deployment.keys import make_key

    print("\n".join(make_key(folder / name, name)))


@app.command()
def register(
    requests: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REQUEST ...]", help="NAME.pub of sites; -: standard input."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--credentials", help="The server's credentials directory.")
    ] = Path("credentials/server"),
    superlink: Annotated[str, typer.Option(help="HOST:PORT of its HTTP API.")] = "localhost:8000",
    wait: Annotated[float, typer.Option(help="Seconds to wait for the SuperLink to start.")] = 0.0,
) -> None:
    """At the server: register sites from their requests; list the clients that are registered.

    Compare each fingerprint with its site by telephone. Clients' names, keys and node ids are
    written to $KEEL_CLIENT_REGISTRY, or to clients.json in the credentials directory; the ServerApp
    reads the clients' names from there.
    """
    from keel.deployment.register import register as register_keys

    record = os.environ.get("KEEL_CLIENT_REGISTRY")
    lines = register_keys(folder, superlink, wait, requests or (), Path(record) if record else None)
    print("\n".join(lines) or "no client is registered")


@app.command()
def loopback(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", show_default=False)
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 3,
    timeout: Annotated[
        float, typer.Option(help="Time limit of the whole run, in seconds.")
    ] = 3600.0,
    folder: Annotated[
        Path | None,
        typer.Option("--output", help="Directory for logs and client state.", show_default=False),
    ] = None,
) -> None:
    """Deploy on this machine without containers, run once, and stop all processes.

    Starts every process of a deployment: SuperLink, SuperNodes, executors, resident workers, over
    TLS.

    Example: keel deploy loopback --clients 3 method=fedintr num-rounds=5
    """
    from keel.cli.overrides import parse_overrides
    from keel.deployment.loopback import ENDED, deploy_and_run
    from keel.deployment.superlink import app_directory
    from keel.interrupts import INTERRUPTED_CODE, interruptible
    from keel.run_checks import check_simulated, checked_config
    from protocol.config import keel_home
    from protocol.own_code import check_on_all_machines

    keys = parse_overrides(overrides or [])
    if "resume" not in keys:  # such a run stays where it is
        keys.setdefault("output-dir", str(keel_home() / "runs"))
    config = checked_config(keys)  # a mistake shows here rather than in a log
    check_simulated(config, clients)
    check_on_all_machines(config.own)
    with app_directory() as app, interruptible(ended=ENDED):
        try:
            finished, log = deploy_and_run(app, keys, clients, folder, timeout)
        except KeyboardInterrupt:
            print(ENDED)
            raise typer.Exit(INTERRUPTED_CODE) from None
    print(log)
    if not finished:
        raise typer.Exit(1)


def split(values: list[str] | None) -> list[str]:
    """The values, split at commas, each once."""
    return list(dict.fromkeys(part for value in values or [] for part in value.split(",") if part))
