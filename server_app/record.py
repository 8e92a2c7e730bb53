"""The fields of one round's line in the history, from the round's replies and scores."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from client_app.method import Method
from protocol.messages import TrainReply
from strategies.average import RoundReport

MAX_LOSS_TERMS = 32  # at a time: clients choose the names, and each is drawn as a curve


def training_fields(
    server_round: int,
    report: RoundReport,
    bytes_down: int,
    weights: Sequence[float],
    known_terms: dict[str, int],
) -> dict[str, Any]:
    """The part of a line that is about training.

    weights: of the accepted replies' losses; their numbers of examples, capped as in the average.
    known_terms: the names of the run's losses so far, with the largest number of clients that sent
    each in one round; changed in place. New names are added, those that most clients sent first,
    up to MAX_LOSS_TERMS in all. Once there are so many, a new name that several clients sent
    replaces one that never more than one client sent: a single client must not keep out a term
    that comes later. The losses under other names are not recorded.
    """
    senders = Counter(n for r in report.accepted for n in r.metrics if n.startswith("loss."))
    for name in senders.keys() & known_terms.keys():
        known_terms[name] = max(known_terms[name], senders[name])
    new = sorted(senders.keys() - known_terms, key=lambda name: (-senders[name], name))
    for name in new:
        if len(known_terms) >= MAX_LOSS_TERMS:
            single = [known for known, num in known_terms.items() if num == 1]
            if not single or senders[name] == 1:
                break
            del known_terms[single[-1]]
        known_terms[name] = senders[name]
    losses = {}
    for name in sorted(senders.keys() & known_terms.keys()):
        pairs = [
            (reply.metrics[name], weight)
            for reply, weight in zip(report.accepted, weights, strict=True)
            if name in reply.metrics
        ]
        values, counts = zip(*pairs, strict=True)
        if any(counts):
            losses[name.removeprefix("loss.")] = float(np.average(values, weights=counts))
    fields = {
        "round": server_round,
        "participants": [reply.client for reply in report.accepted],
        "left_out": report.left_out,
        "rejected": report.rejected,
        "reset_needed": report.reset_needed,
        "losses": losses,
        "bytes_down": bytes_down,
        "bytes_up": report.bytes_up,
        "client_seconds": round(sum(r.metrics.get("seconds", 0.0) for r in report.accepted), 4),
        "client_cpu_seconds": round(
            sum(r.metrics.get("cpu-seconds", 0.0) for r in report.accepted), 4
        ),
    }
    old_state = {}
    for reply in report.accepted:
        state_round = reply.metrics.get("old-state", 0)
        if 1 <= state_round < server_round:  # the client may state any number
            old_state[reply.client] = int(state_round)
    if old_state:
        fields["old_state"] = old_state
    return fields


def client_fields(replies: list[TrainReply], method: Method) -> dict[str, Any]:
    """Accuracies on the clients' local test parts: mean, worst decile, and each client's.

    `personal` is of the clients' own models, `local_global` of the global one. An accuracy of a
    model that the method does not have is ignored: no honest client sends it.
    """
    fields: dict[str, Any] = {}
    for key, metric, has_model in (
        ("local_global", "global-accuracy", method.has_global_model),
        ("personal", "personal-accuracy", method.is_personal),
    ):
        sent = replies if has_model else []
        accuracies = {r.client: r.metrics[metric] for r in sent if metric in r.metrics}
        if accuracies:
            ascending = sorted(accuracies.values())
            fields[key] = {
                "mean": float(np.mean(ascending)),
                "worst_decile": float(np.mean(ascending[: max(1, len(ascending) // 10)])),
                "clients": dict(sorted(accuracies.items())),
            }
    return fields
