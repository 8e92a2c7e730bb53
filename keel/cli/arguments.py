"""Arguments and options that several commands have."""

from typing import Annotated

import typer

NameArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)]
RunArgument = Annotated[str, typer.Argument()]
OptionalRun = Annotated[str, typer.Argument(show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ClientOption = Annotated[
    str, typer.Option("--client", help="The personal model of this client, such as client-0000.")
]
