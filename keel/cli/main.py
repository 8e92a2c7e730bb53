"""The `keel` command: a table of commands, each imported only when it is called.

To add one: a line in COMMANDS. The module offers a Typer `app` (with one command, or with one of
that name), or a function named after the command, hyphens as underscores.
"""

import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import click
import typer
from click.core import ParameterSource
from typer.core import TyperGroup

from protocol.text import printable

RUNS, LISTS, TOOLS, OWN = "Runs", "Available", "Tools", "Your own methods"
# modules that the image of a deployment lacks
NOT_IN_IMAGE = ("keel.experiments", "keel.deployment.loopback", "keel.views")
# name: (module, panel of the help, first line of the help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("run", RUNS, "Train: `keel run method=fedintr num-rounds=10`."),
    "demo": ("demo", RUNS, "Compare FedAvg with FedIntR on handwritten digits."),
    "resume": ("run", RUNS, "Continue an interrupted run from its last checkpoint."),
    "status": ("status", RUNS, "Show the state of a run, or follow it; the newest by default."),
    "list": ("runs", RUNS, "List the runs: method, data, rounds, accuracy, state, age."),
    "stop": ("runs", RUNS, "Stop a run cleanly; `keel resume` continues it."),
    "ui": ("ui", RUNS, "Show runs in a browser, live, on this machine only."),
    "compare": ("runs", RUNS, "Compare runs: one table, one plot."),
    "predict": ("runs", RUNS, "Classify images with a run's model."),
    "export": ("runs", RUNS, "Export a run as csv, or its model as onnx or torchscript."),
    "diagnose": ("runs", RUNS, "Measure the representations of a run's models."),
    "methods": ("catalog", LISTS, "List the methods, or show one with its options."),
    "models": ("catalog", LISTS, "List the models, or show one with its layers."),
    "datasets": ("catalog", LISTS, "List the data sets, or show one."),
    "presets": ("catalog", LISTS, "List the presets, or show one."),
    "keys": ("catalog", LISTS, "List the config keys: type, default, range, meaning."),
    "experiments": ("experiments", TOOLS, "Run, report and verify the papers' tables and figures."),
    "deploy": ("deploy", TOOLS, "Credentials, registration and a local deployment."),
    "doctor": ("doctor", TOOLS, "Check a machine and its deployment."),
    "new-method": ("new_method", OWN, "Write the files of a new method."),
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
    """The value; UsageError for an empty path or RUN, such as "$RUN" where that is not set.

    It would mean the current directory, or the newest run.
    """
    is_given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    if is_given and "" in (value if isinstance(value, list | tuple) else [value]):
        name, what = parameter.human_readable_name.strip("[]."), "a path"
        if isinstance(parameter, click.Option):
            name = parameter.opts[0]
        elif name == "RUN":
            what = "a run"
        rest = "" if parameter.required else ", or leave it out"
        raise click.UsageError(f"{name} is empty: name {what}{rest}", context)
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
        """As Click's, with the real command in place of its stub."""
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


class WhileRead:
    """A stream whose output is discarded once nobody reads it (`keel run | head`).

    Other errors, such as a full disk's, name the stream: run directories may be on another disk.
    What its encoding lacks, as ASCII does `é`, becomes a question mark.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As the stream's; its own buffer may be written too."""
        try:
            return self.stream.write(text)
        except BrokenPipeError:
            self.discard()
            return len(text)
        except OSError as error:
            raise self.named(error) from error
        except UnicodeEncodeError:  # whose own `encoding` is "charmap" for many
            encoding = self.stream.encoding
            return self.write(text.encode(encoding, "replace").decode(encoding))

    def flush(self) -> None:
        """As the stream's."""
        try:
            self.stream.flush()
        except BrokenPipeError:
            self.discard()
        except OSError as error:
            raise self.named(error) from error

    def named(self, error: OSError) -> OSError:
        """The error with the stream's name, such as <stdout>."""
        return OSError(error.errno, error.strerror, str(self.stream.name))

    def discard(self) -> None:
        """From now on write to nowhere, also what is buffered."""
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 failed, 2 refused, 130 interrupted.

    User errors (ValueError, SyntaxError) and system errors (OSError, RuntimeError) are one line on
    stderr; anything else is a bug in Keel and shows its traceback. A closed pipe is no error.
    """
    out, err = (stream and cast(TextIO, WhileRead(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        code = executed(arguments)
        try:
            print(end="", flush=True)
        except OSError as error:  # such as a full disk
            if code == 0:  # else an earlier line has failed
                print(f"error: {one_line(described(error))}", file=sys.stderr)
            cast(WhileRead, out).discard()
            code = code or 1
    return code


def executed(arguments: Sequence[str] | None) -> int:
    """The exit code of a command, with its errors on stderr."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="keel", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:  # typer has printed the help
        return error.exit_code
    except click.ClickException as error:
        print(f"error: {one_line(explained(error))}", file=sys.stderr)
        return error.exit_code
    except click.Abort:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # in `__set_name__`, as in an import
            return 130
        print(f"error: {one_line(described(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    except SyntaxError as error:  # in a file of a model or method of the user's own
        print(f"error: {error.filename}:{error.lineno}: {error.msg}", file=sys.stderr)
        return 2
    except Exception as error:
        if isinstance(error, ImportError) and is_interrupted(error):
            return 130
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(NOT_IN_IMAGE):
            remedy = "use a checkout or `pip install`"
            print(f"error: this installation lacks {error.name}: {remedy}", file=sys.stderr)
            return 2
        if not (place := line_of_import(error)):
            raise
        print(f"error: {one_line(f'{place}: {type(error).__name__}: {error}')}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused the error: an interrupted import may end in an ImportError instead."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or is_interrupted(error.__cause__ or error.__context__)
    )


def line_of_import(error: Exception) -> str:
    """FILE:LINE if a line of a file of the checkout failed as it was imported, else "".

    As in a model of the user's own that imports a name that does not exist.
    """
    from protocol.config import app_folder

    frames = traceback.extract_tb(error.__traceback__)
    last = next(f for f in reversed(frames) if not f.filename.startswith("<frozen"))
    path = Path(last.filename)
    is_own = path.is_relative_to(app_folder) and "site-packages" not in path.parts
    return f"{path}:{last.lineno}" if is_own and last.name == "<module>" else ""


def explained(error: click.ClickException) -> str:
    """What is wrong, and what the user may have meant: a config key, or the nearest choice."""
    text = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx and text.startswith("No such command"):
        lists = f" `{error.ctx.command_path} --help` lists all commands."
        return text if "Did you mean" in text else text + lists
    if isinstance(error, click.NoSuchOption):
        from protocol.config import default_config
        from protocol.options import did_you_mean

        key = error.option_name.lstrip("-")
        if key in default_config():
            return f"{error.message} Config keys have no leading dashes: {key}=VALUE."
        if error.possibilities:
            return text
        if error.ctx and any(p.name == "assignments" for p in error.ctx.command.params):
            near = did_you_mean(key, default_config()) or "."
            return f"{error.message} Config keys have no leading dashes: KEY=VALUE{near}"
        return f"{text} Write -- before an argument that begins with a dash."
    found = re.fullmatch(r"'(.*)' is not one of (.*)\.", error.message)
    if not found:
        return text
    from protocol.options import did_you_mean

    near = did_you_mean(found[1], re.findall("'(.*?)'", found[2])).removeprefix("; did")
    return f"{text} Did{near}" if near else text


def described(error: Exception) -> str:
    """What went wrong; for a file that cannot be used, its path and the variable that moves it."""
    if not isinstance(error, OSError) or not error.filename:
        return str(error)
    from protocol.config import keel_home

    home, path = keel_home(), Path(error.filename)
    if isinstance(error, PermissionError | NotADirectoryError):
        is_home = path.is_relative_to(home) and not os.access(home, os.W_OK | os.X_OK)
    else:  # the home itself cannot be made
        is_home = not home.is_dir() and home.is_relative_to(path)
    hint = "; set KEEL_HOME to a directory that you can write to" if is_home else ""
    return f"{error.filename}: {error.strerror}{hint}"


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return " ".join(printable(text).split())
