"""A function of tensors as a CUDA graph: all its kernels start with one call.

A step of a small network takes less time on a GPU than Python takes to start its kernels, about
200 of them. A graph is recorded for the steps of one phase of one client, and forgotten with it.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from protocol.text import in_one_line

log = logging.getLogger("keel.client")

NUM_EAGER = 2  # calls before a recording: libraries allocate, and inputs show what stays the same
MIN_CALLS = 8  # of the same form; for fewer, recording takes longer than it saves

Form = tuple[Hashable, ...]


def form_of(leaf: Any) -> Hashable:
    """What an input has in common with the recorded one. TypeError if it is no tensor or value."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return type(leaf), leaf
    raise TypeError(f"{type(leaf).__name__} among the inputs")


@lru_cache(maxsize=8)
def _place(device: torch.device) -> tuple[torch.cuda.Stream, Any, list[torch.cuda.CUDAGraph]]:
    """Of this device: the stream and memory in which graphs are recorded, and the newest graph.

    The memory stays while a graph lives, so the next one uses it again.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream, torch.cuda.graph_pool_handle(), []


class Recording:
    """One call of a function, recorded: `replay` repeats it with other inputs of the same form."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        leaves: Sequence[Any],
        before: Sequence[Any],
        spec: pytree.TreeSpec,
    ) -> None:
        """before: the inputs of the call before. What is the same object is read where it is."""
        self.read = [
            new.clone() if isinstance(new, Tensor) and new is not old else new
            for new, old in zip(leaves, before, strict=True)
        ]
        self.is_own = [new is not mine for new, mine in zip(leaves, self.read, strict=True)]
        self.graph = torch.cuda.CUDAGraph()
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        stream, pool, newest = _place(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # other threads copy meanwhile
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.result = function(pytree.tree_unflatten(self.read, spec))
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        newest[:] = [self.graph]

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether the tensors that are read where they are are the same as then."""
        pairs = zip(leaves, self.read, self.is_own, strict=True)
        return all(own or leaf is mine or not isinstance(leaf, Tensor) for leaf, mine, own in pairs)

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The result for these inputs; it lies in memory that the next call overwrites."""
        for leaf, mine, is_own in zip(leaves, self.read, self.is_own, strict=True):
            if is_own:
                mine.copy_(leaf)
        self.graph.replay()
        return self.result


class Replayed:
    """A function of nested tensors whose kernels are recorded at its third call of each form.

    It may read and write other tensors, in place; whatever else it reads must not change. If it
    cannot be recorded, because it waits for the device, say, it is called as it is.
    num_calls: how often each form is expected, by the size of a batch.
    """

    def __init__(self, function: Callable[[Any], Any], what: str) -> None:
        self.function, self.what = function, what
        self.is_recordable = True
        self.calls: defaultdict[Form, int] = defaultdict(int)
        self.before: dict[Form, Sequence[Any]] = {}
        self.recordings: dict[Form, Recording] = {}

    def __call__(self, inputs: Any) -> Any:
        """The function's result."""
        if not self.is_recordable:
            return self.function(inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        try:
            form = (spec, *map(form_of, leaves))
            if form not in self.recordings and self.calls[form] >= NUM_EAGER:
                before = self.before.pop(form)
                self.recordings[form] = Recording(self.function, leaves, before, spec)
        except (TypeError, RuntimeError) as error:
            self.is_recordable = False
            log.info("%s is not recorded as a CUDA graph: %s", self.what, in_one_line(error))
            return self.function(inputs)
        recording = self.recordings.get(form)
        if recording is None:
            self.calls[form] += 1
            self.before[form] = leaves
        elif recording.fits(leaves):
            return recording.replay(leaves)
        return self.function(inputs)
