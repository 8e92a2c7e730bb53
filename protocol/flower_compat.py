"""Everything of Keel that depends on internals of Flower 1.39, in one place.

Each function says what it replaces, why, and the public way if there is one.
tests/test_flower_compat.py checks each against the installed Flower.
"""

from typing import Any

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.supercore.exit import add_exit_handler
from flwr.supercore.task_identity import TaskIdentity

# --- server and inline engine --------------------------------------------------------------------

# Error codes of replies. Flower documents `Error.code` and has no public list of its values.
NO_REPLY = ErrorCode.UNKNOWN  # ours, for a reply that never came
NODE_UNAVAILABLE = ErrorCode.NODE_UNAVAILABLE  # the SuperNode is no longer connected
UNDELIVERED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
CRASHED = (ErrorCode.CLIENT_APP_CRASHED, *UNDELIVERED)  # the ClientApp died on the message


def is_in_process_grid(grid: object) -> bool:
    """Whether all nodes exist from the start and none can leave or return: a simulation.

    Replaces nothing. Flower gives a ServerApp no public way to tell a simulation's grid from a
    deployment's: its class is recognised by name, as importing it would load the whole SuperLink.
    Grids of our own say it with an attribute `is_in_process`.
    """
    return bool(getattr(grid, "is_in_process", type(grid).__name__ == "InMemoryGrid"))


def bound_superlink_retries(grid: object, seconds: float) -> None:
    """Let a deployment's grid raise once its SuperLink has been out of reach for this long.

    Replaces the limit of the grid's private retry invoker, which retries for ever, so that a
    ServerApp whose SuperLink is gone would never end. No public way. Does nothing in simulation.
    """
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is not None:
        invoker.max_time = seconds


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
    _metadata(message)["_message_id"] = message_id


def assign_source_node(message: Message, node_id: int) -> None:
    """Set the node that a reply counts as coming from.

    Replaces the read-only `Metadata.src_node_id`: errors come from the SuperLink in a client's
    place, and a restarted SuperNode has another id. Flower's own error replies do the same. No
    public way.
    """
    _metadata(message)["_src_node_id"] = node_id


def _metadata(message: Message) -> dict[str, Any]:
    return message.metadata.__dict__


def on_process_exit(function: Any) -> None:
    """Call this when Flower ends the ServerApp's process: `flwr stop`, a signal, a lost SuperLink.

    Flower ends it with `os._exit`, past every `finally` of a ServerApp in a thread (simulation).
    Flower's own handlers are registered in the same way; the function is not part of its documented
    API.
    """
    add_exit_handler(function)
