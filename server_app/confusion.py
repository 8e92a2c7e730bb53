"""confusion.json: the confusion matrices of the global model after the last and the best round."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from client_app.evaluation import Score
from protocol.files import write_atomically
from server_app.run_reader import CONFUSION_FILE


def note_confusion(path: Path, number: int, score: Score, class_names: Sequence[str]) -> None:
    """Write the matrix of a round on the test set: rows are labels, columns predicted classes.

    The best round is the first of the highest accuracy. Rounds that a resume repeats do not count.
    """
    if score.confusion is None:
        return
    file, found = path / CONFUSION_FILE, dict[str, Any]()
    with suppress(FileNotFoundError):
        found = json.loads(file.read_text())
    last = {"round": number, "accuracy": score.accuracy, "matrix": score.confusion.tolist()}
    best = found.get("best", last)
    if best["round"] >= number or score.accuracy > best["accuracy"]:
        best = last
    content = {"classes": list(class_names), "last": last, "best": best}
    write_atomically(file, json.dumps(content).encode())
