"""The command lines of Keel 0.1 (`python -m experiments ...`), which work until 0.3."""

import sys

from keel.cli.main import main


def forward(old: str, *new: str) -> None:
    """Name the new command on stderr, run it with this process's arguments, and exit."""
    command = " ".join(["keel", *new])
    print(f"python -m {old} is now `{command}`; the old line works until Keel 0.3", file=sys.stderr)
    arguments = sys.argv[1:]
    sys.exit(main([*new, *(with_commas(arguments) if "credentials" in new else arguments)]))


def with_commas(arguments: list[str]) -> list[str]:
    """`--names a b --clients c d` of `deployment.credentials` as `--name a,b --client c,d`."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-2:-1] in (["--name"], ["--client"]) and not argument.startswith("-"):
            joined[-1] += f",{argument}"
        else:
            joined.append({"--names": "--name", "--clients": "--client"}.get(argument, argument))
    return joined
