"""Signals within `interruptible`; tests/end_to_end/test_keel_run.py has runs that are stopped."""

import os
import signal
import subprocess
import sys

import pytest

from keel.cli.interrupts import ENDED, STOPPING, interruptible


def send(number):
    os.kill(os.getpid(), number)


def test_the_first_ctrl_c_is_an_exception_and_says_so_in_a_line(capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        send(signal.SIGINT)
    assert capsys.readouterr().out == f"{STOPPING}\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_sigterm_that_is_repeated_does_not_disturb_the_first():
    ended = []

    def run():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)
            ended.append(True)

    with pytest.raises(SystemExit) as error, interruptible():
        run()
    assert ended
    assert error.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_next_ctrl_c_ends_the_process_after_what_it_started(first):
    code = f"""
import os, time
from keel.cli.interrupts import interruptible
with interruptible(lambda: print("others ended", flush=True)):
    try:
        os.kill(os.getpid(), {int(first)})
    finally:
        os.kill(os.getpid(), {int(signal.SIGINT)})
        time.sleep(100)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.endswith(f"others ended\n{ENDED}\n")
