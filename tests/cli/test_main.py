"""`keel`: the table of commands, exit codes, and what is not imported."""

import io
import os
import subprocess
import sys
from types import ModuleType

import pytest

import keel.__main__
import keel.cli.main
from keel.cli.main import COMMANDS, WhileRead, load, main
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
    ],
)
def test_a_command_that_the_image_lacks_is_one_line(arguments, module):
    code = """
import sys
name, *words = sys.argv[1:]
sys.modules[name] = None  # as if it were missing
from keel.cli.main import main
sys.exit(main(words))
"""
    command = [sys.executable, "-c", code, module, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, cwd=app_folder)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        f"error: this installation lacks {module}: use a checkout or `pip install`\n"
    )


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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_listing_that_nobody_reads_to_its_end_is_no_error(no_reader, monkeypatch, stream):
    monkeypatch.setattr(sys, stream, no_reader)
    assert main(["keys"]) == 0
    assert main(["nonsense"]) == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_encode_is_a_question_mark(monkeypatch, encoding):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    assert main(["presets"]) == 0  # it has a dash that no byte stands for
    assert b"?" in raw.getvalue()


@pytest.mark.parametrize(
    ("encoding", "character"), [("utf-8", "\udcff"), ("koi8-r", "±"), ("iso8859-2", "ã")]
)
def test_a_character_that_the_encoding_lacks_can_be_printed(encoding, character):
    raw = io.BytesIO()
    stream = WhileRead(io.TextIOWrapper(raw, encoding, write_through=True))
    assert stream.write(f"a{character}b\n") == 4
    assert raw.getvalue() == b"a?b\n"


@pytest.mark.parametrize("words", [["keys", "lr"], ["keys"]], ids=["buffered", "longer"])
def test_output_to_a_full_disk_is_one_line(monkeypatch, capsys, words):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 1
    assert capsys.readouterr().err == "error: /dev/full: No space left on device\n"


@pytest.mark.end_to_end
def test_a_closed_pipe_is_no_error_of_the_process(no_reader):
    command = [sys.executable, "-m", "keel", "keys", "lr"]  # less than a buffer: written at the end
    done = subprocess.run(command, stdout=no_reader, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_mistyped_commands_and_options_are_one_line(refusal, capsys):
    assert refusal("doktor") == "error: No such command 'doktor'. Did you mean 'doctor'?\n"
    assert refusal("deploy", "lopback").endswith("'lopback'. Did you mean 'loopback'?\n")
    line = "error: No such command 'train'. `keel --help` lists all commands.\n"
    assert refusal("train") == line
    assert "'xyz'. `keel experiments --help` lists all commands." in refusal("experiments", "xyz")
    assert refusal("run", "--engine", "flowr").endswith("'deployment'. Did you mean flower?\n")
    assert "Config keys have no leading dashes: method=VALUE." in refusal(
        "run", "--method", "fedavg"
    )
    assert main(["run", "--client", "3"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--clients" in line


@pytest.mark.parametrize("name", ["experiments", "deploy"])
def test_a_group_without_a_command_shows_its_help_alone(name, capsys):
    assert main([name]) == 2
    said = capsys.readouterr()
    assert said.err == ""
    assert f"keel {name} [OPTIONS] COMMAND" in said.out
    assert "completion" not in said.out


def test_an_option_that_is_a_config_key_is_not_likened_to_an_option(refusal):
    line = "error: No such option '--alpha'. Config keys have no leading dashes: alpha=VALUE.\n"
    assert refusal("run", "--alpha", "3") == line
    end = "Config keys have no leading dashes: KEY=VALUE; did you mean num-rounds?\n"
    assert refusal("run", "--rounds", "3") == f"error: No such option '--rounds'. {end}"


def test_an_argument_that_begins_with_a_dash_is_no_riddle(refusal):
    line = "error: No such option '-x'. Write -- before an argument that begins with a dash.\n"
    assert refusal("predict", "run", "-x.png") == line


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["list", ""], "DIRECTORY is empty: name a path, or leave it out"),
        (["ui", "", "/no/such/directory"], "DIRECTORY is empty: name a path, or leave it out"),
        (["export", "RUN", "--to", "csv", "--output="], "--output is empty: name a path, or"),
        (["experiments", "list", "--output", ""], "--output is empty: name a path, or leave"),
        (["predict", "RUN", ""], "IMAGE is empty: name a path"),
        (["export", "", "--to", "csv"], "RUN is empty: name a run"),
        (["experiments", "verify", ""], "RUN is empty: name a run"),
        (["stop", ""], "RUN is empty: name a run, or leave it out"),
        (["compare", "RUN", ""], "RUN is empty: name a run"),
    ],
)
def test_an_empty_path_or_run_is_refused(words, fault, refusal):
    """As of a shell's variable that is not set: it was the current directory or the newest run."""
    assert refusal(*words).startswith(f"error: {fault}")


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


def test_an_error_of_syntax_in_a_file_of_the_user_is_one_line(tmp_path, monkeypatch, refusal):
    mine = tmp_path / "mine.py"
    mine.write_text("x = 1\ny = = 2\n")
    monkeypatch.setattr(
        "keel.cli.runs.find_run", lambda name: compile(mine.read_text(), mine, "exec")
    )
    assert refusal("stop", "one") == f"error: {mine}:2: invalid syntax\n"


def test_an_error_as_a_file_of_the_user_is_imported_is_one_line(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr("protocol.config.app_folder", tmp_path)
    mine = tmp_path / "models" / "mine.py"
    code = compile("x = 1\nfrom pathlib import Pathh\n", mine, "exec")
    monkeypatch.setattr("keel.cli.runs.find_run", lambda name: exec(code))
    line = refusal("stop", "one")
    assert line.startswith(f"error: {mine}:2: ImportError: cannot import name 'Pathh'")
    code = compile("import keel.typo\n", mine, "exec")
    assert refusal("stop", "one").startswith(f"error: {mine}:1: ModuleNotFoundError: No module")
    code = compile("def f():\n    1 / 0\nf()\n", mine, "exec")
    with pytest.raises(ZeroDivisionError):  # no statement of the file: a bug of Keel's
        main(["stop", "one"])


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
    assert refusal("list") == (
        "error: Could not determine home directory. Set KEEL_HOME to a directory that you can "
        "write to\n"
    )
