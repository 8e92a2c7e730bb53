"""Signals within `interruptible`; tests/end_to_end/test_keel_run.py has runs that are stopped."""

import os
import signal
import subprocess
import sys

import pytest

from keel.cli.main import main
from keel.interrupts import ENDED, STOPPING, interruptible, uninterrupted
from protocol.config import app_folder


def send(number):
    os.kill(os.getpid(), number)


def test_the_first_ctrl_c_is_an_exception_and_says_so_in_a_line(capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        send(signal.SIGINT)
    assert capsys.readouterr().out == f"{STOPPING}\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def heeds_ctrl_c():
    """A shell starts a background job, such as these tests may be, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_ctrl_c_waits_for_the_end_of_an_import_that_would_swallow_it(heeds_ctrl_c):
    done = []

    def run():
        with uninterrupted():
            send(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done


@pytest.mark.parametrize(
    "words",
    [["experiments", "run", "docs/sweep.yaml"], ["run"], ["check-method", "fedavg"]],
    ids=" ".join,
)
def test_a_ctrl_c_while_torch_is_imported_ends_the_command(words, tmp_path, heeds_ctrl_c):
    """PyTorch's import swallows it, or aborts the process."""
    (tmp_path / "torch").mkdir()
    lines = ["import os, signal", "try:", "    os.kill(os.getpid(), signal.SIGINT)"]
    lines += ["except KeyboardInterrupt:", "    pass"]
    (tmp_path / "torch" / "__init__.py").write_text("\n".join(lines))
    path = f"{tmp_path}{os.pathsep}{app_folder}"
    done = subprocess.run(
        [sys.executable, "-m", "keel", *words],
        env=os.environ | {"PYTHONPATH": path, "KEEL_HOME": str(tmp_path)},
        cwd=app_folder,
        timeout=60,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize(
    ("before", "code", "last"),
    [(lambda *_: None, 130, "interrupted; repeat"), (signal.SIG_IGN, 0, "results: ")],  # nohup's
)
def test_a_terminal_that_is_closed_interrupts_an_experiment(before, code, last, capsys, tmp_path):
    command = ["experiments", "run", "docs/sweep.yaml", "--output", str(tmp_path)]
    signal.signal(signal.SIGHUP, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(app_folder)
        patch.setattr("keel.experiments.runner.run_recipe", lambda *_: send(signal.SIGHUP))
        assert main(command) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


@pytest.mark.parametrize(("engine", "code"), [("inline", 128 + signal.SIGHUP), ("deployment", 0)])
def test_a_hangup_ends_a_run_here_and_not_one_on_a_deployment(engine, code, monkeypatch):
    words = ["run", "--engine", engine]
    words += ["--federation", "a:1"] if engine == "deployment" else []
    monkeypatch.setattr("keel.cli.run.run_on_engine", lambda *_: send(signal.SIGHUP))
    handled = []
    signal.signal(signal.SIGHUP, lambda *_: handled.append(True))  # of whoever calls
    if code:
        with pytest.raises(SystemExit) as error:
            main(words)
        assert error.value.code == code
    else:
        assert main(words) == 0
    assert handled == ([] if code else [True])


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_next_ctrl_c_ends_the_process_after_what_it_started(first):
    """A second SIGTERM does not: who sends it may repeat it."""
    code = f"""
import os, time
from keel.interrupts import interruptible
with interruptible(lambda: print("others ended", flush=True)):
    try:
        os.kill(os.getpid(), {int(first)})
    finally:
        os.kill(os.getpid(), {int(signal.SIGTERM)})
        os.kill(os.getpid(), {int(signal.SIGINT)})
        time.sleep(100)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.endswith(f"others ended\n{ENDED}\n")
