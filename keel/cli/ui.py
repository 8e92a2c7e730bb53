"""`keel ui`: live pages on the runs of this machine."""

import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from protocol.text import num_of

DEFAULT_PORT = 8777


def ui(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIRECTORY]...", show_default=False)
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any that is free.")
    ] = DEFAULT_PORT,
    federation: Annotated[
        str,
        typer.Option(
            help="A SuperLink whose nodes are shown: a name in config.toml, or HOST:PORT."
        ),
    ] = "",
    root_certificates: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The deployment's ca.pem, with --federation HOST:PORT.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser, live: all runs, one run with a deployment's sites, a comparison.

    DIRECTORY contains run directories or the output of `keel experiments`, or is $KEEL_HOME; the
    default is $KEEL_HOME/runs. The pages change nothing and load nothing from elsewhere. They are
    served to this machine only. From another, use `ssh -L 8777:127.0.0.1:8777 HOST` and the same
    link; if 8777 is taken there, use `ssh -L PORT:127.0.0.1:8777 HOST` and replace the port in the
    link.
    """
    from keel.saved_runs import runs_directory

    roots = [path.expanduser() for path in directories or [runs_directory()]]
    for root in roots:
        if directories and not root.is_dir():
            raise ValueError(f"{root} is not a directory; name one that contains run directories")

    from keel.deployment.superlink import SuperLinkClient, check_connection
    from keel.views.server import SuperLinkNodes, create_app, listening, serve
    from keel.views.store import Store

    nodes, home = None, None
    token = secrets.token_urlsafe(24)
    with ExitStack() as opened:
        at = opened.enter_context(listening(port))
        if federation:
            check_connection(federation)
            if ":" in federation:  # for Flower's own config
                folder = tempfile.TemporaryDirectory(prefix="keel-ui-", ignore_cleanup_errors=True)
                home = Path(opened.enter_context(folder))
            nodes = SuperLinkNodes(SuperLinkClient(home, federation, root_certificates).nodes)
        store = Store(roots)
        runs = num_of("run", store.rows())
        print(f"http://127.0.0.1:{at.getsockname()[1]}/?token={token}", flush=True)
        print(f"{runs} in {', '.join(map(str, roots))}; Ctrl-C stops the server", flush=True)
        serve(create_app(store, token, nodes), at)
