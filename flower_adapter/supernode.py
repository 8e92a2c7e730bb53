"""`flower-supernode` that polls quickly and answers every message.

What replaces a part of Flower says which, and why; `main` puts it in place. Public way: none, as
Flower 1.39 has no option for any of it.
"""

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import flwr.supernode.nodestate.nodestate_factory as factory
import flwr.supernode.start_client_internal as client_loop
from flwr.app import Message, Metadata
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import ExitCode
from flwr.supercore.exit.exit_code import EXIT_CODE_HELP
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR, InMemoryNodeState

from flower_adapter import replace
from flower_adapter.objects import is_complete

# Replaces `time` in the client loop. Why: the SuperNode waits 3 s between two requests when there
# was no message, and 0.5 s between two looks for a reply. No wait is longer than $KEEL_POLL_S here.
default_poll_s = 0.25
# Replaces `pull_objects`. Why: if a ServerApp is killed while it sends, its message lacks arrays,
# and the SuperNode does nothing but wait for them for 3 minutes.
arrays_timeout_s = 30.0
# Added to the text of an exit code. Why: a SuperLink that refuses a second SuperNode with the key
# of a connected one says *Failed to activate SuperNode*, and nothing else.
activation_hint = (
    "If the SuperLink knows the key but cannot activate the SuperNode, another SuperNode with this "
    "key is connected, or was until less than a minute ago: end that one, or give this one the key "
    "of its own client."
)


class AnsweringNodeState(InMemoryNodeState):
    """A SuperNode's state in which a message has an answer once its task has ended.

    Replaces `InMemoryNodeState`. Why: if a ClientApp ends without a reply or with half of one (its
    executor was stopped or killed), the SuperNode waits for it forever; here it is answered with an
    error. And after each message the SuperNode sends the replies it has, once: a left-over
    reply is sent in place of the one that comes a little later, which then waits for the next
    message. Here it waits for the message's own, complete reply and drops left-over ones.

    The SuperNode handles one message at a time: it creates the task, then stores the message.
    `message_id` and `task_id` are those of the newest message.
    """

    message_id, task_id = "", 0

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """Create the task and remember its id."""
        task_id = super().create_task(*args, **kwargs)
        self.task_id = task_id or 0
        return task_id

    def store_message(self, message: Message) -> str | None:
        """Store the message; a new one drops the replies to earlier ones.

        Such a reply was never sent because its message was not received completely (it is delivered
        again) or because its run has ended.
        """
        with self.lock_msg_store:
            if not message.metadata.reply_to_message_id:
                self.message_id = message.metadata.message_id
                self._drop(lambda metadata: bool(metadata.reply_to_message_id))
            return super().store_message(message)

    def get_messages(
        self,
        *,
        run_ids: Sequence[int] | None = None,
        is_reply: bool | None = None,
        limit: int | None = None,
    ) -> Sequence[Message]:
        """Return messages, but no reply before the newest message has its own, complete one.

        Then other, incomplete ones are dropped: the SuperNode would wait for them forever.
        """
        if is_reply and self._awaits_reply():
            run_ids = []  # matches nothing, but lets Flower look for ClientApps that died
        elif is_reply:
            with self.lock_msg_store:
                self._drop(
                    lambda metadata: (
                        bool(metadata.reply_to_message_id)
                        and not is_complete(metadata.message_id, self.object_store)
                    )
                )
        return super().get_messages(run_ids=run_ids, is_reply=is_reply, limit=limit)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """Finish the task; answer its message if a ClientApp that reports success sent no reply."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and task_id == self.task_id:
            self._answer_with_error()
        return finished

    def _on_task_tokens_expired(self, tasks: list[Task]) -> None:
        """Answer only the message of the task that expired."""
        super()._on_task_tokens_expired([t for t in tasks if t.type != TaskType.CLIENT_APP])
        if any(task.task_id == self.task_id for task in tasks):
            self._answer_with_error()

    def _awaits_reply(self) -> bool:
        """Whether the newest message is here (received completely) and lacks a complete reply."""
        with self.lock_msg_store:
            stored = [entry.message.metadata for entry in self.msg_store.values()]
            replies = [m.message_id for m in stored if m.reply_to_message_id == self.message_id]
            has_reply = any(is_complete(reply, self.object_store) for reply in replies)
            return self.message_id in self.msg_store and not has_reply

    def _answer_with_error(self) -> None:
        """Answer the newest message, whose task has ended, unless it has a reply."""
        with self.lock_msg_store:
            if not self._awaits_reply():
                return
            self._drop(lambda metadata: metadata.reply_to_message_id == self.message_id)
            self.object_store.delete(self.message_id)  # if its ClientApp has not fetched it
            entry = self.msg_store[self.message_id]
            entry.is_retrieved = True  # Flower answers no other
            if self.message_id not in self.time_store:
                self.record_message_processing_start(self.message_id)
            self._store_error_replies({entry.message.metadata.run_id}, CLIENT_APP_CRASHED_ERROR)

    def _drop(self, is_dropped: Callable[[Metadata], bool]) -> None:
        """Delete messages and everything in them."""
        stored = [entry.message.metadata for entry in self.msg_store.values()]
        dropped = [metadata.message_id for metadata in stored if is_dropped(metadata)]
        self.delete_messages(message_ids=dropped)
        for message_id in dropped:
            self.object_store.delete(message_id)


def longest_wait_s() -> float:
    """$KEEL_POLL_S. Ends the process, with one line, unless it is a number of seconds above 0."""
    text = os.environ.get("KEEL_POLL_S") or str(default_poll_s)
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    sys.exit(f"error: KEEL_POLL_S = {text!r}: expected a number of seconds > 0")


def main() -> None:
    """Run `flower-supernode` with its options, and with what this file replaces."""
    poll_s = longest_wait_s()
    short = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, poll_s)))
    replace(client_loop, "time", short, time)
    pull = functools.partial(pull_objects, max_time=arrays_timeout_s)
    replace(client_loop, "pull_objects", pull, pull_objects)
    replace(factory, "InMemoryNodeState", AnsweringNodeState, InMemoryNodeState)
    EXIT_CODE_HELP[ExitCode.SUPERNODE_CONNECTION_ERROR] += f" {activation_hint}"
    flower_supernode()
