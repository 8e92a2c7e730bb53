"""What trains: one interface to the workers of a simulation and to the sites of a deployment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flwr.app import Message

from protocol.messages import RosterEntry


class Pool(Protocol):
    """The clients of a run, and the way to ask them.

    roster: node id to the client that is there. Client n of a simulation has node FIRST_NODE + n; a
    site's node changes when its SuperNode is registered again.
    """

    @property
    def roster(self) -> Mapping[int, RosterEntry]:
        """Node id to client."""

    def ask(
        self,
        messages: Sequence[Message],
        what: str,
        on_reply: Callable[[Message], None],
        *,
        max_bytes: int,
        before_resend: Callable[[int], None],
    ) -> set[int]:
        """Send the messages; returns the nodes that gave no answer within `round-timeout`.

        on_reply: gets exactly one reply to each message, an error where none came, as soon as it is
        there; its source is the node that was asked. what: they ask for, such as "round 3", for the
        log. max_bytes: of a reply; a larger one is an error. before_resend: called with the node
        before its message is sent a second time.
        """

    def absent(self) -> set[str]:
        """Clients that are not connected, and so not asked; also updates `roster`."""

    def take_late(self) -> list[str]:
        """Descriptions of the replies that came after their round, since the last call."""
