"""What Keel uses of Flower 1.39 beyond its public API, and every patch of Flower's processes.

No other module of Keel imports from `flwr` anything but `flwr.app`, `flwr.serverapp`,
`flwr.clientapp` and `flwr.__version__`. Each entry names what it replaces, why, and the public way
if there is one; `tests/test_flower_compat.py` checks each of them against the installed version.

This module is cheap to import and free of torch. The patched processes have a module each:

    superlink.py     flower-superlink that delivers a lost message again
    supernode.py     flower-supernode that polls quickly and answers every message
    superexec.py     flower-superexec that forks ClientApps instead of starting a Python for each
    registration.py  whether a SuperLink knows a client's key, without changing anything there
"""

import sys
from types import ModuleType

from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode as ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.serverapp import Grid
from flwr.supercore.exit import add_exit_handler as add_exit_handler
from flwr.supercore.task_identity import TaskIdentity


class FlowerChanged(RuntimeError):
    """The installed Flower is not the one that this module was written for."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: not as in Flower 1.39, which Keel needs; install that version")


# --- server ----------------------------------------------------------------------------------
def is_in_process_grid(grid: Grid) -> bool:
    """Whether all clients are there from the start, or never: a simulation.

    Uses: the name of the simulation's grid type. Public way: none; `Grid` does not say.
    """
    return type(grid).__name__ in ("InMemoryGrid", "InlineGrid")


def bound_superlink_retries(grid: Grid, max_time_s: float) -> None:
    """Let a deployment's grid give up after `max_time_s` without a SuperLink.

    Replaces: endless retries, which leave a run's process behind for good. Public way: none.
    """
    if is_in_process_grid(grid):
        return
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is None or not hasattr(invoker, "max_time"):
        raise FlowerChanged(f"{type(grid).__name__}._retry_invoker.max_time")
    invoker.max_time = max_time_s


def begin_task(run_id: int) -> None:
    """Set what Flower's runtimes set before they start an app: without it, no Message can be made.

    Uses: `flwr.supercore.task_identity`. Public way: none outside Flower's runtimes.
    """
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, 1, 1


def assign_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that a grid gives it as it is sent.

    Uses: `Metadata._message_id`. Public way: none; `message_id` has no setter.
    """
    message.metadata.__dict__["_message_id"] = message_id
    if message.metadata.message_id != message_id:
        raise FlowerChanged("Metadata._message_id")


def assign_source_node(message: Message, node_id: int) -> None:
    """Give a reply the node it stands for, where the SuperLink answered in that node's place.

    Uses: `Metadata._src_node_id`. Public way: none; `src_node_id` has no setter.
    """
    message.metadata.__dict__["_src_node_id"] = node_id
    if message.metadata.src_node_id != node_id:
        raise FlowerChanged("Metadata._src_node_id")


# --- deployment ------------------------------------------------------------------------------
# Between a ClientApp's process and the resident worker, messages travel as Flower's own protobuf.
# Uses: flwr.common.serde and flwr.proto. Public way: none; flwr.app's types do not serialise.

superlink_unavailable = "Connection to the SuperLink is unavailable"  # printed by `flwr`


def message_to_bytes(message: Message) -> bytes:
    """The message, serialised."""
    return bytes(message_to_proto(message).SerializeToString())


def message_from_bytes(content: bytes) -> Message:
    """Inverse of `message_to_bytes`."""
    return message_from_proto(MessageProto.FromString(content))


def context_to_bytes(context: Context) -> bytes:
    """The context, serialised."""
    return bytes(context_to_proto(context).SerializeToString())


def context_from_bytes(content: bytes) -> Context:
    """Inverse of `context_to_bytes`."""
    return context_from_proto(ContextProto.FromString(content))


def records_to_bytes(records: RecordDict) -> bytes:
    """The content of a message, serialised."""
    return bytes(recorddict_to_proto(records).SerializeToString())


def records_from_bytes(content: bytes) -> RecordDict:
    """Inverse of `records_to_bytes`."""
    return recorddict_from_proto(RecordDictProto.FromString(content))


def replace(module: ModuleType, name: str, replacement: object, expected: object) -> None:
    """Replace `name` in a module of Flower's. Ends the process if it is not `expected` there."""
    if vars(module).get(name) is not expected:
        sys.exit(f"error: {FlowerChanged(f'{module.__name__}.{name}')}")
    setattr(module, name, replacement)
