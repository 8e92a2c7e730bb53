"""How a recipe is shrunk to the time there is: one stated rule, the same for every run of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.config import resolve_config
from protocol.options import OptionValue

Keys = Mapping[str, OptionValue]

smallest_rounds, smallest_epochs, smallest_batch = 5, 2, 128
scaled_evaluations = 20


@dataclass(frozen=True)
class Scale:
    """Factors of the rounds, of the training data and of the local epochs; 1 is the paper's."""

    name: str
    rounds: float
    data: float
    epochs: float


SCALES = {
    scale.name: scale
    for scale in (
        Scale("paper", 1, 1, 1),
        Scale("day", 1 / 2, 1, 1 / 2),
        Scale("hour", 1 / 5, 1 / 4, 1 / 5),
        Scale("minutes", 1 / 20, 1 / 20, 1 / 10),
    )
}


def scaled(keys: Keys, scale: Scale, read_at: Sequence[int] = ()) -> dict[str, OptionValue]:
    """The keys that shrink a run of these keys; none at the paper's scale.

    read_at: rounds of the paper's that have to be evaluated.

    Rounds, data and epochs times their factor, but never below 5 rounds and 2 epochs (or the
    paper's own, where that is less). The batch size goes with the data, so that an epoch keeps its
    number of steps, but not below 128: learning rates that fit the paper's batches (FedCKA's 0.1
    with momentum) diverge on small ones, and losses that compare the samples of a batch are other
    losses there. `min-samples` goes with the data; where `batches-per-epoch` rules, that does, down
    to 1, and batches keep their size. 20 evaluations are made, or so many more that
    `read_at`, which shrinks with the rounds, is among them. Diagnostics shrink their distance too.
    """
    if scale.name == "paper":
        return {}
    config = resolve_config(keys)
    rounds, epochs = config.rounds.num_rounds, config.train.local_epochs
    num_rounds = max(min(rounds, smallest_rounds), round(rounds * scale.rounds))
    read = [round_read(at, rounds, num_rounds) for at in read_at if at < rounds]
    common = math.gcd(*read)  # 0, which all numbers divide, where there is none
    rarest = max(1, num_rounds // scaled_evaluations)
    watched: dict[str, OptionValue] = {}
    if config.rounds.diagnostics:
        every = round(config.rounds.diagnostics_every * num_rounds / rounds)
        watched["diagnostics-every"] = max(1, every)
    batch, batches = config.train.batch_size, config.train.batches_per_epoch
    return watched | {
        "num-rounds": num_rounds,
        "local-epochs": max(min(epochs, smallest_epochs), round(epochs * scale.epochs)),
        "data-fraction": config.data.data_fraction * scale.data,
        "batch-size": max(min(batch, smallest_batch), round(batch * scale.data)),
        "batches-per-epoch": max(1, round(batches * scale.data)) if batches else 0,
        "min-samples": max(1, round(config.data.min_samples * scale.data)),
        "evaluate-every": next(n for n in range(rarest, 0, -1) if common % n == 0),
    }


def round_read(at: int, paper_rounds: int, rounds: int) -> int:
    """The round of a shrunk run that stands for the paper's round `at`."""
    return max(1, round(at * rounds / paper_rounds))
