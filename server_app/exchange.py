"""Messages out, replies in: with a deadline, and polled often enough that nobody waits for us.

Flower's own `send_and_receive` polls every 3 seconds in deployment.
"""

import time
from collections.abc import Callable, Iterable

from flwr.app import Message
from flwr.serverapp import Grid

fastest_poll_s, slowest_poll_s = 0.02, 0.5


def exchange(
    grid: Grid,
    messages: Iterable[Message],
    timeout_s: float,
    on_reply: Callable[[Message], None] = lambda reply: None,
) -> list[Message]:
    """The replies that came before the deadline, in the order in which they came.

    Polls ever more slowly, from 20 ms to half a second; each reply starts over.
    """
    waiting = set(grid.push_messages(messages))
    deadline = time.monotonic() + timeout_s
    replies: list[Message] = []
    poll_s = fastest_poll_s
    while waiting and time.monotonic() < deadline:
        arrived = list(grid.pull_messages(waiting))
        for reply in arrived:
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
            on_reply(reply)
        if waiting:
            poll_s = fastest_poll_s if arrived else min(poll_s * 1.5, slowest_poll_s)
            time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
    return replies
