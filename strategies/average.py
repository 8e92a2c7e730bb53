"""The default server half: a weighted average of the updates, then the server optimizer.

It is Flower's `Strategy` with three properties that a repeatable and robust run needs: clients are
sampled by name from the run's seed (strategies/cohort.py), replies are validated
(strategies/validation.py), and the bits of their mean do not depend on the order in which they come
(strategies/aggregation.py).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from models import StagedModel
from protocol.array_records import array_record, joined, tensors
from protocol.arrays import Arrays, mismatch
from protocol.code import place_of
from protocol.config import RunConfig
from protocol.messages import RosterEntry, TrainReply, message_content
from strategies.aggregation import (
    ExactSum,
    capped_counts,
    coordinate_wise,
    selected,
    with_enough_replies,
)
from strategies.cohort import Cohort
from strategies.directions import Directions
from strategies.server_optimizers import server_optimizer
from strategies.validation import (
    RECORD_BYTES,
    ExpectedReply,
    NormReference,
    RoundReplies,
    RoundReport,
    beyond_norms,
    largest_values,
)


class Average(Strategy):
    """Weighted average and server optimizer, for every method without a server half of its own."""

    needs_updates: ClassVar[bool] = False
    """Whether `next_arrays` reads the arrays of single replies. Otherwise updates are added up as
    they arrive and `reply.arrays` is empty: only `average` of all replies can be used. True in a
    subclass that does not say."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.needs_updates = vars(cls).get("needs_updates", True)

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        self.config = config
        self.options = config.method_options()  # with the method's capability flags
        # with each name of a tensor that several layers share; not a set, whose order differs
        # between processes, and with it the last bits of a sum over the names
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        self.trainable = dict.fromkeys(names).keys()
        self.own_extra: dict[str, Arrays] = {}  # what only one client is sent, by its name
        self.server_optimizer = server_optimizer(config)
        self.norm_reference = NormReference()
        self.cohort = Cohort(config.rounds)
        self.partition_sizes: Mapping[str, int] = {}  # simulated client to its number of samples
        self.keeps_updates = False  # each update of the next round is needed, for diagnostics
        # of the round under way
        self.current: Arrays = {}
        self.sent: Arrays = {}
        self.addressed: dict[int, RosterEntry] = {}  # by node, whom the newest messages went to
        self.replies: RoundReplies | None = None
        self.sum: ExactSum | None = None  # of the replies' arrays, where these are not held
        self.extra_total: ExactSum | None = None  # of their `extra`, by `shares`
        self.shares: dict[str, float] = {}
        self.directions = Directions(0, {}, is_simulated=True)
        self.report = RoundReport()

    # --- what a method's own server half may override -----------------------------------------

    def initial_arrays(self, model: StagedModel) -> Arrays:
        """What is broadcast in round 1: the part of the model that the method shares."""
        weights = model.state_dict()
        keys = {
            "model": list(weights),
            "extractor": model.extractor_keys(model.stage_names[-1]),
            "nothing": [],
        }[self.options.shared_part]
        return {key: weights[key].clone() for key in keys}

    def expected(self, current: Arrays) -> Arrays:
        """Arrays with the names, shapes and dtypes of a valid reply's."""
        return current

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """The next global arrays: the accepted replies' average, then the server optimizer.

        replies: in the order of the clients' names. What it is given must not be modified.
        """
        average = self.average(replies)
        # without what is never sent (FedRep's head)
        trainable = [name for name in self.trainable if name in average]
        return self.server_optimizer.step(current, average, trainable)

    def extra(self) -> Arrays:
        """What all clients are sent alongside the model, with other names than in `own_extra`."""
        return {}

    def expected_extra(self) -> Arrays:
        """Arrays alongside the model with the names, shapes and dtypes of a valid reply's."""
        return {}

    def checked_extra(self, reply: TrainReply) -> Arrays:
        """The reply's `extra`, on a scale that does not grow with the client's samples.

        The bounds on values and norms apply to it. ValueError with the reason if the reply is to be
        rejected for what names, shapes and sizes do not show.
        """
        return reply.extra

    def extra_shares(self, clients: Sequence[str]) -> dict[str, float]:
        """Each client's weight in `extra_sum`, by name, at least 0; of all clients at most 1.

        {}: this half reads the `extra` of each reply. Otherwise it reads it only through
        `extra_sum`, and the arrays are floating ones.
        """
        return {}

    def own_state(self) -> Arrays:
        """This server half's state between rounds, beside the server optimizer's."""
        return {}

    def load_own(self, state: Arrays) -> None:
        """Restore what `own_state` returned."""

    # --- what a server half may call ----------------------------------------------------------

    def average(self, replies: list[TrainReply]) -> Arrays:
        """The replies' arrays combined as `aggregation` says, weighted as `weighting` says."""
        if self.sum:
            assert len(replies) == len(self.sum.weights), "only all replies have an average"
            return self.sum.mean()
        rounds = self.config.rounds
        if rounds.aggregation != "mean":
            rounds = with_enough_replies(rounds, len(replies))
            if rounds.aggregation in ("median", "trimmed-mean"):
                return coordinate_wise(replies, rounds)
        pairs = zip(replies, self.weights(replies), strict=True)
        weights = {reply.client: weight for reply, weight in pairs}
        if rounds.aggregation != "mean":
            replies = selected(replies, rounds, self.update_of)
        total = self._empty_sum(sum(weights.values()))
        for reply in replies:
            total.add(reply.arrays, weights[reply.client])
        return total.mean()

    def extra_sum(self, replies: list[TrainReply]) -> Arrays:
        """The sum of the replies' `extra`, weighted by `extra_shares`."""
        if self.extra_total:
            return self.extra_total.total()
        shares = self.extra_shares([reply.client for reply in replies])
        total = self._empty_extra_sum()
        for reply in replies:
            total.add(reply.extra, shares[reply.client])
        return total.total()

    @property
    def roster(self) -> Mapping[int, RosterEntry]:
        """Node id to the client behind it."""
        return self.cohort.roster

    @roster.setter
    def roster(self, roster: Mapping[int, RosterEntry]) -> None:
        self.cohort.roster = roster

    def entry_of(self, reply: TrainReply) -> RosterEntry:
        """The roster entry of the client that replied."""
        return self.roster[self.cohort.nodes_of([reply.client])[0]]

    def counts(self, replies: list[TrainReply]) -> list[float]:
        """The replies' numbers of samples, none above `max-weight-share` unless it is checked."""
        found = [reply.metrics["num-examples"] for reply in replies]
        are_checked = [
            self.partition_sizes.get(r.client) == n for r, n in zip(replies, found, strict=True)
        ]
        return capped_counts(found, are_checked, self.config.rounds.max_weight_share)

    def weights(self, replies: list[TrainReply]) -> list[float]:
        """The weight of each reply in the average."""
        return self.counts(replies) if self.is_weighted_by_examples else [1.0] * len(replies)

    def update_of(self, reply: TrainReply) -> Arrays:
        """The client's floating arrays (with BatchNorm's statistics) minus those it was sent.

        Of a method that does not send weights, the reply's arrays themselves.
        """
        if not self.options.sends_weights:
            return reply.arrays
        return {
            name: array - self.sent[name]
            for name, array in reply.arrays.items()
            if name in self.sent and array.is_floating_point()
        }

    @property
    def is_weighted_by_examples(self) -> bool:
        """By `weighting`; auto is uniform with a norm bound or a robust aggregation."""
        rounds = self.config.rounds
        if rounds.weighting != "auto":
            return rounds.weighting == "examples"
        return self.options.default_weighting == "examples" and not rounds.is_defended

    # --- Flower's Strategy: a round -------------------------------------------------------------

    def summary(self) -> None:
        """Does nothing: Flower's own loop calls it, Keel's does not."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid | None
    ) -> Iterable[Message]:
        """A train message for every sampled client; `config` is the request's record."""
        self.current = tensors(arrays)
        self.sent = self.server_optimizer.broadcast(self.current)
        if self.sent is not self.current:
            arrays = array_record(self.sent)
        messages = self.messages(
            MessageType.TRAIN, self.cohort.sample(server_round), arrays, config
        )
        self.replies = RoundReplies(self.addressed, self._expected_reply(server_round))
        self.directions = Directions(len(self.addressed), self.sent, bool(self.partition_sizes))
        self.sum = None if self._holds_updates else self._empty_sum()
        self.shares = self.extra_shares([*self._declared]) if self.sum else {}
        self.extra_total = self._empty_extra_sum() if self.shares else None
        return messages

    def configure_evaluate(self, *about: Any, **more: Any) -> Iterable[Message]:
        """No messages: Keel's own loop asks for evaluations, with `messages`."""
        return ()

    def messages(
        self, kind: str, nodes: Iterable[int], arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """One message for each node; what they have in common is shared and never modified.

        A message expires with the round's timeout.
        """
        extra = array_record(self.extra())
        accepted, ttl = self.cohort.last_accepted_rounds, self.config.rounds.round_timeout
        messages = []
        self.addressed = {node: self.roster[node] for node in nodes}
        for node, entry in self.addressed.items():
            own = array_record(self.own_extra.get(entry.client, {}), "own")
            sent = joined(extra, own) if own else extra
            content = message_content(config, arrays, sent, accepted.get(entry.client, 0))
            messages.append(Message(content, dst_node_id=node, message_type=kind, ttl=ttl))
        return messages

    def max_reply_bytes(self) -> int:
        """The largest size of a reply to `configure_train`'s messages, with what transport adds."""
        assert self.replies, "configure_train comes first"
        return self.replies.expected.max_bytes + RECORD_BYTES

    def accept(self, server_round: int, message: Message) -> None:
        """Validate a reply of this round, and add it to the sum unless updates are held.

        The order in which replies come does not matter.
        """
        assert self.replies, "configure_train comes first"
        reply = self.replies.add(message)
        if reply and self.directions.is_on:
            self.directions.add(reply.client, self.update_of(reply), self.trainable)
        if reply is None or self.sum is None:
            return
        [weight] = self.weights([reply])
        self.sum.add(reply.arrays, weight)
        extra = reply.extra
        if self.extra_total:
            self.extra_total.add(extra, self.shares[reply.client])
            extra = {}
        self.replies.accepted[reply.client] = replace(reply, arrays={}, extra=extra)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, None]:
        """The next global arrays. TooFewRepliesError if too few replies are accepted.

        replies: those that `accept` has not seen. `report` then says who was accepted and who was
        left out, and why.
        """
        for message in replies:
            self.accept(server_round, message)
        assert self.replies, "configure_train comes first"
        if self.replies.expected.arrays:
            checks = self.update_of, self.checked_extra, self.config.rounds, self.norm_reference
            self.replies.reject(beyond_norms(self.replies.accepted, *checks))
        self.report, self.replies = self.replies.report(), None
        accepted = self.report.accepted
        weights = self.weights(accepted) if accepted else []
        self.report.directions = self.directions.of([r.client for r in accepted], weights)
        asked = {entry.client for entry in self.addressed.values()}
        self.cohort.note(server_round, asked - self.report.silent, self.report.silent)
        self.report.check_enough(server_round, self.config.rounds)
        following = self.next_arrays(self.current, accepted) or {}  # {}: a forgotten return
        self.sum = self.extra_total = None
        if wrong := mismatch(following, self.current, with_values=False):
            raise ValueError(
                f"{place_of(self.next_arrays)} returned arrays unlike those it was given: {wrong}"
            )
        self.cohort.last_accepted_rounds |= {reply.client: reply.round for reply in accepted}
        return array_record(following), None

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Validate the replies; `report` holds each client's metrics."""
        expected = ExpectedReply(server_round, {}, {}, self._declared)
        found = RoundReplies(self.addressed, expected)
        for message in replies:
            found.add(message)
        self.report = found.report()

    # --- the round's sums -----------------------------------------------------------------------

    @property
    def _declared(self) -> dict[str, int]:
        """Training samples of the clients that were asked, as in the roster."""
        return {entry.client: entry.num_examples for entry in self.addressed.values()}

    @property
    def _holds_updates(self) -> bool:
        """Whether this round's updates are held until all have arrived.

        Each is needed, or their weights depend on who replies: with `max-weight-share`, if counts
        are not checked.
        """
        if self.needs_updates or self.keeps_updates or self.config.rounds.is_defended:
            return True
        return not self._weights_are_known

    @property
    def _weights_are_known(self) -> bool:
        """Whether the weight of a reply does not depend on the others."""
        if not self.is_weighted_by_examples or self.config.rounds.max_weight_share == 1:
            return True
        return all(self.partition_sizes.get(c) == n for c, n in self._declared.items())

    def _expected_reply(self, server_round: int = 0) -> ExpectedReply:
        """What a valid reply to this round's train messages contains."""
        arrays = self.expected(self.current)
        limited = {name: self.sent.get(name, array) for name, array in arrays.items()}
        return ExpectedReply(
            server_round,
            arrays,
            self.expected_extra(),
            num_examples=self._declared,
            limits=largest_values(limited, self.config.privacy),
            sent=self.sent,
            checked_extra=self.checked_extra,
        )

    def _empty_sum(self, max_weight: float = 0.0) -> ExactSum:
        """For the replies' arrays. Its bits are the same whether these are held or not.

        max_weight: of all replies, where a weight depends on the others.
        """
        if self._weights_are_known:
            is_weighted = self.is_weighted_by_examples
            max_weight = sum(self._declared.values()) if is_weighted else len(self.addressed)
        expected = self._expected_reply()
        return ExactSum(expected.arrays, expected.limits, max(1.0, max_weight))

    def _empty_extra_sum(self) -> ExactSum:
        """For the replies' `extra`."""
        expected = self._expected_reply()
        return ExactSum(expected.extra, dict.fromkeys(expected.extra, expected.largest), 1.0)

    # --- the checkpoint -------------------------------------------------------------------------

    def state(self) -> Arrays:
        """The server's state for its checkpoint, alongside the model."""
        optimizer, own = self.server_optimizer.state(), self.own_state()
        clients = bytearray(json.dumps(self.cohort.state()).encode())
        return {
            **{f"step/{name}": array for name, array in optimizer.items()},
            **{f"own/{name}": array for name, array in own.items()},
            "norm-reference": torch.tensor(self.norm_reference.value, dtype=torch.float64),
            "clients": torch.frombuffer(clients, dtype=torch.uint8),  # one array for all
        }

    def load(self, state: Arrays) -> None:
        """Restore a checkpoint's state."""
        optimizer, own = (
            {name.removeprefix(p): array for name, array in state.items() if name.startswith(p)}
            for p in ("step/", "own/")
        )
        self.server_optimizer.load(optimizer)
        self.load_own(own)
        self.norm_reference.value = float(state["norm-reference"])
        self.cohort.load(json.loads(bytes(state["clients"].tolist())))
