"""One round's lines in history.jsonl and clients.jsonl, from its replies and scores.

A run collects one dict a round, which `split` divides. history.jsonl gets

    round, num_participants (whose update was aggregated), num_left_out, rejected (replies that
    failed update validation), num_reset_needed, num_backed_off, losses, seconds (by
    phase; those of all rounds add up to the run's), client_seconds, client_cpu_seconds, bytes_down,
    bytes_up; if measured: global (accuracy, loss), local_global and personal (mean, worst_decile),
    each with `scores` (those of `metrics`), diagnostics, num_evaluation_left_out,
    evaluation_bytes_down, evaluation_bytes_up

and clients.jsonl

    round, participants, left_out (client to reason), reset_needed (clients whose state is lost or
    ahead of the server), backed_off (clients not sampled: away or in backoff); if measured:
    local_global, personal (client to accuracy), diagnostics (client to value, by measure),
    evaluation_left_out (client to reason), updates (client to seconds, loss, and, where they are
    measured, the norm of its update and the cosine with the mean of the others').

A number that is not finite is null.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from client_app.method import Method
from protocol.messages import TrainReply
from server_app.simulated_roster import MAX_LISTED
from strategies.validation import RoundReport

MAX_LOSS_TERMS = 32  # of a run: clients choose the names, and each is drawn as a curve
COUNTED = ("participants", "left_out", "reset_needed", "backed_off", "evaluation_left_out")
SCORES = ("local_global", "personal")  # their "clients" has each client's accuracy


def split(line: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(line of history.jsonl, line of clients.jsonl)."""
    short, of_clients = dict(line), {"round": line["round"]}
    if updates := short.pop("updates", None):
        of_clients["updates"] = updates
    for key in COUNTED:
        if key in line:
            of_clients[key] = short.pop(key)
            short[f"num_{key}"] = len(line[key])
    for key in (*SCORES, "diagnostics"):
        if key in line:
            short[key], of_clients[key] = divided(line[key])
    return finite_or_null(short), finite_or_null(of_clients)


def divided(value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the value without "clients" at any depth, only what is under "clients")."""
    of_all, of_clients = dict[str, Any](), dict[str, Any]()
    for key, part in value.items():
        if key == "clients":
            return {k: v for k, v in value.items() if k != "clients"}, part
        of_all[key] = part
        if isinstance(part, Mapping):
            of_all[key], inner = divided(part)
            if inner:
                of_clients[key] = inner
    return of_all, of_clients


def finite_or_null(value: Any) -> Any:
    """`value` with None in place of every NaN and infinity in it, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def training_fields(
    server_round: int,
    report: RoundReport,
    bytes_down: int,
    weights: Sequence[float],
    known_terms: set[str],
    answer_seconds: Mapping[str, float],
) -> dict[str, Any]:
    """What is about training.

    weights: of the accepted replies' losses; their numbers of examples, capped as in the average.
    known_terms: the names of the run's losses so far; those that are new are added to it, first
    what most clients sent, up to MAX_LOSS_TERMS in all. Other losses are not recorded.
    answer_seconds: of each site until its reply was there.
    """
    senders = Counter(n for r in report.accepted for n in r.metrics if n.startswith("loss."))
    new = sorted(senders.keys() - known_terms, key=lambda name: (-senders[name], name))
    known_terms.update(new[: MAX_LOSS_TERMS - len(known_terms)])
    losses = {}
    for name in sorted(senders.keys() & known_terms):
        pairs = [
            (reply.metrics[name], weight)
            for reply, weight in zip(report.accepted, weights, strict=True)
            if name in reply.metrics
        ]
        values, counts = zip(*pairs, strict=True)
        if any(counts):
            losses[name.removeprefix("loss.")] = float(np.average(values, weights=counts))

    def total(metric: str) -> float:
        return round(sum(reply.metrics.get(metric, 0.0) for reply in report.accepted), 4)

    return {
        "round": server_round,
        "participants": [reply.client for reply in report.accepted],
        "left_out": report.left_out,
        "rejected": report.rejected,
        "reset_needed": report.reset_needed,
        "losses": losses,
        "updates": updates_of(report, answer_seconds),
        "bytes_down": bytes_down,
        "bytes_up": report.bytes_up,
        "client_seconds": total("seconds"),
        "client_cpu_seconds": total("cpu-seconds"),
    }


def updates_of(
    report: RoundReport, answer_seconds: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """By client what is known of its update; {} in a round of very many.

    seconds: of training, as the client says, or of a site until its reply was there. loss: the
    supervised one, or the first.
    """
    found: dict[str, dict[str, float]] = {}
    for reply in report.accepted if len(report.accepted) <= MAX_LISTED else ():
        metrics = reply.metrics
        losses = sorted(name for name in metrics if name.startswith("loss."))
        name = "loss.supervised" if "loss.supervised" in losses else (losses or [""])[0]
        values = {
            "seconds": answer_seconds.get(reply.client, metrics.get("seconds")),
            "loss": metrics.get(name),
            **report.directions.get(reply.client, {}),
        }
        known = {key: float(f"{v:.4g}") for key, v in values.items() if v is not None}
        if known:
            found[reply.client] = known
    return found


def client_fields(
    replies: list[TrainReply], method: Method, scores: Sequence[str] = ()
) -> dict[str, Any]:
    """Accuracies on the clients' local test parts: mean, worst decile, and each client's.

    `personal` is of the clients' own models, `local_global` of the global one. An accuracy of a
    model that the method does not have is ignored: no honest client sends it. scores: the names of
    the run's other scores; recorded is the mean over the clients that sent one.
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
            if scores:
                fields[key]["scores"] = mean_scores(sent, metric.removesuffix("accuracy"), scores)
    return fields


def mean_scores(
    replies: Sequence[TrainReply], prefix: str, scores: Sequence[str]
) -> dict[str, float]:
    """The mean of each of these scores over the clients that sent it. prefix: such as "global-"."""
    found = {}
    for name in scores:
        metric = f"{prefix}loss" if name == "loss" else f"{prefix}score.{name}"
        values = [reply.metrics[metric] for reply in replies if metric in reply.metrics]
        if values:
            found[name] = float(np.mean(values))
    return found
