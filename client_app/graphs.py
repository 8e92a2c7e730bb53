"""A function of tensors as a CUDA graph: all its kernels start with one call.

A step of a small network takes less time on a GPU than Python takes to start its kernels, about
200 of them. A graph is recorded for the steps of one `fit` of one client, and forgotten with it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from protocol.text import in_one_line

log = logging.getLogger("keel.client")

NUM_EAGER = 2  # calls before the first recording, in which libraries allocate their memory
MIN_CALLS = 8  # of the same form; for fewer, recording takes longer than it saves


def form_of(leaf: Any) -> Hashable:
    """What an input has in common with the recorded one. TypeError unless it is a tensor."""
    if leaf is None:
        return None
    if not isinstance(leaf, Tensor):  # a number would stay what it was
        raise TypeError(f"{type(leaf).__name__} among its inputs: return a tensor")
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device


@lru_cache(maxsize=8)
def _place(device: torch.device) -> tuple[torch.cuda.Stream, Any, list[torch.cuda.CUDAGraph]]:
    """The device's stream and memory in which graphs are recorded, and its newest graph.

    The memory stays while a graph lives, so the next one uses it again.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream, torch.cuda.graph_pool_handle(), []


class Recording:
    """One call of a function, recorded: `replay` repeats it with other inputs of the same form."""

    def __init__(self, function: Callable[[Any], Any], inputs: Any) -> None:
        self.read = pytree.tree_map(lambda leaf: leaf if leaf is None else leaf.clone(), inputs)
        self.leaves = pytree.tree_leaves(self.read)
        self.result: Any = None
        self.record(lambda: function(self.read))

    def record(self, call: Callable[[], Any]) -> None:
        """Record the call; nothing is computed yet."""
        device = next(leaf.device for leaf in self.leaves if leaf is not None)
        stream, pool, newest = _place(device)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # other threads may copy meanwhile
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.result = call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        newest[:] = [graph]
        self.run: Callable[[], object] = graph.replay

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The result for these inputs; it lies in memory that the next call overwrites."""
        for leaf, mine in zip(leaves, self.leaves, strict=True):
            if leaf is not None:
                mine.copy_(leaf)
        self.run()
        return self.result


class Replayed:
    """A function of nested tensors whose kernels are recorded for each form of its inputs.

    The third call is recorded, or the second if such a function has been recorded before in this
    process, whose libraries then have their memory. The function may read and write other tensors,
    in place; whatever else it reads must not change. If a graph cannot have it, because it waits
    for the device, say, it is called as it is for the rest of the run.
    what: names it in the log, where that is said once.
    """

    obstacles: ClassVar[dict[str, str]] = {}  # why not, by `what`
    recorded: ClassVar[set[str]] = set()  # each `what` of a recording

    def __init__(self, function: Callable[[Any], Any], what: str) -> None:
        self.function, self.what = function, what
        self.calls: Counter[Hashable] = Counter()
        self.recordings: dict[Hashable, Recording] = {}

    def __call__(self, inputs: Any) -> Any:
        """The function's result."""
        if self.what in self.obstacles:
            return self.function(inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        num_eager = 1 if self.what in self.recorded else NUM_EAGER
        try:
            form = (spec, *map(form_of, leaves))
            if form not in self.recordings and self.calls[form] >= num_eager:
                self.recordings[form] = Recording(self.function, inputs)
                self.recorded.add(self.what)
        except (TypeError, RuntimeError) as error:
            reason = in_one_line(error.__context__ or error)  # `capture_end` fails too
            self.obstacles[self.what] = reason
            log.warning("%s is not recorded as a CUDA graph: %s", self.what, reason)
            return self.function(inputs)
        if form in self.recordings:
            return self.recordings[form].replay(leaves)
        self.calls[form] += 1
        return self.function(inputs)
