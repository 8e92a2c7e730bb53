"""Scales: one rule that shrinks a recipe to the available time, the same for each of its runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.config import RunConfig, resolve_config
from protocol.options import OptionValue, parse_duration

Keys = Mapping[str, OptionValue]

MIN_ROUNDS, MIN_EPOCHS, MIN_BATCH_SIZE = 5, 2, 128
NUM_EVALUATIONS = 20


@dataclass(frozen=True)
class Scale:
    """Factors of rounds, training data and local epochs; 1 is the paper's setting.

    min_steps: optimizer steps, one after the other, that `scaled` aims at: fewer show chance
    (FedAvg on CIFAR-10: 11 % after 78 steps, 28 % after 390; docs/results/four-methods.md).
    """

    rounds: float
    data: float
    epochs: float
    min_steps: int = 0


SCALES = {
    "paper": Scale(1, 1, 1),
    "day": Scale(1 / 2, 1, 1 / 2),
    "hour": Scale(1 / 5, 1 / 4, 1 / 5),
    "minutes": Scale(1 / 20, 1 / 20, 1 / 10, min_steps=400),
}


def scaled(keys: Keys, scale: Scale, read_at: Sequence[int] = ()) -> dict[str, OptionValue]:
    """The keys that shrink a run of `keys` to `scale`; none at the paper's scale.

    read_at: rounds of the paper whose evaluation is needed.

    - Rounds, data and epochs are multiplied by their factor, down to 5 rounds and 2 epochs (or the
      paper's number, if that is lower).
    - The batch size shrinks with the data, so that an epoch keeps its number of steps, down to 128:
      learning rates that fit the paper's batches (FedCKA's 0.1 with momentum) diverge with small
      batches, and losses that compare the samples of a batch change.
    - Then rounds are added until there are `min_steps` steps, up to the paper's number of rounds;
      where these are too few, local epochs, and then data (or `batches-per-epoch`), up to the
      paper's. Not on your own data without `batches-per-epoch`: its size is not known here.
    - `min-samples` shrinks with the data. Where `batches-per-epoch` is set, it shrinks instead of
      the batch size, down to 1.
    - The run is evaluated 20 times, or as much more often as the rounds in `read_at` (shrunk too)
      require. `diagnostics-every` and `fedproc.schedule-rounds` shrink with the rounds.
    """
    if scale == SCALES["paper"]:
        return {}
    config = resolve_config(keys)
    rounds, epochs = config.rounds.num_rounds, config.train.local_epochs
    batch, batches = config.train.batch_size, config.train.batches_per_epoch
    smaller: dict[str, OptionValue] = {
        "local-epochs": max(min(epochs, MIN_EPOCHS), round(epochs * scale.epochs)),
        "data-fraction": config.data.data_fraction * scale.data,
        "batch-size": max(min(batch, MIN_BATCH_SIZE), round(batch * scale.data)),
        "batches-per-epoch": max(1, round(batches * scale.data)) if batches else 0,
    }
    num_rounds = max(min(rounds, MIN_ROUNDS), round(rounds * scale.rounds))
    if scale.min_steps and (batches or published_size(config.data.source)):
        steps = steps_per_round(resolve_config({**keys, **smaller}), config.data.source)
        num_rounds = max(num_rounds, min(rounds, math.ceil(scale.min_steps / steps)))
        smaller |= with_more_steps(config, smaller, scale, math.ceil(scale.min_steps / num_rounds))
    share = float(smaller["data-fraction"]) / config.data.data_fraction
    smaller["min-samples"] = max(1, round(config.data.min_samples * share))
    needed = [scaled_round(at, rounds, num_rounds) for at in read_at if at < rounds]
    divisor = math.gcd(*needed)  # 0, which every number divides, if none is needed
    max_interval = max(1, num_rounds // NUM_EVALUATIONS)
    lengths = {"fedproc.schedule-rounds": int(config.flat["fedproc.schedule-rounds"])}
    if config.rounds.diagnostics:
        lengths["diagnostics-every"] = config.rounds.diagnostics_every
    return {
        **{k: max(1, round(n * num_rounds / rounds)) for k, n in lengths.items() if n},
        "num-rounds": num_rounds,
        **smaller,
        "evaluate-every": next(n for n in range(max_interval, 0, -1) if divisor % n == 0),
    }


def with_more_steps(
    paper: RunConfig, smaller: Mapping[str, OptionValue], scale: Scale, per_round: int
) -> dict[str, OptionValue]:
    """What of `smaller` is larger for `per_round` steps a round; at most the paper's."""
    config = resolve_config({**paper.flat, **smaller})
    found: dict[str, OptionValue] = {}

    def steps() -> float:
        return steps_per_round(resolve_config({**config.flat, **found}), config.data.source)

    epochs, batches = config.train.local_epochs, config.train.batches_per_epoch
    fraction = config.data.data_fraction
    if steps() < per_round:
        epochs = math.ceil(epochs * per_round / steps())
        found["local-epochs"] = min(paper.train.local_epochs, epochs)
    if batches and steps() < per_round:
        more = math.ceil(batches * per_round / steps())
        found["batches-per-epoch"] = min(paper.train.batches_per_epoch, more)
    while not batches and steps() < per_round and fraction < paper.data.data_fraction:
        fraction += paper.data.data_fraction * scale.data
        found["data-fraction"] = min(paper.data.data_fraction, round(fraction, 6))
    return found


def scaled_round(at: int, paper_rounds: int, rounds: int) -> int:
    """The round of a scaled run that corresponds to round `at` of the paper."""
    return max(1, round(at * rounds / paper_rounds))


def published_size(source: str, pool_test: bool = False) -> int:
    """Samples of a published data set that are split over the clients; 0 for others."""
    from data.readers import READERS  # numpy and PIL: not needed for `--help`

    reader = READERS.get(source)
    if not (reader and reader.published):
        return 0
    return reader.published.num_train + pool_test * reader.published.num_test


def steps_per_round(config: RunConfig, source: str, key: str = "local-epochs") -> float:
    """Optimizer steps that an average client takes in a round, one after the other.

    source: the data set whose published size counts; of one without, one sample is an epoch, so
    that only ratios mean something. key: one of the method's `duration_keys`.
    """
    data, train = config.data, config.train
    size = published_size(source, data.pool_test) or 1
    held = size * data.data_fraction * (1 - data.local_test_fraction) / config.rounds.num_clients
    steps: float = train.batches_per_epoch
    if not steps:
        steps = held / train.batch_size
        steps = math.ceil(steps) if size > 1 else steps
    elif size > 1:  # a batch has at least one sample
        steps = min(steps, math.ceil(held))
    length = config.flat[key]
    count, unit = parse_duration(length) if isinstance(length, str) else (int(length), "epochs")
    return max(1, count) * (1 if unit == "steps" else steps)
