"""`flower-supernode`, with the same options, quicker to ask and always answering.

What no option of Flower 1.39 changes:
- It waits 3 seconds between two questions when there was nothing, and 0.5 seconds between two looks
  for the reply. Both waits go through one module's name `time`, which stands here for a clock that
  never sleeps longer than $KEEL_POLL_S (0.25 seconds).
- A ServerApp that is killed as it sends leaves a message without its arrays, for which the
  SuperNode waits 3 minutes and does nothing else. Here it gives up after half a minute.
- A ClientApp that ends without a reply, or with half of one (its executor was stopped or killed),
  leaves the SuperNode waiting for it for good. Here its message is answered with an error.
- After each message the SuperNode sends what replies there are, once. One that is left over takes
  the place of the reply that comes a little later, which then waits for the next message. Here
  the message's own reply is waited for until it is whole, and what is left over is dropped.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import flwr.supernode.nodestate.nodestate_factory as factory
import flwr.supernode.start_client_internal as client_loop
from flwr.app import Message, Metadata
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate.in_memory_nodestate import (
    CLIENT_APP_CRASHED_ERROR,
    InMemoryNodeState,
)

from keel.deployment.flower import is_whole, replace

poll_s = float(os.environ.get("KEEL_POLL_S") or 0.25)
arrays_limit_s = 30.0


def sleep_at_most(seconds: float) -> None:
    """Wait as asked, but no longer than `poll_s`."""
    time.sleep(min(seconds, poll_s))


class AnsweringNodeState(InMemoryNodeState):
    """A SuperNode's state in which a message has an answer once its task has ended.

    The SuperNode takes one message after the other: first it makes the task, then it stores the
    message. `last` is the message's id, `last_task` the task's.
    """

    last, last_task = "", 0

    def create_task(self, *arguments: Any, **options: Any) -> int | None:
        """As Flower's; keeps its id in mind."""
        task_id = super().create_task(*arguments, **options)
        self.last_task = task_id or 0
        return task_id

    def store_message(self, message: Message) -> str | None:
        """As Flower's; with a new message, replies to those before it are of no use any more.

        What was not sent was not asked for either: its message could not be taken, and is given
        again, or its run has ended.
        """
        with self.lock_msg_store:
            if not message.metadata.reply_to_message_id:
                self.last = message.metadata.message_id
                self._drop(lambda about: bool(about.reply_to_message_id))
            return super().store_message(message)

    def get_messages(
        self,
        *,
        run_ids: Sequence[int] | None = None,
        is_reply: bool | None = None,
        limit: int | None = None,
    ) -> Sequence[Message]:
        """As Flower's; no replies before the last message has its own, whole."""
        if is_reply and self._waits():
            run_ids = []  # none, but Flower looks for ClientApps that died
        return super().get_messages(run_ids=run_ids, is_reply=is_reply, limit=limit)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """As Flower's; a ClientApp calls itself completed even if it could not send its reply."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and task_id == self.last_task:
            self._answer()
        return finished

    def _on_task_tokens_expired(self, tasks: list[Task]) -> None:
        """As Flower's, but only the task's own message is answered."""
        super()._on_task_tokens_expired([t for t in tasks if t.type != TaskType.CLIENT_APP])
        if any(task.task_id == self.last_task for task in tasks):
            self._answer()

    def _waits(self) -> bool:
        """Whether the last message is without a reply; one that could not be taken is gone."""
        with self.lock_msg_store:
            about = [entry.message.metadata for entry in self.msg_store.values()]
            replies = [each.message_id for each in about if each.reply_to_message_id == self.last]
            has_reply = any(is_whole(reply, self.object_store) for reply in replies)
            return self.last in self.msg_store and not has_reply

    def _answer(self) -> None:
        """An error to the last message, whose task has ended, unless it has a reply."""
        with self.lock_msg_store:
            if not self._waits():
                return
            self._drop(lambda about: about.reply_to_message_id == self.last)
            self.object_store.delete(self.last)  # where its ClientApp has not fetched it
            entry = self.msg_store[self.last]
            entry.is_retrieved = True  # Flower answers no other
            if self.last not in self.time_store:
                self.record_message_processing_start(self.last)
            self._store_error_replies({entry.message.metadata.run_id}, CLIENT_APP_CRASHED_ERROR)

    def _drop(self, is_dropped: Callable[[Metadata], bool]) -> None:
        """Take out messages, and what they hold."""
        about = [entry.message.metadata for entry in self.msg_store.values()]
        dropped = [each.message_id for each in about if is_dropped(each)]
        self.delete_messages(message_ids=dropped)
        for message in dropped:
            self.object_store.delete(message)


def main() -> None:
    """As `flower-supernode`."""
    replace(client_loop, "time", SimpleNamespace(sleep=sleep_at_most), time)
    pull = functools.partial(pull_objects, max_time=arrays_limit_s)
    replace(client_loop, "pull_objects", pull, pull_objects)
    replace(factory, "InMemoryNodeState", AnsweringNodeState, InMemoryNodeState)
    flower_supernode()


if __name__ == "__main__":
    main()
