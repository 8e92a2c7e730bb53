"""One question to some of a run's clients: noted in the audit log, and followed by observers."""

from collections.abc import Callable, Sequence

from flwr.app import Message

from protocol.messages import payload_bytes
from server_app.start import Run


class Question:
    """What is sent in a round. A private release is counted before its message is sent.

    silent: the clients that gave no answer in time. num_bytes: sent.
    """

    def __init__(
        self, run: Run, number: int, kind: str, what: str, messages: Sequence[Message]
    ) -> None:
        self.run, self.round, self.kind, self.what = run, number, kind, what
        self.messages = messages
        self.sizes = {m.metadata.dst_node_id: payload_bytes(m) for m in messages}
        # when first sent: a client may have moved to another node since
        self.clients = {node: run.pool.roster[node].client for node in self.sizes}
        self.backed_off = sorted(run.experiment.strategy.cohort.backed_off(number))
        self.num_bytes = self.num_replies = 0
        self.silent: set[str] = set()

    def ask(self, on_reply: Callable[[Message], None], max_bytes: int) -> None:
        """Send the messages and take the replies. max_bytes: of a reply."""
        self.on_reply = on_reply
        self.note(*self.sizes)
        self.run.progress(self.what, 0, len(self.messages))
        silent = self.run.pool.ask(
            self.messages, self.what, self.take, max_bytes=max_bytes, before_resend=self.note
        )
        self.silent = {self.clients[node] for node in silent}

    def take(self, reply: Message) -> None:
        """Hand on a reply."""
        self.on_reply(reply)
        self.num_replies += 1
        self.run.progress(self.what, self.num_replies, len(self.messages))

    def note(self, *nodes: int) -> None:
        """Note that messages to these nodes are about to be sent."""
        clients = [self.clients[node] for node in nodes]
        size = sum(self.sizes[node] for node in nodes)
        self.num_bytes += size
        audit, privacy = self.run.audit, self.run.config.privacy
        audit.note("sent", kind=self.kind, bytes=size, round=self.round, clients=clients)
        if privacy.epsilon and self.kind == "train":
            budget = {"epsilon": privacy.epsilon, "delta": privacy.delta}
            audit.note("released", round=self.round, clients=clients, **budget)
