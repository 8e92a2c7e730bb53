"""Sends messages and collects replies until a deadline, polling faster than Flower does.

Flower's own `send_and_receive` polls every 3 seconds in deployment, gives up on a restarted
SuperNode, and loses track of who was asked when the SuperLink replies in a client's place. Its
`pull_messages` waits for the arrays of a reply for as long as a client keeps sending some. Replies
of a deployment are therefore pulled in threads, beside the loop that keeps the deadline.
"""

import itertools
import logging
import queue
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.serverapp import Grid

from flower_adapter import (
    CLIENT_FAILED,
    CRASHED,
    NO_REPLY,
    NODE_UNAVAILABLE,
    SUPERLINK_NODE,
    TOO_LARGE,
    UNDELIVERED,
    NotPushedError,
    assign_source_node,
    bound_pulls,
    has_own_clients,
    is_in_process_grid,
)
from protocol.text import in_one_line, num_of

log = logging.getLogger("keel.server")
MAX_POLL_S, POLL_GROWTH = 0.5, 1.2
DEPLOYED_POLL_S = 0.1  # at first, in a deployment: each poll costs the SuperLink time
# simulation: every 10 ms, or less often if polling takes more than this share of a core
SIMULATION_POLL_S, POLL_SHARE = 0.01, 0.005
RETURN_TIMEOUT_S = 30.0  # for a SuperNode that went away to return
LOOK_EVERY_S = 1.0  # interval of looking for it
MAX_STOP_S = 30 * 86400.0  # simulation: a message that expires is lost with its reply
MAX_RESENDS = 2  # of a message whose reply was lost on its way
MAX_PULLS, SLOW_PULL_S = 4, 5.0  # at once; after so long, another is started beside a slow one
TICK_S = 1.0
SILENCE_S = 5.0  # a SuperLink that answers nothing for longer is away
# for SuperNodes to return after that: Flower readmits one that has ended after a minute, and it may
# take as long to be restarted
RECONNECT_S = 120.0
MAX_RECONNECTS = 2  # silences of a round that extend it so: a SuperLink that is only slow has many

# of these nodes, those whose client is connected again, with its current node; the second argument
# is the seconds to look
Returned = Callable[[list[int], float], Mapping[int, int]]


@dataclass
class Exchange:
    """Sends messages to the nodes of one grid and collects their replies, round after round.

    name: the client behind a node, for the log. returned: finds clients that are connected again;
    None: a node that is gone stays away (simulation). silent_s: how long the SuperLink has answered
    nothing. turns: how many clients a worker may have to train one after the other, by the number
    of messages just sent; the time limit is for one client. progress: told what is asked, how many
    clients have answered, and how many were asked.
    """

    grid: Grid
    name: Callable[[int], str] = "on node {}".format
    returned: Returned | None = None
    silent_s: Callable[[], float] = lambda: 0.0
    turns: Callable[[int], int] = lambda num_asked: 1
    progress: Callable[[str, int, int], None] = lambda what, num_replies, num_asked: None
    late: dict[str, str] = field(default_factory=dict)  # message id: description
    arrived_late: list[str] = field(default_factory=list)  # descriptions, see `take_late`

    def __post_init__(self) -> None:
        self.pulls: dict[int, float] = {}  # those under way: when each was started
        self.pulled: queue.SimpleQueue[tuple[int, list[Message], list[Exception]]]
        self.pulled = queue.SimpleQueue()
        self.numbers = itertools.count()
        self.one_by_one = False  # after a reply that could not be read
        self.silent: set[int] = set()  # nodes that gave no answer in time to the newest messages
        self.stopped_s = Stops().take
        # seconds of the SuperLink's silences that have ended since the last call, above SILENCE_S
        self.take_silence_s: Callable[[], float] = lambda: 0.0

    def ask(
        self,
        messages: Iterable[Message],
        timeout_s: float,
        what: str,
        key: str = "round-timeout",
        max_bytes: int = sys.maxsize,
        before_resend: Callable[[int], None] = lambda node: None,
        on_reply: Callable[[Message], None] | None = None,
    ) -> list[Message]:
        """One reply for each message, in their order; an error where none came in time.

        Each reply's source is the node that was asked, whoever replied in its place.

        A message to a node that goes away is sent again once its client returns, possibly as
        another node: within 30 seconds, or later if others are still awaited. A message whose reply
        was lost, or whose ClientApp ended, is sent again at most twice.

        The deadline moves by the time in which the SuperLink answers nothing, this process is
        stopped, or clients train in this process. After a silence of the SuperLink, even one before
        the messages are sent, clients get at least 2 minutes to reconnect; this extends the
        deadline at most twice.

        what: description for the log. key: the config key that `timeout_s` comes from.
        max_bytes: of a reply; a larger one is refused while it arrives, as is a late one above the
        largest bound so far. before_resend: called with the node of a message before it is sent
        again. on_reply: takes each reply as it arrives; then none is held, and none returned.
        Raises the error of a SuperLink that is gone for good.
        """
        deadline, reconnect_until = time.monotonic() + timeout_s, 0.0
        reconnects = 0
        bound_pulls(self.grid, max_bytes)
        self.drain()
        asked = {message.metadata.dst_node_id: message for message in messages}
        for message in asked.values():
            if is_in_process_grid(self.grid):
                message.metadata.ttl = timeout_s + MAX_STOP_S
        replies: dict[int, Message | None] = {}  # None: `on_reply` has it
        away: dict[int, tuple[float, Message]] = {}  # node: (when to give up, the error then)
        waiting: dict[str, int] = {}  # message id: the node whose reply it is
        node_now = {node: node for node in asked}  # a restarted SuperNode may have another
        resends: Counter[int] = Counter()

        def settle(node: int, reply: Message) -> None:
            assign_source_node(reply, node)
            replies[node] = reply if on_reply is None else None
            if on_reply:
                on_reply(reply)
            self.progress(what, len(replies), len(asked))

        def note_gone(node: int, error: Message) -> None:
            if self.returned is None:
                settle(node, error)
                return
            until = max(time.monotonic() + RETURN_TIMEOUT_S, reconnect_until)
            away.setdefault(node, (until, error))
            log.warning("%s: client %s is not connected", what, self.name(node))

        def note_silence(min_left_s: float) -> None:
            nonlocal deadline, reconnect_until, reconnects
            if self.take_silence_s() and reconnects < MAX_RECONNECTS:
                reconnects += 1
                reconnect_until = time.monotonic() + RECONNECT_S
                deadline = max(deadline, reconnect_until, time.monotonic() + min_left_s)
                for node, (until, error) in away.items():
                    away[node] = max(until, reconnect_until), error

        def sent_again(node: int, to: int) -> bool:
            before_resend(node)
            sent: dict[str, int] = {}
            about = asked[node].metadata
            ttl = max(1.0, deadline - time.monotonic())
            again = Message(
                asked[node].content, dst_node_id=to, message_type=about.message_type, ttl=ttl
            )
            again.metadata.group_id = about.group_id
            if self.push([again], sent):
                return False
            node_now[node] = to
            waiting.update(dict.fromkeys(sent, node))
            return True

        refused = self.push(list(asked.values()), waiting)
        note_silence(timeout_s)
        sent_at, turns = time.monotonic(), self.turns(len(asked))
        deadline += (turns - 1) * timeout_s
        self.progress(what, 0, len(asked))
        for message in refused:
            node = message.metadata.dst_node_id
            note_gone(node, failure(message, "its SuperNode is not connected"))
        is_inline = has_own_clients(self.grid)  # whose clients train while their replies are pulled
        first_s = SIMULATION_POLL_S if is_in_process_grid(self.grid) else DEPLOYED_POLL_S
        poll_s, looked_at, now = first_s, 0.0, sent_at
        while (waiting or away) and now < deadline:
            arrived = deque(sorted(self.pull(list(waiting), deadline - now), key=is_undelivered))
            note_silence(0)  # before any message is sent again
            has_arrived, max_poll_s = bool(arrived), MAX_POLL_S
            if is_in_process_grid(self.grid):  # a pull comes back at once
                pull_s = time.monotonic() - now
                max_poll_s = min(max(SIMULATION_POLL_S, pull_s / POLL_SHARE), MAX_POLL_S)
            while arrived:
                reply = arrived.popleft()  # and so freed once it is settled
                message_id = reply.metadata.reply_to_message_id
                source = waiting.pop(message_id, None)
                if source is None:
                    self.note_late(reply)
                    continue
                code = reply.error.code if reply.has_error() else None
                left_s = deadline - time.monotonic()
                # said by the node itself it is a failure like any other: it is there
                if code == NODE_UNAVAILABLE and reply.metadata.src_node_id == SUPERLINK_NODE:
                    reason = reply.error.reason or "its SuperNode went away"
                    note_gone(source, failure(asked[source], reason, NODE_UNAVAILABLE))
                elif code in UNDELIVERED and TOO_LARGE in (reply.error.reason or ""):
                    bound = str(reply.error.reason).partition(TOO_LARGE)[2].strip()
                    reason = in_one_line(f"the reply has {TOO_LARGE} {bound}")
                    settle(source, failure(asked[source], reason))
                elif code in UNDELIVERED and self.pulls:  # another pull may just have taken it
                    waiting[message_id] = source
                elif (
                    code in CRASHED
                    and self.returned is not None
                    and resends[source] < MAX_RESENDS
                    and left_s > timeout_s / 10
                ):
                    resends[source] += 1
                    name = self.name(source)
                    why = "reply was lost" if code in UNDELIVERED else "ClientApp has ended"
                    log.warning("%s: client %s's %s: asked again", what, name, why)
                    if not sent_again(source, node_now[source]):
                        note_gone(source, failure(asked[source], "its SuperNode is not connected"))
                elif code in (NO_REPLY, NODE_UNAVAILABLE):
                    # only Keel and the SuperLink set these; from a client it is any failure
                    settle(source, failure(asked[source], reply.error.reason or "", CLIENT_FAILED))
                else:
                    settle(source, reply)
            at = time.monotonic()  # a look takes time, in which a client may return
            if self.returned and away and at - looked_at >= LOOK_EVERY_S:
                looked_at = at
                look_s = (deadline - looked_at) / 2  # and time for what arrives meanwhile
                for node, new in self.returned(list(away), look_s).items():
                    if sent_again(node, new):
                        name = self.name(node)
                        log.info("%s: client %s is connected again and asked again", what, name)
                        del away[node]
            for node, (until, error) in list(away.items()):
                if at > until and not waiting and self.silent_s() <= SILENCE_S:
                    settle(node, error)
                    del away[node]
            if (waiting or away) and not (has_arrived and is_inline):
                poll_s = first_s if has_arrived else min(poll_s * POLL_GROWTH, max_poll_s)
                time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
            before, now = now, time.monotonic()
            if max(self.silent_s(), self.stopped_s()) > SILENCE_S or (has_arrived and is_inline):
                deadline += now - before
        self.pulls.clear()  # those in progress continue; their replies are late
        for message_id, node in waiting.items():
            self.late[message_id] = f"client {self.name(node)}'s reply to {what}"
        limit = key if turns == 1 else f"{turns} x {key}"
        silence = f"no answer within {limit} = {num_of('second', turns * timeout_s)}"
        self.silent = asked.keys() - replies.keys() - away.keys()
        for node, message in asked.items():
            if node not in replies:
                settle(node, away[node][1] if node in away else failure(message, silence))
        return [found for node in asked if (found := replies[node]) is not None]

    def pull(self, message_ids: list[str], max_wait_s: float) -> list[Message]:
        """The replies that have come, among them late ones.

        Waits for the answer for MAX_POLL_S at most, except in simulation, where it comes at once
        and clients may run in this thread. Raises the error of a SuperLink that is gone for good.
        """
        if is_in_process_grid(self.grid):
            return list(self.grid.pull_messages(message_ids)) if message_ids else []
        now = time.monotonic()
        # another pull is started only beside slow ones
        are_slow = all(now - started > SLOW_PULL_S for started in self.pulls.values())
        if message_ids and are_slow and len(self.pulls) < MAX_PULLS:
            number = next(self.numbers)
            self.pulls[number] = now
            groups = [[each] for each in message_ids] if self.one_by_one else [message_ids]
            threading.Thread(target=self.pull_groups, args=(number, groups), daemon=True).start()
        found: list[Message] = []
        wait_s = min(MAX_POLL_S, max_wait_s) if self.pulls else 0.0
        while True:
            try:
                number, replies, errors = self.pulled.get(timeout=wait_s)
            except queue.Empty:
                return found
            is_current = self.pulls.pop(number, None) is not None
            wait_s = 0.0  # for what else has arrived
            found += replies
            for error in errors:
                if is_current:
                    raise error
                self.one_by_one = True
                text = in_one_line(f"{type(error).__name__}: {error}")
                log.warning("a reply could not be read: %s", text)

    def pull_groups(self, number: int, groups: list[list[str]]) -> None:
        """In a thread: pull the replies to each group of messages, also after one that fails."""
        replies: list[Message] = []
        errors: list[Exception] = []
        for message_ids in groups:
            try:
                replies += self.grid.pull_messages(message_ids)
            except Exception as error:
                errors.append(error)
        self.pulled.put((number, replies, errors))

    def push(self, messages: list[Message], waiting: dict[str, int]) -> list[Message]:
        """Send messages and note their nodes in `waiting`; returns those that the grid refused."""
        try:
            sent_ids = set(self.grid.push_messages(messages)) if messages else set()
        except NotPushedError as error:  # the SuperLink was away for too long meanwhile
            log.warning("messages were not sent: %s", error)
            return messages
        sent = [m for m in messages if m.metadata.message_id in sent_ids]
        waiting.update({m.metadata.message_id: m.metadata.dst_node_id for m in sent})
        return [m for m in messages if m.metadata.message_id not in sent_ids]

    def drain(self) -> None:
        """Discard the replies that came after their deadline, and log whose they are.

        Forget those of messages that the SuperLink no longer has, as they have expired.
        """
        for reply in self.pull(list(self.late), MAX_POLL_S):
            self.note_late(reply)
        self.pulls.clear()

    def note_late(self, reply: Message) -> None:
        """Log whose reply this is, if one was awaited before."""
        text = self.late.pop(reply.metadata.reply_to_message_id, "")
        if text and not is_undelivered(reply):
            log.warning("%s came too late and is not used", text)
            self.arrived_late.append(text)

    def take_late(self) -> list[str]:
        """Descriptions of the replies that came too late since the last call."""
        texts, self.arrived_late = self.arrived_late, []
        return texts


class Stops:
    """How long this process was stopped: by SIGSTOP, or with its machine."""

    def __init__(self) -> None:
        self.lock, self.seen_at, self.stopped_s = threading.Lock(), time.monotonic(), 0.0
        threading.Thread(target=watch, args=[weakref.ref(self)], daemon=True).start()

    def note(self) -> None:
        """Note that the process runs; if it has not for a while, it was stopped."""
        with self.lock:
            now = time.monotonic()
            gap_s, self.seen_at = now - self.seen_at, now
            self.stopped_s += gap_s if gap_s > SILENCE_S else 0.0

    def take(self) -> float:
        """Seconds since the last call in which the process was stopped."""
        self.note()
        taken, self.stopped_s = self.stopped_s, 0.0
        return taken


def watch(stops: weakref.ref[Stops]) -> None:
    """Note every second that the process runs, until `stops` is garbage-collected."""
    while (noted := stops()) is not None:
        noted.note()
        del noted
        time.sleep(TICK_S)


def is_undelivered(reply: Message) -> bool:
    """Whether the SuperLink says that it does not have, or no longer has, a message or reply."""
    return reply.has_error() and reply.error.code in UNDELIVERED


def failure(message: Message, reason: str, code: int = NO_REPLY) -> Message:
    """An error reply to `message`."""
    return Message(Error(code, reason), reply_to=message)
