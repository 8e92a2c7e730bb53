"""The default server half: a weighted average of the updates, then the server optimizer.

It is Flower's `Strategy` with three properties that a repeatable and robust run needs: clients are
sampled by name from the run's seed (strategies/sampling.py), replies are validated
(strategies/validation.py), and the bits of their sum do not depend on the order in which they come.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from models import StagedModel
from protocol.code import place_of
from protocol.config import RunConfig
from protocol.exact_sum import ExactSum
from protocol.messages import (
    Arrays,
    RosterEntry,
    TrainReply,
    array_record,
    joined,
    message_content,
    mismatch,
    tensors,
)
from protocol.packing import DTYPES
from protocol.text import in_one_line, num_of, shortened
from strategies.aggregation import RunningMean, aggregate, capped_counts
from strategies.backoff import Backoff
from strategies.sampling import FIRST_NODE, ClientNames, name_of, sample_cohort, sample_numbers
from strategies.server_optimizers import server_optimizer
from strategies.validation import (
    MAX_REASONS,
    MAX_VALUE_RATIO,
    RECORD_BYTES,
    ExpectedReply,
    NormReference,
    RoundReport,
    Validation,
    by_reason,
    count_outliers,
    largest_values,
    norm,
)

log = logging.getLogger("keel.server")
# Up to this size, a round's updates are held until all have come and summed in the order of the
# clients' names. Larger ones are summed by `ExactSum`, where possible as they come.
STREAM_BYTES = 2**29


class TooFewRepliesError(RuntimeError):
    """A round had fewer accepted replies than `min-replies`."""


class Average(Strategy):
    """Weighted average and server optimizer, for every method without a server half of its own.

    roster: node id to the client behind it; may change between rounds (a restarted SuperNode).
    """

    needs_only_average: ClassVar[bool] = True
    """The half reads the replies' arrays only through one average of all replies, so large updates
    can be summed as they arrive; `reply.arrays` is then empty. Each subclass declares it itself."""

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        self.config = config
        self.options = config.method_options()  # with the method's capability flags
        self.roster: Mapping[int, RosterEntry] = {}
        self.partition_sizes: Mapping[str, int] = {}  # simulated client to its number of samples
        self.norm_reference = NormReference()
        # with each name of a tensor that several layers share; not a set, whose order differs
        # between processes, and with it the last bits of a sum over the names
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        self.trainable = dict.fromkeys(names).keys()
        self.server_optimizer = server_optimizer(config)
        self.report = RoundReport()
        self.validation: Validation | None = None  # of the round under way
        self.running: RunningMean | None = None  # where its replies are summed as they come
        self.keeps_updates = False  # each update of the next round is needed, for diagnostics
        self.current: Arrays = {}
        self.sent: Arrays = {}
        # by node, the clients that the newest messages went to: each may have another node by now
        self.addressed: dict[int, RosterEntry] = {}
        self.outliers: frozenset[str] = frozenset()  # declared far more samples than others
        self.away: set[str] = set()  # clients that are not connected
        self.last_accepted_rounds: dict[str, int] = {}  # by client
        rounds = config.rounds
        self.backoff = Backoff(rounds.backoff_after, rounds.backoff_rounds)

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
        """The next global arrays: the accepted replies' average, then the server optimizer."""
        average = self.average(replies)
        # without what is never sent (FedRep's head)
        trainable = [name for name in self.trainable if name in average]
        return self.server_optimizer.step(current, average, trainable)

    def average(self, replies: list[TrainReply]) -> Arrays:
        """The accepted replies' arrays combined; where they were summed as they came, that sum."""
        like = self.expected(self.current)
        if self.running:
            return self._summed(self.running, replies, like).mean(like)
        weights = self._weights(replies)
        if self.is_large:
            by_name = dict(zip((reply.client for reply in replies), weights, strict=True))
            by_name = self.streamed_weights() or by_name  # with the bits of a sum as they come
            running = RunningMean(by_name, self.limits)
            for reply in replies:
                running.add(reply.client, reply.arrays, {})
            return running.mean(like)
        return aggregate(replies, weights, self.config.rounds, self.update_of)

    def extra_sum(self, replies: list[TrainReply]) -> Arrays:
        """The sum of the accepted replies' `extra`, weighted by `extra_shares`."""
        like = returned(self.expected_extra)
        if self.running:
            return self._summed(self.running, replies, like).extra_sum(like)
        shares = self.extra_shares([reply.client for reply in replies])
        if self.is_large:  # as in `average`
            total = ExactSum(self.limits)
            for reply in replies:
                total.add(reply.extra, shares[reply.client])
            return total.scaled(1.0, like)
        found = {name: torch.zeros_like(array) for name, array in like.items()}
        for reply in replies:
            for name, array in found.items():
                array.add_(reply.extra[name], alpha=shares[reply.client])
        return found

    def _weights(self, replies: list[TrainReply]) -> list[float]:
        """The weight of each reply in the average. ValueError unless `counts` returned one each."""
        if not self.is_weighted_by_examples:
            return [1.0] * len(replies)
        counts = self.counts(replies)
        weights = [float(n) for n in counts] if isinstance(counts, Iterable) else []
        if len(weights) != len(replies) or not 0 < sum(weights) < math.inf:
            raise ValueError(
                f"{place_of(self.counts)} returned {in_one_line(repr(counts), 80)}: "
                f"expected {num_of('number', replies)}, one a reply, with a sum above 0"
            )
        return weights

    def _summed(self, running: RunningMean, replies: list[TrainReply], like: Arrays) -> RunningMean:
        """`running`; ValueError unless it still has sums of these arrays, over these replies."""
        clients = {reply.client for reply in replies}
        if clients != running.added or not like.keys() <= running.sum.sums.keys():
            raise ValueError(
                f"{place_of(self.next_arrays)}: this round's updates are large and were summed as "
                "they arrived: only the sum of all accepted replies exists, and it can be used "
                f"once; set needs_only_average = False in {type(self).__name__}"
            )
        return running

    @property
    def is_weighted_by_examples(self) -> bool:
        """By `weighting`; auto is uniform with a norm bound or a robust aggregation."""
        rounds = self.config.rounds
        if rounds.weighting != "auto":
            return rounds.weighting == "examples"
        is_defended = rounds.norm_bound != "off" or rounds.aggregation != "mean"
        return self.options.default_weighting == "examples" and not is_defended

    def counts(self, replies: list[TrainReply]) -> list[float]:
        """The replies' numbers of samples, none above `max-weight-share` unless it is checked.

        That of an outlier is reduced further if its update is longer than all others'.
        """
        found = [reply.metrics["num-examples"] for reply in replies]
        checked = [
            self.partition_sizes.get(r.client) == n for r, n in zip(replies, found, strict=True)
        ]
        counts = capped_counts(found, checked, self.config.rounds.max_weight_share)
        clients = {reply.client for reply in replies}
        if not self.outliers & clients or not clients - self.outliers:
            return counts
        norms = {reply.client: norm(self.update_of(reply)) for reply in replies}
        longest = max(norms[client] for client in clients - self.outliers)
        return [  # those that are longer are of outliers
            n * (longest / norms[r.client]) if norms[r.client] > longest else n
            for n, r in zip(counts, replies, strict=True)
        ]

    def count_scales(self, replies: list[TrainReply]) -> list[float]:
        """The share of each reply's count that `counts` leaves; 1: all of it."""
        counts = self.counts(replies)
        return [n / r.metrics["num-examples"] for n, r in zip(counts, replies, strict=True)]

    def update_of(self, reply: TrainReply) -> Arrays:
        """The client's floating arrays (with BatchNorm's statistics) minus those it was sent."""
        sent = self.sent or self.current
        return {
            name: array - sent[name]
            for name, array in reply.arrays.items()
            if name in sent and array.is_floating_point()
        }

    def extra(self) -> Arrays:
        """What all clients are sent alongside the model."""
        return {}

    def own_extra(self, client: str) -> Arrays:
        """What only this client is sent alongside the model."""
        return {}

    def extra_like(self) -> Arrays:
        """Arrays shaped like all that a client is sent alongside the model, from round 2 on."""
        return self.extra()

    def expected_extra(self) -> Arrays:
        """Arrays alongside the model with the names, shapes and dtypes of a valid reply's."""
        return {}

    def beside_model(self, reply: TrainReply) -> Arrays:
        """The reply's `extra`, on a scale that does not grow with the client's samples."""
        return reply.extra

    def extra_shares(self, clients: Sequence[str]) -> dict[str, float]:
        """Each client's weight in `extra_sum`, by name, at least 0; of all clients at most 1.

        {}: this half needs the `extra` of each reply. Otherwise it reads it only through
        `extra_sum`, and the arrays are floating ones with names of their own.
        """
        return {}

    def extra_reason(self, reply: TrainReply) -> str:
        """Why the reply's `extra` is rejected, beyond names, shapes and sizes; "": it is not."""
        return ""

    def own_state(self) -> Arrays:
        """This server half's state between rounds, beside the server optimizer's."""
        return {}

    def load_own(self, state: Arrays) -> None:
        """Restore what `own_state` returned."""

    def state(self) -> Arrays:
        """The server's state for its checkpoint, alongside the model."""
        moments = returned(self.server_optimizer.state)
        step = {f"step/{name}": array for name, array in moments.items()}
        own = {f"own/{name}": array for name, array in returned(self.own_state).items()}
        # one array each for all clients
        by_client: dict[str, object] = {"counted": self.last_accepted_rounds}
        if backoff := self.backoff.state():
            by_client["attendance"] = backoff
        texts = {name: bytearray(json.dumps(each).encode()) for name, each in by_client.items()}
        arrays = {name: torch.frombuffer(t, dtype=torch.uint8) for name, t in texts.items()}
        return step | own | self.norm_reference.state() | arrays

    def load(self, state: Arrays) -> None:
        """Restore a checkpoint's state."""
        step, own, attendance = (
            {name[len(p) :]: array for name, array in state.items() if name.startswith(p)}
            for p in ("step/", "own/", "attendance/")
        )
        self.server_optimizer.load(step)
        self.load_own(own)
        self.norm_reference.load(state)
        accepted, backoff = (
            json.loads(bytes(state[name].tolist())) if name in state else {}
            for name in ("counted", "attendance")
        )
        self.last_accepted_rounds = accepted
        # before 0.2.0, an array for each client
        self.backoff.load(backoff | {c: array.tolist() for c, array in attendance.items()})

    # --- Flower's Strategy ---------------------------------------------------------------------

    def summary(self) -> None:
        """Log the method, the server optimizer and the number of clients."""
        rounds = self.config.rounds
        log.info(
            "method %s, server optimizer %s, %s",
            rounds.method,
            rounds.server_optimizer,
            num_of("client", self.roster),
        )

    def sample(self, server_round: int) -> list[int]:
        """Node ids of the round's cohort, in the order of the clients' names."""
        rounds, unavailable = self.config.rounds, self.backed_off(server_round)
        share, names = rounds.fraction_train, self.clients
        if isinstance(names, ClientNames):
            numbers = [names.number(name) for name in unavailable]
            found = sample_numbers(names.in_order, numbers, share, rounds.seed, server_round)
            return self.nodes_of(name_of(number) for number in found)
        return self.nodes_of(sample_cohort(names, unavailable, share, rounds.seed, server_round))

    @property
    def clients(self) -> Set[str]:
        """The names of all clients."""
        names = getattr(self.roster, "names", None)  # a roster of logical clients has them
        return names if names is not None else {entry.client for entry in self.roster.values()}

    def nodes_of(self, clients: Iterable[str]) -> list[int]:
        """The nodes of these clients, in their order."""
        names = self.clients
        if isinstance(names, ClientNames):
            return [FIRST_NODE + names.number(client) for client in clients]
        node_of = {entry.client: node for node, entry in self.roster.items()}
        return [node_of[client] for client in clients]

    def _entry_of(self, reply: TrainReply) -> RosterEntry:
        """The roster entry of the client that replied."""
        return self.roster[self.nodes_of([reply.client])[0]]

    def backed_off(self, server_round: int) -> set[str]:
        """Clients that are not sampled in this round: disconnected, or failed too often.

        Neither kind is left out where fewer than `fewest_replies` clients would remain.
        """
        clients, fewest = self.clients, max(1, self.config.rounds.fewest_replies)
        if not self.away:
            return self.backoff.backed_off(server_round, clients, fewest)
        away = self.away if len(clients - self.away) >= fewest else set()
        return away | self.backoff.backed_off(server_round, clients - away, fewest)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A train message for every sampled client; `config` is the request's record."""
        self.current = tensors(arrays)
        self.sent = self.server_optimizer.broadcast(self.current)
        if self.sent is not self.current:
            arrays = array_record(self.sent)
        self.validation = self.running = None
        return self.messages(MessageType.TRAIN, self.sample(server_round), arrays, config)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """An evaluate message for every client."""
        nodes = self.nodes_of(sorted(self.clients))
        return self.messages(MessageType.EVALUATE, nodes, arrays, config)

    def messages(
        self, kind: str, nodes: Iterable[int], arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """One message for each node; what they have in common is shared and never modified.

        A message expires with the round's timeout.
        """
        extra = array_record(returned(self.extra))
        messages = []
        self.addressed = {node: self.roster[node] for node in nodes}
        for node, entry in self.addressed.items():
            client = entry.client
            own, sent = returned(self.own_extra, client), extra
            if own:
                if both := own.keys() & tensors(extra).keys():
                    raise ValueError(
                        f"{place_of(self.own_extra)} returned {min(both)!r}, as `extra` does: "
                        "expected names of its own"
                    )
                sent = joined(extra, array_record(own, "own"))
            content = message_content(
                config, arrays, sent, self.last_accepted_rounds.get(client, 0)
            )
            ttl = self.config.rounds.round_timeout
            messages.append(Message(content, dst_node_id=node, message_type=kind, ttl=ttl))
        return messages

    def max_reply_bytes(self) -> int:
        """The largest size of a reply as it is sent, to the messages of `configure_train`.

        With room for what the transport adds.
        """
        arrays = returned(self.expected, self.current)
        return ExpectedReply(0, arrays, returned(self.expected_extra), {}).max_bytes + RECORD_BYTES

    @property
    def is_large(self) -> bool:
        """Whether this round's updates are averaged by `ExactSum`."""
        update = self.expected(self.current).values()
        num_bytes = sum(a.numel() * a.element_size() for a in update) * len(self.addressed)
        return self.config.rounds.aggregation == "mean" and num_bytes > STREAM_BYTES

    @property
    def limits(self) -> dict[str, float]:
        """The largest magnitude of a value in each array of a valid reply, by name."""
        sent = self.sent or self.current
        arrays = {name: sent.get(name, a) for name, a in self.expected(self.current).items()}
        limits = largest_values(arrays, self.config.privacy)
        if type(self).extra_shares is not Average.extra_shares:
            trained = (limit for name, limit in limits.items() if name in self.trainable)
            largest = max(trained, default=MAX_VALUE_RATIO)
            limits |= dict.fromkeys(returned(self.expected_extra), largest)
        return limits

    def streamed_weights(self) -> dict[str, float]:
        """The weight of each client asked, by name, if replies can be summed as they come; else {}.

        They can in large rounds if the weights do not depend on who replies and the server half
        reads no single update.
        """
        rounds, entries = self.config.rounds, self.addressed.values()
        if not self.is_large or rounds.norm_bound != "off" or self.outliers:
            return {}
        if not vars(type(self)).get("needs_only_average"):  # not a base class's
            return {}
        if type(self).counts is not Average.counts:  # may read all of a reply
            return {}
        if not self.is_weighted_by_examples:
            return {entry.client: 1.0 for entry in entries}
        are_checked = all(self.partition_sizes.get(e.client) == e.num_examples for e in entries)
        if rounds.max_weight_share < 1 and not are_checked:  # `counts` depends on who replies
            return {}
        return {entry.client: float(entry.num_examples) for entry in entries}

    def accept(self, server_round: int, message: Message) -> None:
        """Validate a reply of this round, and add it to the sum where replies are summed at once.

        The order in which replies come does not matter.
        """
        validation = self.validation or self._begin_round(server_round)
        client = validation.add(message)
        reply = validation.accepted.get(client)
        if self.running and reply and reply.arrays:
            self.running.add(client, reply.arrays, reply.extra)
            extra = {} if self.running.extra_shares else reply.extra
            validation.accepted[client] = replace(reply, arrays={}, extra=extra)

    def _begin_round(self, server_round: int) -> Validation:
        """Prepare for the replies to `configure_train`."""
        expected = returned(self.expected, self.current)
        self.validation = self._validation(server_round, expected, returned(self.expected_extra))
        weights = {} if self.keeps_updates else self.streamed_weights()
        shares = self.extra_shares(list(weights)) if weights else {}
        self.running = RunningMean(weights, self.limits, shares) if weights else None
        return self.validation

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, None]:
        """The next global arrays. TooFewRepliesError if too few replies are accepted.

        replies: those that `accept` has not seen. `report` then says who was accepted and who was
        left out, and why.
        """
        rounds = self.config.rounds
        for message in replies:
            self.accept(server_round, message)
        self.report = self.validation.report() if self.validation else RoundReport()
        self.validation = None
        accepted = self.report.accepted
        failed = {e.client for e in self.addressed.values()} & self.report.left_out.keys()
        for client in self.backoff.note(server_round, {r.client for r in accepted}, failed):
            log.warning(
                "round %d: client %s failed %s in a row; it is not sampled for %s",
                server_round,
                client,
                num_of("time", self.backoff.failures[client]),
                num_of("round", rounds.backoff_rounds),
            )
        if len(accepted) < rounds.fewest_replies:
            clients = by_reason(self.report.left_out)
            reasons = [f"{shortened(names)}: {why}" for why, names in clients.items()]
            if len(reasons) > MAX_REASONS:
                reasons[MAX_REASONS:] = [f"and {len(reasons) - MAX_REASONS} more: see run.log"]
            raise TooFewRepliesError(
                f"round {server_round}: {num_of('accepted reply', accepted, 'accepted replies')}, "
                f"{rounds.fewest_replies_text}. {'; '.join(reasons)}"
            )
        inputs = [self.current, *(arrays for r in accepted for arrays in (r.arrays, r.extra))]
        versions = [(a, a._version) for arrays in inputs for a in arrays.values()]
        following = returned(self.next_arrays, self.current, accepted)
        # the model is needed if the next is not finite, and a reply may be client state in memory
        if any(array._version != version for array, version in versions):
            raise ValueError(
                f"{place_of(self.next_arrays)} changes the arrays that it was given in place: "
                "clone them first"
            )
        if wrong := mismatch(following, self.current, with_values=False):
            raise ValueError(
                f"{place_of(self.next_arrays)} returned arrays unlike those it was given: {wrong}"
            )
        self.running = None
        self.last_accepted_rounds |= {reply.client: reply.round for reply in accepted}
        return array_record(following), None

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Validate the replies; `report` holds each client's metrics."""
        validation = self._validation(server_round, {}, {})
        for message in replies:
            validation.add(message)
        self.report = validation.report()

    def _validation(self, server_round: int, arrays: Arrays, extra: Arrays) -> Validation:
        declared = {entry.client: entry.num_examples for entry in self.addressed.values()}
        unchecked = {c: n for c, n in declared.items() if self.partition_sizes.get(c) != n}
        self.outliers = count_outliers(unchecked, self.config.rounds.max_weight_share)
        expected = ExpectedReply(
            server_round,
            arrays,
            extra,
            num_examples=declared,
            limits=self.limits,
            outliers=self.outliers,
            sent=self.sent or self.current,
        )
        return Validation(self.addressed, expected, self.config.rounds, self, self.norm_reference)


def returned(function: Callable[..., Arrays], *args: object) -> Arrays:
    """What a function of a server half returns. ValueError naming it, unless a dict of tensors.

    Inference tensors are cloned, because they have no version counter.
    """
    found = function(*args)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{place_of(function)} returned {type(found).__name__}: expected a dict of tensors"
        )
    for name, each in found.items():
        if not isinstance(each, torch.Tensor):
            raise ValueError(
                f"{place_of(function)} returned {name!r}: {type(each).__name__}: expected a dict "
                "of tensors"
            )
        if each.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(
                f"{place_of(function)} returned {name!r}: {each.dtype}: expected a dict of tensors "
                f"of {allowed}"
            )
    return {name: each.clone() if each.is_inference() else each for name, each in found.items()}


__all__ = ["Average", "RoundReport", "TooFewRepliesError"]
