"""`keel`: the table of commands, exit codes, and what is not imported."""

import io
import os
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest

import keel.__main__
import keel.cli.main
from keel.cli.main import COMMANDS, EXTRAS, load, main
from protocol.config import app_folder

HEAVY = ("torch", "flwr", "ray", "matplotlib", "sklearn", "pandas")
LIGHT = {
    "--help": 0,
    "--version": 0,
    "run --help": 0,
    "run method=fedckaa": 2,
    "run mehtod=fedcka": 2,
    "run alpha=-1": 2,
    "list": 0,
    "status": 2,
    "nonsense": 2,
}


@pytest.mark.end_to_end
def test_nothing_heavy_is_imported_before_it_is_needed(tmp_path):
    """In a fresh process, one after the other: each command's exit code and what is imported then.

    After the commands: the Python API, and the modules that make the plan of a run.
    """
    code = f"""
import sys
def report(what, code, heavy):
    print((what, code, [name for name in heavy if name in sys.modules]), file=sys.stderr)
from keel.cli.main import main
for words in sys.argv[1:]:
    report(words, main(words.split()), {(*HEAVY, "numpy")})
import keel, keel.engine, keel.plan, keel.progress, keel.deployment.cluster
report("imports", 0, {HEAVY})
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *LIGHT],
        env={"KEEL_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = [eval(line) for line in done.stderr.splitlines() if line.startswith("(")]
    assert found == [(words, code, []) for words, code in (LIGHT | {"imports": 0}).items()]


def test_help_names_every_command(printed):
    shown = printed("--help")
    assert all(name in shown for name in COMMANDS)
    assert printed() == printed("-h") == shown
    assert printed("run", "-h") == printed("run", "--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_shows_its_help(name, printed):
    command = load(name)
    shown = printed(name, "--help")
    assert f"keel {name}" in shown
    for each in getattr(command, "commands", ()):
        shown += printed(name, each, "--help")
    assert "`" not in shown  # Markdown is rendered


def test_a_command_that_the_installation_lacks_a_part_of_is_one_line():
    lacking = {
        "keel.experiments.recipe": "experiments list",
        "keel.deployment.loopback": "deploy loopback",
        "keel.views.server": "ui",
        "plotly": "ui",
    }
    code = f"""
import sys
from keel.cli.main import main
for name, words in {lacking}.items():
    sys.modules[name] = None  # as if it were missing
    assert main(words.split()) == 2
    del sys.modules[name]
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for line, module in zip(found.stderr.splitlines(), lacking, strict=True):
        assert module in line
    extras = tomllib.loads((app_folder / "pyproject.toml").read_text())["project"]
    assert {*EXTRAS.values()} <= extras["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad\nvalue"), 2),
        (FileNotFoundError("no file"), 2),
        (RuntimeError("it failed"), 1),
        (PermissionError("not yours"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code):
    def fail(_):
        raise error

    monkeypatch.setattr(keel.cli.main, "load", lambda name: fail(name))
    assert main(["list"]) == code
    said = capsys.readouterr().err
    assert said == ("" if code == 130 else f"error: {' '.join(str(error).split())}\n")


def test_what_the_terminal_cannot_encode_is_a_question_mark(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1"))
    assert main(["datasets"]) == 0  # its dash and lines are not in Latin 1
    assert b"?" in raw.getvalue()


@pytest.mark.parametrize("word", ["--version", "keys"], ids=["buffered", "longer"])
def test_output_to_a_full_disk_is_one_line(word):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "keel", word]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["doktor"], "doctor"),
        (["deploy", "lopback"], "loopback"),
        (["run", "--engine", "flowr"], "flower"),
        (["run", "--client", "3"], "--clients"),
        (["run", "--method", "fedavg"], "method=VALUE"),
        (["run", "--rounds", "3"], "num-rounds"),
        (["predict", "run", "-x.png"], "-- before"),
    ],
)
def test_a_mistyped_command_or_option_is_one_line(words, meant, refusal):
    assert meant in refusal(*words)


@pytest.mark.parametrize("name", ["experiments", "deploy"])
def test_a_group_without_a_command_shows_its_help_alone(name, capsys):
    assert main([name]) == 2
    said = capsys.readouterr()
    assert said.err == ""
    assert f"keel {name} [OPTIONS] COMMAND" in said.out
    assert "completion" not in said.out


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["status", ""], "RUN"),
        (["compare", "RUN", ""], "RUN"),
        (["predict", "RUN", ""], "IMAGE"),
        (["deploy", "credentials", "--credentials="], "--credentials"),
    ],
)
def test_an_empty_path_or_run_is_refused(words, name, refusal):
    """A shell's variable that is not set would be the directory, or the newest run."""
    assert name in refusal(*words)


def test_ctrl_c_while_keel_is_imported_is_no_traceback(monkeypatch):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "keel.cli.main", Interrupted("keel.cli.main"))
    monkeypatch.setenv("MPLBACKEND", "of-a-notebook")  # which may not be installed here
    assert keel.__main__.main() == 130
    assert os.environ["MPLBACKEND"] == "agg"


class Interrupted:
    """Python 3.11 wraps what `__set_name__` raises in a RuntimeError."""

    def __set_name__(self, owner, name):
        raise KeyboardInterrupt


def imported(_):
    """An extension that was interrupted raises an ImportError, which NumPy wraps in another."""
    try:
        raise ImportError("initialization failed") from KeyboardInterrupt()
    except ImportError as error:
        raise ImportError("read this") from error


@pytest.mark.parametrize(
    "run", [lambda name: type("C", (), {"x": Interrupted()}), imported], ids=["class", "extension"]
)
def test_ctrl_c_that_ends_in_another_error_is_no_error(run, monkeypatch, capsys):
    monkeypatch.setattr("keel.cli.status.find_run", run)
    assert main(["status", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_a_user_without_a_home_is_told_to_set_keel_home(monkeypatch, refusal):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KEEL_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert "KEEL_HOME" in refusal("list")
