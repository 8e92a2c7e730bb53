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
- After each message the SuperNode sends what replies there are, once. One that is left over from
  another run takes the place of the reply that comes a little later, which then waits for the next
  message. Here the replies of other runs wait for the message's own.
"""

import functools
import os
import time
from collections.abc import Sequence
from types import SimpleNamespace

import flwr.supernode.nodestate.nodestate_factory as factory
import flwr.supernode.start_client_internal as client_loop
from flwr.app import Error, Message
from flwr.common.constant import SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.nodestate.in_memory_nodestate import (
    CLIENT_APP_CRASHED_ERROR,
    InMemoryNodeState,
)

from deployment.flower import replace

poll_s = float(os.environ.get("KEEL_POLL_S") or 0.25)
arrays_limit_s = 30.0


def sleep_at_most(seconds: float) -> None:
    """Wait as asked, but no longer than `poll_s`."""
    time.sleep(min(seconds, poll_s))


class AnsweringNodeState(InMemoryNodeState):
    """A SuperNode's state in which a ClientApp that ended without a reply has failed."""

    last = ""  # id of the message taken last: the SuperNode takes no other before its reply

    def store_message(self, message: Message) -> str | None:
        """As Flower's; keeps in mind which message wants a reply."""
        if not message.metadata.reply_to_message_id:
            self.last = message.metadata.message_id
        return super().store_message(message)

    def get_messages(
        self,
        *,
        run_ids: Sequence[int] | None = None,
        is_reply: bool | None = None,
        limit: int | None = None,
    ) -> Sequence[Message]:
        """As Flower's; no replies of other runs while the last message has none."""
        with self.lock_msg_store:
            entry = self.msg_store.get(self.last)
            replies = (each.message.metadata for each in self.msg_store.values())
            is_answered = any(about.reply_to_message_id == self.last for about in replies)
            if is_reply and run_ids is None and entry and not is_answered:
                run_ids = [entry.message.metadata.run_id]
        return super().get_messages(run_ids=run_ids, is_reply=is_reply, limit=limit)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """As Flower's, with an error reply to the messages that the task leaves unanswered."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != SubStatus.COMPLETED:
            for task in self.get_tasks(task_ids=[task_id]):
                if task.type == TaskType.CLIENT_APP:
                    self._store_error_replies({task.run_id}, CLIENT_APP_CRASHED_ERROR)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """As Flower's, also for messages that the task had not fetched when it ended."""
        with self.lock_msg_store:
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
