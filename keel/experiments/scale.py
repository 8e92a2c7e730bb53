"""Scales: one rule that shrinks a recipe to the available time, the same for each of its runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.config import resolve_config
from protocol.options import OptionValue

MIN_ROUNDS, MIN_EPOCHS, MIN_BATCH_SIZE = 5, 2, 128
NUM_EVALUATIONS = 20


@dataclass(frozen=True)
class Scale:
    """Factors of rounds, training data and local epochs; 1 is the paper's setting."""

    rounds: float
    data: float
    epochs: float


PAPER = "paper"
SCALES = {
    PAPER: Scale(1, 1, 1),
    "day": Scale(1 / 2, 1, 1 / 2),
    "hour": Scale(1 / 5, 1 / 4, 1 / 5),
    "minutes": Scale(1 / 20, 1 / 20, 1 / 10),
}


def scaled(
    keys: Mapping[str, OptionValue], name: str, read_at: Sequence[int] = ()
) -> dict[str, OptionValue]:
    """The keys that shrink a run of `keys` to the scale called `name`; none at the paper's.

    read_at: rounds of the paper whose evaluation is needed.

    - Rounds, data and epochs are multiplied by their factor, down to 5 rounds and 2 epochs (or the
      paper's number, if that is lower).
    - The batch size shrinks with the data, so that an epoch keeps its number of steps, down to 128:
      learning rates that fit the paper's batches (FedCKA's 0.1 with momentum) diverge with small
      batches, and losses that compare the samples of a batch change. Where `batches-per-epoch` is
      set, it shrinks instead, down to 1.
    - `min-samples` shrinks with the data, `diagnostics-every` and `fedproc.schedule-rounds` with
      the rounds.
    - The run is evaluated 20 times, or as much more often as the rounds in `read_at` (shrunk too)
      require.
    """
    if name == PAPER:
        return {}
    scale, config = SCALES[name], resolve_config(keys)
    paper_rounds, epochs = config.rounds.num_rounds, config.train.local_epochs
    batch_size, batches = config.train.batch_size, config.train.batches_per_epoch
    rounds = max(min(paper_rounds, MIN_ROUNDS), round(paper_rounds * scale.rounds))
    lengths = {"fedproc.schedule-rounds": int(config.flat["fedproc.schedule-rounds"])}
    if config.rounds.diagnostics:
        lengths["diagnostics-every"] = config.rounds.diagnostics_every
    needed = [scaled_round(at, paper_rounds, rounds) for at in read_at if at < paper_rounds]
    divisor = math.gcd(*needed)  # 0, which every number divides, if none is needed
    max_interval = max(1, rounds // NUM_EVALUATIONS)
    return {
        **{k: max(1, round(n * rounds / paper_rounds)) for k, n in lengths.items() if n},
        "num-rounds": rounds,
        "local-epochs": max(min(epochs, MIN_EPOCHS), round(epochs * scale.epochs)),
        "data-fraction": config.data.data_fraction * scale.data,
        "batch-size": max(min(batch_size, MIN_BATCH_SIZE), round(batch_size * scale.data)),
        "batches-per-epoch": max(1, round(batches * scale.data)) if batches else 0,
        "min-samples": max(1, round(config.data.min_samples * scale.data)),
        "evaluate-every": next(n for n in range(max_interval, 0, -1) if divisor % n == 0),
    }


def scaled_round(at: int, paper_rounds: int, rounds: int) -> int:
    """The round of a scaled run that corresponds to round `at` of the paper."""
    return max(1, round(at * rounds / paper_rounds))
