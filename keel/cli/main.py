"""The `keel` command: a table of commands, each imported only when it is called.

To add one: a line in COMMANDS. The module offers a Typer `app` (with one command, or with one of
that name), or a function named after the command, hyphens as underscores.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from click.core import ParameterSource
from typer.core import TyperGroup

from protocol.text import printable

RUNS, LISTS, TOOLS, OWN = "Runs", "Available", "Tools", "Your own methods"
# modules that the image of a deployment lacks
NOT_IN_IMAGE = ("keel.experiments", "keel.deployment.loopback", "keel.views")
# modules that an extra of pyproject.toml brings
EXTRAS = {
    **dict.fromkeys(("ray",), "simulation"),
    **dict.fromkeys(("fastapi", "jinja2", "markupsafe", "pandas", "plotly", "uvicorn"), "views"),
    **dict.fromkeys(("filelock", "ruamel"), "experiments"),
}
# name: (module, panel of the help, first line of the help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("run", RUNS, "Train: `keel run method=fedintr num-rounds=10`."),
    "demo": ("demo", RUNS, "Compare FedAvg with FedRCL on handwritten digits."),
    "resume": ("run", RUNS, "Continue an interrupted run from its last checkpoint."),
    "status": ("status", RUNS, "Show the state of a run, or follow it; the newest by default."),
    "list": ("list_runs", RUNS, "List the runs: method, data, rounds, accuracy, state, age."),
    "stop": ("stop", RUNS, "Stop a run cleanly; `keel resume` continues it."),
    "ui": ("ui", RUNS, "Show runs in a browser, live, on this machine only."),
    "compare": ("compare", RUNS, "Compare runs: one table, one plot."),
    "predict": ("predict", RUNS, "Classify images with a run's model."),
    "export": ("export_run", RUNS, "Export a run as csv, or its model as onnx."),
    "diagnose": ("diagnose", RUNS, "Measure the representations of a run's models."),
    "methods": ("methods", LISTS, "List the methods, or show one with its options."),
    "models": ("models", LISTS, "List the models, or show one with its layers."),
    "datasets": ("datasets", LISTS, "List the data sets, or show one."),
    "presets": ("presets", LISTS, "List the presets, or show one."),
    "keys": ("keys", LISTS, "List the config keys: type, default, range, meaning."),
    "experiments": ("experiments", TOOLS, "Run, report and verify the papers' tables and figures."),
    "deploy": ("deploy", TOOLS, "Credentials, registration and a local deployment."),
    "doctor": ("doctor", TOOLS, "Check a machine and its deployment."),
    "new-method": ("new_method", OWN, "Write the file of a new method."),
    "new-model": ("new_model", OWN, "Write the file of a new network."),
    "check-method": ("check_method", OWN, "Check a method against the contract."),
}


def load(name: str) -> click.Command:
    """Import and return the command of this name."""
    module, function = import_module(f"keel.cli.{COMMANDS[name][0]}"), name.replace("-", "_")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command(name)(getattr(module, function, None) or getattr(module, f"{function}_command"))
    app.rich_markup_mode = "markdown"
    command: click.Command = typer.main.get_command(app)
    if isinstance(command, click.Group) and name in command.commands:
        command = command.commands[name]
    if isinstance(command, TyperGroup):
        command.suggest_commands = False  # Click suggests them already
    for each in command.commands.values() if isinstance(command, click.Group) else [command]:
        for parameter in each.params:
            if isinstance(parameter.type, click.Path) or parameter.name in ("run", "runs"):
                parameter.callback = refuse_empty
    return command


def refuse_empty(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """The value; BadParameter for an empty path or RUN, such as "$RUN" where that is not set.

    It would mean the current directory, or the newest run.
    """
    is_given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    if is_given and "" in (value if isinstance(value, list | tuple) else [value]):
        raise click.BadParameter("is empty", context, parameter)
    return value


class LazyGroup(TyperGroup):
    """Knows every command's name and first line of help; imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"suggest_commands": False})  # Click suggests them already
        for name, (_, panel, line) in COMMANDS.items():
            self.commands[name] = typer.core.TyperCommand(name, help=line, rich_help_panel=panel)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command, and load it in place of its stub."""
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        return name, load(name), rest


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def keel(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Federated learning with representation regularisation, on Flower and PyTorch."""
    if version:
        from protocol.config import keel_version

        print(f"keel {keel_version()}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 failed, 2 refused, 130 interrupted.

    User errors (ValueError) and system errors (OSError, RuntimeError) are one line on stderr;
    anything else is a bug and shows its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what its encoding lacks becomes a question mark
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="keel", standalone_mode=False)
        print(end="", flush=True)  # the disk may be full
    except click.exceptions.NoArgsIsHelpError as error:  # typer has printed the help
        return error.exit_code
    except click.ClickException as error:
        print(f"error: {one_line(error.format_message() + hint(error))}", file=sys.stderr)
        return error.exit_code
    except click.Abort:
        return 130
    except Exception as error:
        if is_interrupted(error):
            return 130
        if not isinstance(error, ValueError | OSError | RuntimeError | ModuleNotFoundError):
            raise
        print(f"error: {one_line(described(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError | ImportError) else 1
    return code if isinstance(code, int) else 0


def remedy_for(module: str) -> str:
    """How to get a module that an installation may lack; empty for any other."""
    if module.startswith(NOT_IN_IMAGE):
        return "use a checkout or `pip install`"
    extra = EXTRAS.get(module.partition(".")[0])
    return (
        f"install Keel's extra `{extra}` (pip install '.[{extra}]' in a checkout)" if extra else ""
    )


def is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused the error: an interrupted import may end in another one."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or is_interrupted(error.__cause__ or error.__context__)
    )


def hint(error: click.ClickException) -> str:
    """What the user may have meant by an option that does not exist."""
    if not isinstance(error, click.NoSuchOption):
        return ""
    from protocol.config import default_config
    from protocol.options import did_you_mean

    key = error.option_name.lstrip("-")
    takes_keys = error.ctx and any(p.name == "assignments" for p in error.ctx.command.params)
    if key in default_config():
        return f" Config keys have no leading dashes: {key}=VALUE."
    if error.possibilities:
        return ""
    if takes_keys:
        near = did_you_mean(key, default_config()) or "."
        return f" Config keys have no leading dashes: KEY=VALUE{near}"
    return " Write -- before an argument that begins with a dash."


def described(error: Exception) -> str:
    """What went wrong, and which variable moves a file that cannot be used."""
    if isinstance(error, ModuleNotFoundError):
        if not (remedy := remedy_for(error.name or "")):
            raise error
        return f"this installation lacks {error.name}: {remedy}"
    if not isinstance(error, OSError) or not error.filename:
        return str(error)
    from protocol.config import keel_home

    is_at_home = Path(error.filename).is_relative_to(keel_home())
    is_refused = isinstance(error, PermissionError | NotADirectoryError)
    remedy = "; set KEEL_HOME to a directory that you can write to"
    return f"{error.filename}: {error.strerror}{remedy if is_at_home and is_refused else ''}"


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return " ".join(printable(text).split())
