"""What Keel uses of Flower 1.39 beyond its public API, and every patch of Flower's processes.

No other module of Keel imports from `flwr` anything but `flwr.app`, `flwr.serverapp` and its
`strategy`, `flwr.clientapp`, `flwr.simulation` and `flwr.__version__`. Each entry says what it
replaces, why, and the public way if there is one; tests/test_flower_adapter.py and
tests/test_flower_processes.py check each against the installed Flower.

This module is cheap to import and free of torch. The patched processes have a module each:

    superlink.py     flower-superlink that delivers a lost message again
    objects.py       whether a message has arrived whole
    supernode.py     flower-supernode that polls quickly and answers every message
    superexec.py     flower-superexec that forks ClientApps instead of starting a Python for each
    serverapp.py     flwr-serverapp that installs the app whole
    app_install.py   installs an app whole, or again, and runs nothing but its code
    aggregation.py   functions of Flower's robust strategies
    registration.py  whether a SuperLink knows a client's key, without changing anything there
"""

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.supercore.constant import FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS
from flwr.supercore.exit import add_exit_handler
from flwr.supercore.inflatable.inflatable_object import get_object_body
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.task_identity import TaskIdentity

from protocol.text import in_one_line

# --- server and inline engine --------------------------------------------------------------------

# Error codes of replies. Flower documents `Error.code` and has no public list of its values.
NO_REPLY = ErrorCode.UNKNOWN  # ours, for a reply that never came
NODE_UNAVAILABLE = ErrorCode.NODE_UNAVAILABLE  # the SuperNode is no longer connected
CLIENT_FAILED = 1  # the client says that it failed; Flower's own codes start at 0, unknown
SUPERLINK_NODE = SUPERLINK_NODE_ID  # the source of a reply that the SuperLink gives for a node
UNDELIVERED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
CRASHED = (ErrorCode.CLIENT_APP_CRASHED, *UNDELIVERED)  # the ClientApp died on the message
# Keel's own: the process can no longer use the GPU and is to end (RESET_NEEDED is 100)
GPU_LOST = 101
TOO_LARGE = "more than the bound of"
# of one of Flower's objects: it splits arrays into smaller ones
MAX_OBJECT_BYTES = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 2**20
NotPushedError = ObjectPushError  # of `push_messages`: its session at the SuperLink has expired


def is_in_process_grid(grid: object) -> bool:
    """Whether this is the grid of a simulation, whose nodes are all there from the start.

    Replaces nothing. Flower gives a ServerApp no public way to tell a simulation's grid from a
    deployment's: its class is recognised by name, as importing it would load the whole SuperLink.
    """
    return type(grid).__name__ == "InMemoryGrid"


def bound_superlink_retries(grid: object, seconds: float) -> None:
    """Let a deployment's grid retry while its SuperLink is out of reach, for this long, then raise.

    Replaces the limit of the grid's private retry invoker, which retries forever, so that a
    ServerApp whose SuperLink is gone would never end; and what `wait_out_time_outs` says. No public
    way. Does nothing in simulation.
    """
    if invoker := getattr(grid, "_retry_invoker", None):
        wait_out_time_outs(invoker).max_time = seconds


def wait_out_time_outs(invoker: Any) -> Any:
    """Flower's retry invoker for HTTP, which also retries after time-outs and failures.

    Replaces its rule to give up at once on any error with "tls" or "ssl" in its text, such as a
    handshake that timed out, and on a status of 500 and above. No public way.
    """
    gives_up = invoker.should_giveup

    def should_give_up(error: Exception) -> bool:
        response = getattr(error, "response", None)
        if response is None:
            text = str(error).lower()
            return "certificate" in text and "has expired" not in text  # it may be renewed
        return response.status_code < 500 and bool(gives_up(error))

    invoker.should_giveup = should_give_up
    return invoker


class BoundedPull:
    """`pull_objects` of a grid's module, which gives up a reply that has more than `max_bytes`.

    Replaces it: Flower collects whatever a client has sent, in memory. It pulls as many objects at
    once as fit into the bound, but one at least. No public way.
    """

    def __init__(self, pull: Callable[..., dict[str, bytes]]) -> None:
        self.pull, self.max_bytes = pull, 0

    def __call__(
        self, object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any
    ) -> dict[str, bytes]:
        """Pull the objects with Flower's function; raise ObjectPullError beyond `max_bytes`."""
        lock, size, max_bytes = threading.Lock(), 0, self.max_bytes

        def counted(object_id: str) -> bytes:
            nonlocal size
            if size <= max_bytes:
                content = pull_object_fn(object_id)
                with lock:
                    size += len(content)
            if size > max_bytes:
                raise ObjectPullError(object_id, f"{TOO_LARGE} {max_bytes} bytes")
            return content

        fitting = max(1, max_bytes // MAX_OBJECT_BYTES)
        max_pulls = min(FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS, fitting)
        return self.pull(object_ids, counted, **{"max_concurrent_pulls": max_pulls} | options)


def inflate_or_fail(object_id: str, object_contents: dict[str, bytes], **options: Any) -> Message:
    """`inflate_object_from_contents` of a grid's module; an error for a reply that is damaged.

    Replaces it: Flower raises, and so loses the other replies of the same request, which it has
    already confirmed. No public way.
    """
    root = object_contents[object_id]  # inflating removes it
    try:
        message = inflate_object_from_contents(object_id, object_contents, **options)
        if isinstance(message, Message):
            return message
        raise TypeError(f"a {type(message).__name__} in place of a message")
    except Exception as error:
        about = MessageProto.FromString(get_object_body(root, Message)).metadata
        reason = in_one_line(f"the reply cannot be read: {type(error).__name__}: {error}")
        return make_message(metadata=metadata_from_proto(about), error=Error(CLIENT_FAILED, reason))


def is_too_large(reply: Message) -> bool:
    """Whether a reply had more bytes than `bound_pulls` allows."""
    return reply.has_error() and TOO_LARGE in (reply.error.reason or "")


def bound_pulls(grid: object, max_bytes: int) -> None:
    """Let a deployment's grid refuse damaged replies, and while they arrive, those with more bytes.

    Of several bounds the largest holds, as clients may be queried while others train.
    """
    module = sys.modules[type(grid).__module__]
    if "pull_objects" not in vars(module):  # a grid of a test
        return
    if not isinstance(module.pull_objects, BoundedPull):
        replace(module, "pull_objects", BoundedPull(pull_objects), pull_objects)
        inflate = inflate_object_from_contents
        replace(module, "inflate_object_from_contents", inflate_or_fail, inflate)
    module.pull_objects.max_bytes = max(module.pull_objects.max_bytes, max_bytes)


def begin_task(run_id: int) -> None:
    """Let this process create messages, as server and clients of this run.

    Replaces what Flower's runtimes set before they start an app; `Message` reads it on creation and
    raises without it. No public way to create messages outside Flower's runtimes.
    """
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, 1, 1


def assign_message_id(message: Message, message_id: str) -> None:
    """Give a message its id, as sending it through one of Flower's grids does.

    Replaces the read-only `Metadata.message_id`, which only Flower's own grids set. No public way.
    """
    message.metadata.__dict__["_message_id"] = message_id


def assign_source_node(message: Message, node_id: int) -> None:
    """Set the node that a reply counts as coming from.

    Replaces the read-only `Metadata.src_node_id`: errors come from the SuperLink in a client's
    place, and a restarted SuperNode has another id. Flower's own error replies do the same. No
    public way.
    """
    message.metadata.__dict__["_src_node_id"] = node_id


def on_process_exit(function: Any) -> None:
    """Call this when Flower ends the ServerApp's process: `flwr stop`, a signal, a lost SuperLink.

    Flower ends it with `os._exit`, past every `finally` of a ServerApp in a thread (simulation).
    Flower's own handlers are registered in the same way; the function is not part of its documented
    API.
    """
    add_exit_handler(function)


# --- deployment ------------------------------------------------------------------------------

# Between a ClientApp's process and the resident worker, messages travel as Flower's own protobuf.
# Uses: flwr.common.serde and flwr.proto. Public way: none; flwr.app's types do not serialise.

T = TypeVar("T", Message, Context, RecordDict)
SERDE: dict[type, tuple[Any, Any, Any]] = {  # to protobuf, from it, its class
    Message: (message_to_proto, message_from_proto, MessageProto),
    Context: (context_to_proto, context_from_proto, ContextProto),
    RecordDict: (recorddict_to_proto, recorddict_from_proto, RecordDictProto),
}


def to_bytes(value: Message | Context | RecordDict) -> bytes:
    """A message, a context or the content of a message, serialised."""
    to_proto, _, _ = SERDE[type(value)]
    return bytes(to_proto(value).SerializeToString())


def from_bytes(kind: type[T], content: bytes) -> T:
    """Inverse of `to_bytes`."""
    _, from_proto, proto = SERDE[kind]
    value: T = from_proto(proto.FromString(content))
    return value


class FlowerChanged(RuntimeError):
    """The installed Flower is not the one that this package was written for."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: not as in Flower 1.39, which Keel needs; install that version")


def replace(module: ModuleType, name: str, replacement: object, expected: object) -> None:
    """Replace `name` in a module of Flower's. Ends the process if it is not `expected` there."""
    if vars(module).get(name) is not expected:
        sys.exit(f"error: {FlowerChanged(f'{module.__name__}.{name}')}")
    setattr(module, name, replacement)
