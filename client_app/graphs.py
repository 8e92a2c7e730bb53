"""A function of tensors as a CUDA graph: all its kernels start with one call.

A step of a small network takes less time on a GPU than Python takes to start its kernels, about
200 of them. A graph is recorded for the steps of one phase of one client, and forgotten with it.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.text import in_one_line

log = logging.getLogger("keel.client")

NUM_EAGER = 2  # calls before the first recording: libraries allocate, and obstacles are found
MIN_CALLS = 8  # of the same form; for fewer, recording takes longer than it saves
# these wait to look for errors; torch has no tag for that
CHECKED = {"_linalg_check_errors", "_linalg_eigh", "_linalg_svd"}

Form = tuple[Hashable, ...]


def form_of(leaf: Any) -> Hashable:
    """What an input has in common with the recorded one. TypeError for other types."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return type(leaf), leaf
    raise TypeError(f"{type(leaf).__name__} among the inputs")


@lru_cache(maxsize=8)
def _place(device: torch.device) -> tuple[torch.cuda.Stream, Any, list[torch.cuda.CUDAGraph]]:
    """The device's stream and memory in which graphs are recorded, and its newest graph.

    The memory stays while a graph lives, so the next one uses it again.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream, torch.cuda.graph_pool_handle(), []


class Obstacles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation that a graph cannot have, in the backward pass too.

    It waits for the device, has a shape that depends on values, copies from another device, or
    draws from a generator of its own.
    """

    first = ""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        if not self.first and is_obstacle(operation, args, kwargs or {}, made):
            self.first = operation.overloadpacket.__name__
        return made


def is_obstacle(operation: Any, args: Any, kwargs: Any, made: Any) -> bool:
    """Whether no graph can have this operation. made: its result."""
    name = operation.overloadpacket.__name__
    if name.startswith("index"):  # its shape depends on values if a mask is among the indices
        indices = [each for each in pytree.tree_leaves(args[1]) if isinstance(each, Tensor)]
        are_masks = any(each.dtype in (torch.bool, torch.uint8) for each in indices)
        return are_masks or any(each.device != args[0].device for each in indices)
    # the end of `torch.tensor`, whose copy to a device no mode sees; with torch 2.11 the recording
    # fails instead
    if name == "lift_fresh":
        return bool(made.device.type != "cpu")
    if name in ("_to_copy", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        return bool(source.device != made.device)
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    is_tagged = bool(depends & {*operation.tags})
    return is_tagged or name in CHECKED or kwargs.get("generator") is not None


class Recording:
    """One call of a function, recorded: `replay` repeats it with other inputs of the same form."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        leaves: Sequence[Any],
        before: Sequence[Any],
        spec: pytree.TreeSpec,
    ) -> None:
        """before: the inputs of the call before. A tensor that is one of them is not copied.

        TypeError if they are not on one device: a number on the CPU would stay what it was.
        """
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        if len(devices) != 1:
            raise TypeError(f"inputs on {len(devices)} devices")
        (self.device,) = devices
        self.read = [
            new.clone() if isinstance(new, Tensor) and new is not old else new
            for new, old in zip(leaves, before, strict=True)
        ]
        self.is_own = [new is not mine for new, mine in zip(leaves, self.read, strict=True)]
        self.result: Any = None
        self.record(lambda: function(pytree.tree_unflatten(self.read, spec)))

    def record(self, call: Callable[[], Any]) -> None:
        """Record the call; nothing is computed yet."""
        stream, pool, newest = _place(self.device)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # other threads may copy meanwhile
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.result = call()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        newest[:] = [graph]
        self.run: Callable[[], object] = graph.replay

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether the tensors that were not copied are the recorded ones."""
        pairs = zip(leaves, self.read, self.is_own, strict=True)
        return all(own or leaf is mine or not isinstance(leaf, Tensor) for leaf, mine, own in pairs)

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The result for these inputs; it lies in memory that the next call overwrites."""
        for leaf, mine, is_own in zip(leaves, self.read, self.is_own, strict=True):
            if is_own:
                mine.copy_(leaf)
        self.run()
        return self.result


class Replayed:
    """A function of nested tensors whose kernels are recorded for each form of its inputs.

    The third call is recorded, or the second if such a function has passed the search for obstacles
    before: the call before shows which inputs stay the same. It may read and write other tensors,
    in place; whatever else it reads must not change. If a graph cannot have it, because it waits
    for the device, say, it is called as it is.
    what: names it in the log, where that is said once.
    kind: tells apart functions of the same `what` that have different operations.
    """

    obstacles: ClassVar[dict[str, str]] = {}  # why not, by `what`
    passed: ClassVar[set[Hashable]] = set()  # (what, kind, structure) without obstacles

    def __init__(self, function: Callable[[Any], Any], what: str, kind: Hashable = None) -> None:
        self.function, self.what, self.kind = function, what, kind
        self.calls: defaultdict[Form, int] = defaultdict(int)
        self.before: dict[Form, Sequence[Any]] = {}
        self.recordings: dict[Form, Recording] = {}

    def __call__(self, inputs: Any) -> Any:
        """The function's result."""
        if self.what in self.obstacles:
            return self.function(inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        same = (self.what, self.kind, spec)
        num_eager = 1 if same in self.passed else NUM_EAGER
        try:
            form = (spec, *map(form_of, leaves))
            if form not in self.recordings and self.calls[form] >= num_eager:
                before = self.before.pop(form)
                self.recordings[form] = Recording(self.function, leaves, before, spec)
        except (TypeError, RuntimeError) as error:
            self._give_up(in_one_line(error.__context__ or error))  # `capture_end` fails too
            return self.function(inputs)
        if form in self.recordings:
            recording = self.recordings[form]
            return recording.replay(leaves) if recording.fits(leaves) else self.function(inputs)
        self.before[form] = leaves
        self.calls[form] += 1
        if len(self.before) > MIN_CALLS:
            self._give_up("a number among its inputs differs in every step: return a tensor")
        if self.calls[form] < num_eager or same in self.passed:
            return self.function(inputs)
        with Obstacles() as found:  # type: ignore[no-untyped-call]
            result = self.function(inputs)
        if found.first:
            self._give_up(f"it has the operation {found.first}")
        else:
            self.passed.add(same)
        return result

    def _give_up(self, reason: str) -> None:
        self.obstacles[self.what] = reason
        log.warning("%s is not recorded as a CUDA graph: %s", self.what, reason)
