"""`flower-supernode`, with the same options, quicker to ask and always answering.

Three things of Flower 1.39 that no option changes:
- It waits 3 seconds between two questions when there was nothing, and 0.5 seconds between two looks
  for the reply. Both waits go through one module's name `time`, which stands here for a clock that
  never sleeps longer than $KEEL_POLL_S (0.25 seconds).
- A ClientApp that is ended before its reply (its executor was stopped or killed) leaves the
  SuperNode waiting for that reply for good; one that had not yet fetched its message does so even
  once Flower has noticed. Here the message is answered with an error.
- A ServerApp that is killed as it sends leaves a message without its arrays, for which the
  SuperNode waits 3 minutes and does nothing else. Here it gives up after half a minute.
"""

import functools
import os
import time
from types import SimpleNamespace

import flwr.supernode.nodestate.nodestate_factory as factory
import flwr.supernode.start_client_internal as client_loop
from flwr.app import Error
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
