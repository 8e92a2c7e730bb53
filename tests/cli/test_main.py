"""`keel`: the table of commands, exit codes, and what is not imported."""

import io
import os
import subprocess
import sys
from types import ModuleType

import pytest

import keel.__main__
import keel.cli.main
from keel.cli.main import COMMANDS, load, main
from protocol.config import app_folder
from tests.tools.run_directories import make_run

HEAVY = ("torch", "flwr", "ray", "matplotlib", "sklearn")


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
    """One command after the other in a fresh process: its exit code and what is imported then."""
    heavy = (*HEAVY, "numpy")
    code = f"""
import sys
from keel.cli.main import main
for words in sys.argv[1:]:
    code = main(words.split())
    print((words, code, [name for name in {heavy} if name in sys.modules]), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *LIGHT],
        env={"KEEL_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = [eval(line) for line in done.stderr.splitlines() if line.startswith("(")]
    assert found == [(words, code, []) for words, code in LIGHT.items()]


@pytest.mark.end_to_end
def test_the_plan_of_a_run_waits_for_nothing_heavy():
    code = f"""
import sys
import keel.engine, keel.plan, keel.progress, keel.deployment.cluster
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


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


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (("experiments", "list"), "keel.experiments.scale"),
        (("deploy", "loopback"), "keel.deployment.loopback"),
        (("ui",), "keel.views.server"),
        (("ui",), "plotly"),
        (("run", "--engine", "flower", "--clients", "2"), "ray"),
    ],
)
def test_a_command_that_the_installation_lacks_a_part_of_is_one_line(arguments, module):
    code = """
import sys
name, *words = sys.argv[1:]
sys.modules[name] = None  # as if it were missing
from keel.cli.main import main
sys.exit(main(words))
"""
    command = [sys.executable, "-c", code, module, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, cwd=app_folder)
    assert found.returncode == 2
    assert module in found.stderr
    assert found.stderr.count("\n") == 1


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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_encode_is_a_question_mark(monkeypatch, encoding):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    assert main(["datasets"]) == 0  # its dash and lines are in neither
    assert b"?" in raw.getvalue()


@pytest.mark.parametrize("words", [["keys", "lr"], ["keys"]], ids=["buffered", "longer"])
def test_output_to_a_full_disk_is_one_line(words):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "keel", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["doktor"], "doctor"),
        (["deploy", "lopback"], "loopback"),
        (["train"], "train"),
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
        (["list", ""], "DIRECTORY"),
        (["ui", "", "/no/such/directory"], "DIRECTORY"),
        (["export", "RUN", "--to", "csv", "--output="], "--output"),
        (["predict", "RUN", ""], "IMAGE"),
        (["stop", ""], "RUN"),
        (["compare", "RUN", ""], "RUN"),
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
    assert keel.__main__.main() == 130


def test_ctrl_c_while_a_class_is_made_is_no_error(monkeypatch, capsys):
    """Python 3.11 wraps what `__set_name__` raises in a RuntimeError: exit code 1 and its text."""

    class Interrupted:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    monkeypatch.setattr(
        "keel.cli.status.find_run", lambda name: type("C", (), {"x": Interrupted()})
    )
    assert main(["status", "x"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), None])
def test_ctrl_c_while_an_extension_is_imported_is_no_traceback(cause, monkeypatch, capsys):
    """Matplotlib's raises an ImportError, which numpy's would wrap in another."""

    def run(name):
        try:
            raise ImportError("initialization failed") from cause
        except ImportError as error:
            raise ImportError("read this") from error

    monkeypatch.setattr("keel.cli.status.find_run", run)
    if cause:
        assert main(["status", "x"]) == 130
    else:
        with pytest.raises(ImportError, match="read this"):
            main(["status", "x"])
    assert capsys.readouterr().err == ""


def test_a_notebook_s_backend_that_is_not_installed_here_does_not_matter(tmp_path):
    """A kernel sets the variable for `!keel run`, which may be in another environment."""
    (tmp_path / "runs").mkdir()
    make_run(tmp_path / "runs" / "a", {"method": "fedavg"}, 2)
    variables = os.environ | {"MPLBACKEND": "missing", "KEEL_HOME": str(tmp_path)}
    words = ["compare", "a", "--output", str(tmp_path / "a.png")]
    command = [sys.executable, "-m", "keel", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_user_without_a_home_is_told_to_set_keel_home(monkeypatch, refusal):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KEEL_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert "KEEL_HOME" in refusal("list")
