"""The command lines of Keel 0.1 (`python -m experiments ...`), which work until 0.3."""

import os
import sys
from typing import NoReturn


def forward(old: str, *new: str) -> NoReturn:
    """Name the new command on stderr and become it, with this process's arguments.

    It starts Python again, because the packages below `keel`, which have old commands too, do not
    import `keel`.
    """
    command = " ".join(["keel", *new])
    line = f"python -m {old} is now `{command}`; the old line works until Keel 0.3"
    print(line, file=sys.stderr, flush=True)
    arguments = sys.argv[1:]
    arguments = with_commas(arguments) if "credentials" in new else arguments
    os.execv(sys.executable, [sys.executable, "-m", "keel", *new, *arguments])


def with_commas(arguments: list[str]) -> list[str]:
    """`--names a b --clients c d` of `deployment.credentials` as `--name a,b --client c,d`."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-2:-1] in (["--name"], ["--client"]) and not argument.startswith("-"):
            joined[-1] += f",{argument}"
        else:
            joined.append({"--names": "--name", "--clients": "--client"}.get(argument, argument))
    return joined
