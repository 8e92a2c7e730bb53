"""Ctrl-C: the first stops a run cleanly, the second ends the process at once."""

import atexit
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED_CODE = 130
STOPPING = "stopping; Ctrl-C again ends at once"
ENDED = "ended; `keel list` shows the run, `keel resume RUN` continues it"
CLEAR = "\r\x1b[2K\x1b[?25h"  # the line of a progress bar, which hides the cursor


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, SIGINT waits: it would leave PyTorch's import without NumPy, or abort the process."""
    before, caught = signal.getsignal(signal.SIGINT), list[int]()
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    if not is_main or before in (signal.SIG_IGN, None):  # None: a handler that is not Python's
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interruptible(
    at_once: Callable[[], None] = lambda: None, ends_on_hangup: bool = True, ended: str = ENDED
) -> Iterator[None]:
    """Within: SIGINT raises KeyboardInterrupt, a second one ends the process with code 130.

    SIGTERM raises SystemExit, once: who sends it may repeat it. So does SIGHUP with
    `ends_on_hangup`, unless it is ignored, as under nohup. at_once: called before the process ends
    at once, to end others. ended: what is printed then.
    """
    presses = itertools.count(1)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if next(presses) == 1:
            with suppress(RuntimeError):  # it came while a line was printed
                print(STOPPING, flush=True)
            raise KeyboardInterrupt
        at_once()
        os.write(1, f"{CLEAR if os.isatty(1) else ''}{ended}\n".encode())
        os._exit(INTERRUPTED_CODE)

    def terminate(number: int, frame: FrameType | None) -> None:
        if next(presses) == 1:
            sys.exit(128 + number)

    # SIGINT also where a shell had it ignored
    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
    if ends_on_hangup and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = terminate
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)  # no traceback of a late one
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
