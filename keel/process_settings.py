"""A run in this process neither reads nor changes the settings of the program that starts it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_one_run = threading.RLock()  # at a time: runs share torch's default generator and Keel's log


@contextmanager
def own_settings() -> Iterator[None]:
    """A context for one run at a time, with torch's defaults and Keel's own level of logging."""
    with _one_run, torch_defaults(), program_log_level():
        yield


@contextmanager
def torch_defaults() -> Iterator[None]:
    """A context with torch's defaults (CPU, float32, gradients), whatever the caller has set.

    The caller's settings are restored. ValueError within torch.autocast, which keeps copies of
    weights between steps.
    """
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ValueError(
            "a run cannot start within torch.autocast: start it outside; precision=bf16 trains in "
            "bfloat16"
        )
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    onednn = torch.backends.mkldnn  # in bfloat16 after torch.set_float32_matmul_precision("medium")
    places: list[Any] = [onednn.matmul, onednn.conv, onednn.rnn]  # type: ignore[attr-defined]  # defined at import
    before = [place.fp32_precision for place in places]
    is_cpu = torch.get_default_device().type == "cpu"  # torch.device would slow down every call
    torch.set_default_dtype(torch.float32)
    for place in places:
        place.fp32_precision = "ieee"
    try:
        with (
            nullcontext() if is_cpu else torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)


class ProgramLog(logging.Handler):
    """Passes records of the calling program's level on to its handlers: a run logs more."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, if there are handlers."""
        if logging.root.hasHandlers():
            logging.root.handle(record)


@contextmanager
def program_log_level() -> Iterator[None]:
    """Within: the calling program's handlers get Keel's log at the level before the run."""
    logger = logging.getLogger("keel")
    passed_on, propagated = ProgramLog(logger.getEffectiveLevel()), logger.propagate
    if propagated:
        logger.addHandler(passed_on)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(passed_on)
