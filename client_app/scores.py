"""Scores of a model beside accuracy and loss: Keel's own, and functions of the user's.

A score is a function of (probabilities float64 [N, C], labels int64 [N]) that returns a number, NaN
where it is not defined. The key `metrics` chooses them.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from protocol.config import RunConfig
from protocol.options import ConfigError
from protocol.text import in_one_line

MAX_CONFUSED = 200  # classes of a confusion matrix; of more it is too large to write every round
NUM_BINS = 15  # of the expected calibration error, equally wide, as in Guo et al. 2017

Function = Callable[[np.ndarray, np.ndarray], float]


def confusion_matrix(
    predicted: np.ndarray, labels: np.ndarray, num_classes: int
) -> np.ndarray | None:
    """Samples by label (row) and predicted class (column), int64 [C, C]; None of many classes."""
    if num_classes > MAX_CONFUSED:
        return None
    pairs = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return pairs.reshape(num_classes, num_classes)


def counts(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, ...]:
    """Samples by class, [C] each: predicted as it and of it, predicted as it, of it."""
    predicted, num = probabilities.argmax(1), probabilities.shape[1]
    parts = labels[predicted == labels], predicted, labels
    return tuple(np.bincount(part, minlength=num) for part in parts)


def balanced_accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean recall of the classes that have samples."""
    right, _, of_label = counts(probabilities, labels)
    is_there = of_label > 0
    return float(np.mean(right[is_there] / of_label[is_there]))


def macro_f1(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean F1 of the classes that have samples or are predicted."""
    right, as_label, of_label = counts(probabilities, labels)
    total = as_label + of_label  # 2 TP + FP + FN
    is_there = total > 0
    return float(np.mean(2 * right[is_there] / total[is_there]))


def auroc(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean area under the ROC curve of each class with samples against all others.

    Equal probabilities count one half. NaN where all samples have one label.
    """
    areas = []
    for label in np.unique(labels):
        is_positive = labels == label
        num_positive, num = int(is_positive.sum()), len(labels)
        if num_positive == num:
            return math.nan
        _, place, count = np.unique(
            probabilities[:, label], return_inverse=True, return_counts=True
        )
        ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # from 1; equal values share the mean
        above = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
        areas.append(above / (num_positive * (num - num_positive)))
    return float(np.mean(areas))


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean gap between confidence and accuracy over 15 bins of confidence, Guo et al. 2017."""
    confidence, is_right = probabilities.max(1), probabilities.argmax(1) == labels
    bins = np.minimum(np.ceil(confidence * NUM_BINS).astype(int), NUM_BINS) - 1
    gap = np.bincount(bins, is_right - confidence, NUM_BINS)
    return float(np.abs(gap).sum() / len(labels))


FUNCTIONS: Mapping[str, Function] = {
    "macro-f1": macro_f1,
    "balanced-accuracy": balanced_accuracy,
    "auroc": auroc,
    "ece": expected_calibration_error,
}


def score_functions(config: RunConfig) -> dict[str, Function]:
    """The functions that `metrics` names, without accuracy and loss, which are always measured.

    ConfigError for own code that cannot be loaded or is no function.
    """
    found: dict[str, Function] = {}
    for name, own in config.scores.items():
        if own is None:
            found |= {name: FUNCTIONS[name]} if name in FUNCTIONS else {}
            continue
        try:
            function = own.value
        except ValueError as error:
            raise ConfigError("metrics", f"metrics = {own.spec!r}: {error}") from error
        if not callable(function):
            expected = "expected a function of (probabilities [N, C], labels [N])"
            raise ConfigError("metrics", f"metrics = {own.spec!r}: {expected}")
        found[name] = function
    return found


def measured(
    functions: Mapping[str, Function], probabilities: np.ndarray, labels: np.ndarray
) -> tuple[dict[str, float], dict[str, str]]:
    """(score by name, what went wrong by the name of each score that raised or is not finite)."""
    values, faults = dict[str, float](), dict[str, str]()
    for name, function in functions.items():
        try:
            # copies: a function may write to what it gets
            value = float(function(probabilities.copy(), labels.copy()))
        except Exception as error:  # a user's function may raise anything
            faults[name] = in_one_line(f"raised {type(error).__name__}: {error}")
            continue
        if math.isfinite(value):
            values[name] = value
        else:
            faults[name] = f"returned {value}"
    return values, faults
