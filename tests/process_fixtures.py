"""What all tests of a process share, and how it is put back after each of them."""

import contextlib
import gc
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def umask() -> int:
    before = os.umask(0o077)
    os.umask(before)
    return before


def environment() -> dict[str, str]:
    """All variables but pytest's own, which changes within a test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def set_environment(variables: dict[str, str]) -> None:
    for name in environment().keys() - variables:
        del os.environ[name]
    os.environ.update(variables)


def handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in SIGNALS}


def set_handlers(found: dict[signal.Signals, Any]) -> None:
    for number, handler in found.items():
        signal.signal(number, handler)


def loggers() -> dict[str, tuple[int, bool, bool, list[logging.Handler]]]:
    """Level, whether it is disabled, whether it propagates, and handlers; of Keel's and Flower's.

    Flower's SuperLink has Alembic configure logging, which disables all loggers there are.
    """
    names = [n for n in logging.root.manager.loggerDict if n.startswith(("keel", "flwr"))]
    found = [logging.root, *map(logging.getLogger, names)]
    return {x.name: (x.level, x.disabled, x.propagate, list(x.handlers)) for x in found}


def set_loggers(before: dict[str, tuple[int, bool, bool, list[logging.Handler]]]) -> None:
    """Loggers that are new keep what they have, but are not disabled."""
    for name in loggers():
        logger = logging.getLogger(name)
        is_new = (logger.level, False, logger.propagate, list(logger.handlers))
        level, logger.disabled, logger.propagate, logger.handlers[:] = before.get(name, is_new)
        logger.setLevel(level)


SHARED: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (os.getcwd, os.chdir),
    (umask, os.umask),
    (environment, set_environment),
    (handlers, set_handlers),
    (loggers, set_loggers),
    (lambda: logging.root.manager.disable, logging.disable),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Begin with the same random numbers, and leave the settings of the process as they were.

    Fails if a thread is left that Python would wait for.
    """
    random.seed(0)
    torch.manual_seed(0)
    before = [read() for read, _ in SHARED]
    threads = set(threading.enumerate())
    yield
    for (read, write), value in zip(SHARED, before, strict=True):
        if read() != value:
            write(value)
    for thread in threading.enumerate():
        if thread not in threads and not thread.daemon:
            gc.collect()  # of an executor that nobody has
            thread.join(30)
            assert not thread.is_alive(), f"{thread} is left behind"
