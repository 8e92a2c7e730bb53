"""Warnings at the end of a run: a success that is none, and clients that are missing from it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protocol.messages import RosterEntry
from protocol.text import num_of, shortened
from server_app.participation import Participation
from server_app.run_reader import CONFUSION_FILE, RunReader


def outcome_of(
    run: RunReader, roster: Sequence[RosterEntry], class_names: Sequence[str], noun: str
) -> tuple[str, list[str]]:
    """(`2 of 3 sites, without site-c` of the last round or "", warnings, a line each).

    roster: of the clients that can be listed. noun: what they are, "site" or "client".
    """
    found = Participation()
    for line in run.clients():
        found.add(line)
    warnings = [*confusion_warnings(run), *one_class_warnings(found.last, roster, class_names)]
    for client, about in sorted(found.clients.items()):
        if about.rounds:
            warnings += [f"{noun} {client} is {note}" for note in found.notes(client)]
        else:
            warnings.append(f"{noun} {client} never took part: {about.reason}")
    if missing := found.missing_text(noun):
        warnings.append(f"the last round's model is from {missing}")
    return missing, warnings


def confusion_warnings(run: RunReader) -> Iterator[str]:
    """What the newest confusion matrix says against the global model, in one line."""
    path = run.directory / CONFUSION_FILE
    if not path.exists():
        return
    found = json.loads(path.read_text())
    names, matrix = found["classes"], found["last"]["matrix"]
    counts = [sum(row) for row in matrix]
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    never = [repr(n) for n, c, p in zip(names, counts, predicted, strict=True) if c and not p]
    accuracy, share = found["last"]["accuracy"], max(counts) / max(1, sum(counts))
    texts = [f"the global model never predicts {shortened(never)}"] if never else []
    if accuracy <= share + 1e-9:
        largest = names[counts.index(max(counts))]
        texts.append(
            f"its accuracy of {accuracy:.2%} on the test set is not above the share of the largest "
            f"class, {largest!r}: {share:.2%}"
        )
    if texts:
        yield "the global model: " * (not never) + "; ".join(texts)


def one_class_warnings(
    line: Mapping[str, Any], roster: Sequence[RosterEntry], class_names: Sequence[str]
) -> Iterator[str]:
    """Where each client's accuracy of the global model is the share of one class on its test part.

    And where no personal model is above the share of the largest class there. line: the last of
    clients.jsonl.
    """
    counts = {e.client: e.test_label_counts for e in roster if any(e.test_label_counts)}
    scores = {c: score for c, score in line.get("local_global", {}).items() if c in counts}
    for number, name in enumerate(class_names if scores else ()):
        shares = {client: counts[client][number] / sum(counts[client]) for client in scores}
        if all(abs(scores[client] - share) < 1e-9 for client, share in shares.items()):
            yield (
                f"the global model's accuracy on the test part of each of "
                f"{num_of('client', scores)} is the share of the class {name!r} there: it may "
                "predict nothing else"
            )
    largest = {
        client: max(counts[client]) / sum(counts[client])
        for client in line.get("personal", ())
        if sum(map(bool, counts.get(client, ()))) > 1  # with one class, all right is the share too
    }
    if largest and all(line["personal"][c] <= share + 1e-9 for c, share in largest.items()):
        yield (
            f"the personal models' accuracy on the test part of each of "
            f"{num_of('client', largest)} is not above the share of its largest class"
        )
