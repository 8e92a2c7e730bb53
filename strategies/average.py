"""The default server half: a weighted average of the replies, then the server's step.

Flower's `Strategy` with three things of its own, because a run has to repeat bit for bit and to
survive a bad client: clients are sampled by name from the run's seed, replies are summed in the
order of the clients' names, and what the firewall refuses is left out.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import (
    Arrays,
    RosterEntry,
    TrainReply,
    array_record,
    in_one_line,
    message_content,
    payload_bytes,
    read_reply,
    tensors,
)
from protocol.seeds import seed_of
from strategies.backoff import Backoff
from strategies.robust import check_aggregation, coordinate_wise, krum_selection
from strategies.server_optimizers import server_optimizer
from strategies.validation import ExpectedReply, beyond_bound, norm, rejection_reason

log = logging.getLogger("keel.server")


@dataclass
class RoundReport:
    """What became of one round's messages: good replies in the order of names, and the others.

    left_out: client to reason, of errors, silence and the firewall; refused: how many by the last.
    """

    kept: list[TrainReply] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    rejected: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class TooFewRepliesError(RuntimeError):
    """A round had fewer good replies than `min-replies`."""


def weighted_mean(replies: list[TrainReply], weights: list[float]) -> Arrays:
    """sum_i p_i w_i with p_i = weights_i / sum of weights, added up in the order given.

    Floating arrays are summed in their own precision; whole numbers (counters) are rounded.
    """
    total = sum(weights)
    mean: Arrays = {}
    for name, first in replies[0].arrays.items():
        if first.is_floating_point():
            mean[name] = first * (weights[0] / total)
            for reply, weight in zip(replies[1:], weights[1:], strict=True):
                mean[name].add_(reply.arrays[name], alpha=weight / total)
        else:
            values = [reply.arrays[name].double() for reply in replies]
            summed = sum(v * w for v, w in zip(values, weights, strict=True))
            mean[name] = (torch.as_tensor(summed) / total).round().to(first.dtype)
    return mean


class Average(Strategy):
    """Weighted average and server step (`server`, `weighting`), for every method without its own.

    roster: node id to the client behind it; may change between rounds (a restarted SuperNode).
    """

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        self.config = config
        self.options = config.method_options()  # with the method's capability flags
        self.roster: Mapping[int, RosterEntry] = {}
        self.trainable = {name for name, _ in model.named_parameters()}
        self.server_optimizer = server_optimizer(config)
        self.report = RoundReport()
        self.current: Arrays = {}
        self.sent: Arrays = {}
        self.asked: set[str] = set()
        self.participants: set[str] = set()  # clients asked to train in the round under way
        self.away: set[str] = set()  # clients that are not connected: not asked until they are
        self.last_accepted_rounds: dict[str, int] = {}  # by client
        rounds = config.rounds
        self.backoff = Backoff(rounds.backoff_after, rounds.backoff_rounds)

    # --- what a method's own server half may override -------------------------------------------

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
        """Arrays as a good reply has them: by name, shape and dtype."""
        return current

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """The next global arrays from the good replies: their average, then the server's step."""
        weighting = self.config.rounds.weighting
        by_examples = (
            self.options.default_weighting if weighting == "auto" else weighting
        ) == "examples"
        weights = [r.metrics["num-examples"] if by_examples else 1.0 for r in replies]
        trainable = self.trainable & current.keys()  # less what never travels (FedRep's head)
        return self.server_optimizer.step(current, self.combined(replies, weights), trainable)

    def combined(self, replies: list[TrainReply], weights: list[float]) -> Arrays:
        """The replies' arrays as one set, as `aggregation` says; by default their weighted mean."""
        rounds = self.config.rounds
        if rounds.aggregation in ("median", "trimmed-mean"):
            return coordinate_wise(replies, rounds)
        if rounds.aggregation in ("krum", "multi-krum"):
            chosen = krum_selection([self.update_of(reply) for reply in replies], rounds)
            log.info(
                "%s takes %s", rounds.aggregation, ", ".join(replies[i].client for i in chosen)
            )
            replies, weights = [replies[i] for i in chosen], [weights[i] for i in chosen]
        return weighted_mean(replies, weights)

    def update_of(self, reply: TrainReply) -> Arrays:
        """How far the client moved the arrays that it was sent, weights and statistics alike."""
        sent = self.sent or self.current
        return {
            name: array - sent[name]
            for name, array in reply.arrays.items()
            if name in sent and array.is_floating_point()
        }

    def check_cohort(self, cohort: int) -> None:
        """ValueError, one line, where so many clients a round are not enough for what is asked."""
        check_aggregation(self.config.rounds, cohort)

    def extra(self) -> Arrays:
        """What is broadcast beside the model."""
        return {}

    def own_extra(self, client: str) -> Arrays:
        """What this client alone is sent beside the model."""
        return {}

    def extra_like(self) -> Arrays:
        """What a client is sent beside the model once the run is under way, by shape."""
        return self.extra()

    def expected_extra(self) -> Arrays:
        """Arrays beside the model as a good reply has them."""
        return {}

    def own_state(self) -> Arrays:
        """What this strategy keeps between rounds, beside the server step's moments."""
        return {}

    def load_own(self, state: Arrays) -> None:
        """Go on from what `own_state` gave."""

    def state(self) -> Arrays:
        """What the server's checkpoint has to hold beside the model."""
        step = {f"step/{name}": array for name, array in self.server_optimizer.state().items()}
        own = {f"own/{name}": array for name, array in self.own_state().items()}
        backoff = {f"attendance/{c}": a for c, a in self.backoff.state().items()}
        # one array for all clients, under its name of 0.1
        accepted = json.dumps(self.last_accepted_rounds).encode()
        return step | own | backoff | {"counted": torch.tensor([*accepted], dtype=torch.uint8)}

    def load(self, state: Arrays) -> None:
        """Go on from a checkpoint's state."""
        step, own, backoff = (
            {name[len(p) :]: array for name, array in state.items() if name.startswith(p)}
            for p in ("step/", "own/", "attendance/")
        )
        self.server_optimizer.load(step)
        self.load_own(own)
        self.backoff.load(backoff)
        accepted = bytes(state["counted"].tolist()) if "counted" in state else b"{}"
        self.last_accepted_rounds = json.loads(accepted)

    # --- Flower's Strategy ---------------------------------------------------------------------

    def summary(self) -> None:
        """One line on what will happen."""
        rounds = self.config.rounds
        log.info(
            "method %s, server %s, %d clients",
            *(rounds.method, rounds.server_optimizer, len(self.roster)),
        )

    def sample(self, server_round: int) -> list[int]:
        """Node ids of the clients that train in this round, in the order of their names.

        Drawn without replacement from the run's seed, the round and the names of those that do not
        rest.
        """
        by_name = {entry.client: node for node, entry in self.roster.items()}
        names = sorted(by_name.keys() - self.resting(server_round))
        share = max(1, round(self.config.rounds.fraction_train * len(by_name)))
        count = min(share, len(names))
        rng = np.random.default_rng(seed_of(self.config.rounds.seed, server_round, "sampling"))
        chosen = sorted(rng.choice(len(names), size=count, replace=False))
        return [by_name[names[i]] for i in chosen]

    def resting(self, server_round: int) -> set[str]:
        """Clients that are not asked in this round: away, or at rest as they failed too often.

        None of either kind where fewer than `min-replies` would be left.
        """
        names, least = {e.client for e in self.roster.values()}, self.config.rounds.min_replies
        away = self.away if len(names - self.away) >= max(1, least) else set()
        return away | self.backoff.resting(server_round, names - away, least)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A train message for every sampled client; `config` is the instruction's record."""
        self.current = tensors(arrays)
        self.sent = self.server_optimizer.broadcast(self.current)
        if self.sent is not self.current:
            arrays = array_record(self.sent)
        nodes = self.sample(server_round)
        self.participants = {self.roster[node].client for node in nodes}
        return self.messages(MessageType.TRAIN, nodes, arrays, config)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """An evaluate message for every client, or for the participants where the run says so."""
        nodes = sorted(self.roster, key=lambda node: self.roster[node].client)
        if self.config.rounds.evaluate_clients == "cohort":
            nodes = [node for node in nodes if self.roster[node].client in self.participants]
        return self.messages(MessageType.EVALUATE, nodes, arrays, config)

    def messages(
        self, kind: str, nodes: Iterable[int], arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """One message for each node; what they have in common is shared, and nobody changes it.

        A message that is older than the round may last is nobody's any more.
        """
        extra = array_record(self.extra())
        messages = []
        self.asked = set()
        for node in nodes:
            client = self.roster[node].client
            self.asked.add(client)
            own, sent = self.own_extra(client), extra
            if own:
                sent = ArrayRecord({**extra, **array_record(own, "own")})
            content = message_content(
                config, arrays, sent, self.last_accepted_rounds.get(client, 0)
            )
            ttl = self.config.rounds.round_timeout
            messages.append(Message(content, dst_node_id=node, message_type=kind, ttl=ttl))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next global arrays. TooFewRepliesError if fewer than `min-replies` are good.

        `report` then says who was kept and who was left out and why.
        """
        expected = self.expected(self.current)
        self.report = self.screened(server_round, replies, expected, self.expected_extra())
        kept, need = self.report.kept, self.config.rounds.min_replies
        left_out = self.asked & self.report.left_out.keys()
        tired = self.backoff.note(server_round, {reply.client for reply in kept}, left_out)
        for client in tired:
            log.warning(
                "round %d: client %s failed %d times in a row; it rests for %d rounds",
                *(server_round, client, self.backoff.failures[client]),
                self.config.rounds.backoff_rounds,
            )
        if len(kept) < need:
            reasons = "; ".join(f"{c}: {why}" for c, why in sorted(self.report.left_out.items()))
            raise TooFewRepliesError(
                f"round {server_round}: {len(kept)} good replies, min-replies = {need}. {reasons}"
            )
        following = self.next_arrays(self.current, kept)
        self.last_accepted_rounds |= {reply.client: reply.round for reply in kept}
        return array_record(following), mean_metrics(kept)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Mean of the clients' figures; `report` holds each client's."""
        self.report = self.screened(server_round, replies, {}, {})
        return mean_metrics(self.report.kept) if self.report.kept else None

    def screened(
        self,
        server_round: int,
        replies: Iterable[Message],
        expected: Arrays,
        expected_extra: Arrays,
    ) -> RoundReport:
        """The replies sorted by client, the bad ones left out and named in the log."""
        declared = {
            e.client: e.num_examples for e in self.roster.values() if e.client in self.asked
        }
        want = ExpectedReply(server_round, expected, expected_extra, declared)
        report = RoundReport()
        rejected: dict[str, str] = {}
        kept: dict[str, TrainReply] = {}
        for message in replies:
            node = message.metadata.src_node_id
            client = self.roster[node].client if node in self.roster else f"node {node}"
            if message.has_error():
                reason = message.error.reason or f"error {message.error.code}"
                report.left_out[client] = in_one_line(reason)
                continue
            try:
                report.bytes_up += payload_bytes(message)
                reply = replace(read_reply(message), client=client)
            except Exception as error:  # a client's bytes may raise anything
                rejected[client] = in_one_line(f"unreadable: {type(error).__name__}: {error}")
                continue
            if client in kept:
                log.warning("round %d: client %s: its second reply", server_round, client)
                report.rejected += 1
                continue
            reason = rejection_reason(reply, want)
            if reason:
                rejected[client] = reason
            else:
                kept[client] = reply
        if self.config.rounds.norm_bound != "off" and expected:
            norms = {client: norm(self.update_of(reply)) for client, reply in kept.items()}
            rejected |= beyond_bound(norms, self.config.rounds)
        report.rejected += len(rejected)
        report.left_out |= rejected
        report.kept = [kept[client] for client in sorted(kept.keys() - rejected.keys())]
        for client, reason in sorted(report.left_out.items()):
            log.warning("round %d: left out client %s: %s", server_round, client, reason)
        return report


def mean_metrics(replies: list[TrainReply]) -> MetricRecord:
    """Each metric's mean over the clients that sent it, weighted by their number of examples."""
    names = sorted({name for reply in replies for name in reply.metrics})
    means: dict[str, float] = {}
    for name in names:
        having = [r for r in replies if name in r.metrics]
        weights = [r.metrics["num-examples"] for r in having]
        values = [r.metrics[name] for r in having]
        means[name] = float(np.average(values, weights=weights))
    return MetricRecord(dict(means))
