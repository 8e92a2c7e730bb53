"""`flower-supernode`, with the same options, quicker to ask and always answering.

Four things of Flower 1.39 that no option changes:
- It waits 3 seconds between two questions when there was nothing, and 0.5 seconds between two looks
  for the reply. Both waits go through one module's name `time`, which stands here for a clock that
  never sleeps longer than $KEEL_POLL_S (0.25 seconds).
- A ClientApp that is ended before its reply (its executor was stopped or killed) leaves the
  SuperNode waiting for that reply for good; one that had not yet fetched its message does so even
  once Flower has noticed. Here the message is answered with an error.
- A ServerApp that is killed as it sends leaves a message without its arrays, for which the
  SuperNode waits 3 minutes and does nothing else. Here it gives up after half a minute.
- After each message the SuperNode sends what replies there are, once. One that is left over takes
  the place of the reply that comes a little later, which then waits for the next message; one
  whose ClientApp died before all of it was there is waited for for good. Here the message's own
  reply is waited for until it is whole, and one that never will be becomes an error.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import flwr.supernode.nodestate.nodestate_factory as factory
import flwr.supernode.start_client_internal as client_loop
from flwr.app import Error, Message, Metadata
from flwr.common.constant import SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate.in_memory_nodestate import (
    CLIENT_APP_CRASHED_ERROR,
    InMemoryNodeState,
)

from deployment.flower import is_whole, replace

poll_s = float(os.environ.get("KEEL_POLL_S") or 0.25)
arrays_limit_s = 30.0


def sleep_at_most(seconds: float) -> None:
    """Wait as asked, but no longer than `poll_s`."""
    time.sleep(min(seconds, poll_s))


class AnsweringNodeState(InMemoryNodeState):
    """A SuperNode's state in which a ClientApp that ended without a reply has failed."""

    last = ""  # id of the message taken last: the SuperNode takes no other before its reply

    def store_message(self, message: Message) -> str | None:
        """As Flower's; a message that is taken again begins anew, without an old reply."""
        about = message.metadata
        if not about.reply_to_message_id:
            self.last = about.message_id
            self._drop_replies(lambda reply: reply.reply_to_message_id == about.message_id)
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

    def _waits(self) -> bool:
        """Whether the last message is without a reply; one that could not be taken is gone."""
        with self.lock_msg_store:
            about = [entry.message.metadata for entry in self.msg_store.values()]
            replies = [each.message_id for each in about if each.reply_to_message_id == self.last]
            has_reply = any(is_whole(reply, self.object_store) for reply in replies)
            return self.last in self.msg_store and not has_reply

    def _drop_replies(self, is_dropped: Callable[[Metadata], bool]) -> None:
        with self.lock_msg_store:
            about = [entry.message.metadata for entry in self.msg_store.values()]
            replies = [each for each in about if each.reply_to_message_id and is_dropped(each)]
            self.delete_messages(message_ids=[each.message_id for each in replies])
            for each in replies:
                self.object_store.delete(each.message_id)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """As Flower's, with an error reply to the messages that the task leaves unanswered."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != SubStatus.COMPLETED:
            for task in self.get_tasks(task_ids=[task_id]):
                if task.type == TaskType.CLIENT_APP:
                    self._store_error_replies({task.run_id}, CLIENT_APP_CRASHED_ERROR)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """As Flower's, also for messages not yet fetched, or whose reply was not all there."""
        store = self.object_store
        with self.lock_msg_store:
            self._drop_replies(
                lambda reply: reply.run_id in run_ids and not is_whole(reply.message_id, store)
            )
            for entry in self.msg_store.values():
                about = entry.message.metadata
                if about.run_id in run_ids and not about.reply_to_message_id:
                    entry.is_retrieved = True
        super()._store_error_replies(run_ids, error)


def main() -> None:
    """As `flower-supernode`."""
    replace(client_loop, "time", SimpleNamespace(sleep=sleep_at_most), time)
    pull = functools.partial(pull_objects, max_time=arrays_limit_s)
    replace(client_loop, "pull_objects", pull, pull_objects)
    replace(factory, "InMemoryNodeState", AnsweringNodeState, InMemoryNodeState)
    flower_supernode()


if __name__ == "__main__":
    main()
