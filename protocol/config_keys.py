"""The config's common keys but those about data, in four groups: type, range, meaning of each.

pyproject.toml states the defaults. The options of a method or server optimizer are declared where
it is implemented.
"""

import math
from dataclasses import dataclass

from protocol.files import STATE_FILE
from protocol.options import (
    ConfigError,
    Constraint,
    any_text,
    at_least,
    between,
    matching,
    more_than,
    one_of,
    option,
    true_or_false,
)
from protocol.server_optimizers import SERVER_OPTIMIZERS
from protocol.text import num_of

MIN_ROBUST_REPLIES = 3  # of two, neither is an outlier


@dataclass(frozen=True)
class ModelConfig:
    """Which network; what a method adds to it is declared by the method."""

    model: str = option(any_text(), "the network; see `keel models`")
    client_models: str = option(
        any_text(),
        "comma-separated networks, assigned to the clients in turn, for methods that support mixed "
        "architectures",
    )
    norm: str = option(
        one_of("", "group", "batch"), 'norm layer where the model offers a choice; "": its default'
    )
    width: int = option(at_least(0), "channels of a ResNet's first stage; 0: its own")
    layer_widths: str = option(
        matching(r"|\d{1,5}(,\d{1,5})*", "whole numbers with commas between them, or nothing"),
        'cnn-fedreco: channels of its two convolutions and units of its two layers after them; "": '
        "its own",
    )
    variant: str = option(
        one_of("", "fedrcl"),
        "fedrcl: vgg9, mobilenet-v2, shufflenet and squeezenet as in the code of FedRCL's group: "
        "convolutions with biases, a 1x1 stem, a grouped first convolution",
    )
    weights: str = option(
        any_text(),
        "file of weights to start from: safetensors, or a state_dict saved by torch; a head of "
        'another width is left out; "": random',
    )
    init: str = option(
        one_of("", "fan-in"),
        'initial weights; "": the model\'s own; fan-in: N(0, 2/fan_in) in all layers, as in the '
        "code of FedIntR's ResNet-20",
    )


@dataclass(frozen=True)
class TrainConfig:
    """Local training: SGD over a client's own samples."""

    local_epochs: int = option(at_least(0), "epochs a client trains in each round")
    batch_size: int = option(at_least(1), "samples in a batch")
    batches_per_epoch: int = option(
        at_least(0), "> 0: the batch size is a client's samples divided by this, rounded up"
    )
    lr: float = option(at_least(0), "learning rate")
    lr_decay: float = option(
        between(0, 1, open_low=True), "the learning rate is lr * lr-decay ** (round - 1)"
    )
    lr_decay_epoch: float = option(
        between(0, 1, open_low=True),
        "the learning rate is also multiplied by lr-decay-epoch ** (local epoch, from 0)",
    )
    lr_schedule: str = option(
        one_of("exponential", "cosine"),
        "how the learning rate falls over the rounds: by lr-decay, or along half a cosine to 0",
    )
    warmup_rounds: int = option(
        at_least(0), "rounds in which the learning rate rises to lr, after which it falls"
    )
    optimizer: str = option(
        one_of("sgd", "adam", "adamw"),
        "optimizer of local training; adam and adamw are torch's, begun anew in each round",
    )
    momentum: float = option(between(0, 1, open_high=True), "momentum of sgd")
    weight_decay: float = option(at_least(0), "weight decay of the optimizer")
    clip_norm: float = option(at_least(0), "the gradient's norm is clipped to this; 0: no clipping")
    device: str = option(
        matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"),
        "auto: cuda if there is a GPU, else cpu; cuda:N: that GPU (not with --engine flower)",
    )
    threads: int = option(
        between(0, 1024),  # with 100,000 threads the process crashes
        "CPU threads of torch in each worker; 0: as many as the worker was assigned",
    )
    precision: str = option(
        one_of("fp32", "tf32", "bf16", "auto"),
        "number format in training: fp32; tf32: TF32 matrix products on a GPU; bf16: bfloat16 "
        "forward passes; auto: bf16 for more than a million parameters, on a GPU or a CPU with "
        "bfloat16 products, else fp32",
    )
    cuda_graphs: bool = option(
        true_or_false(),
        "on a GPU, record a step of local training and replay it",
    )
    frozen_statistics: str = option(
        one_of("running", "batch"),
        "BatchNorm in frozen models: their own statistics, or each batch's as in FedIntR's code, "
        "which cannot be cached; fedmlb always uses the running ones",
    )
    cache_mb: int = option(
        at_least(0), "memory for cached representations of frozen models; 0: recompute them"
    )


@dataclass(frozen=True)
class PrivacyConfig:
    """Clipping and Gaussian noise on what a client sends; epsilon and delta are per release."""

    epsilon: float = option(
        at_least(0), "epsilon of one release, below 1; 0: no noise, no clipping"
    )
    delta: float = option(between(0, 1, open_low=True, open_high=True), "delta of one release")
    clip_norm: float = option(more_than(0), "C: a release is scaled down to this norm")
    metrics: str = option(
        one_of("withheld", "exact"),
        "with epsilon > 0, what clients send without noise: withheld: no losses, accuracies, label "
        "counts or times; exact: all of them, outside the guarantee",
    )

    @property
    def withholds_metrics(self) -> bool:
        """Whether clients send nothing measured on their data."""
        return self.epsilon > 0 and self.metrics == "withheld"


TRACKERS = ("tensorboard", "mlflow", "wandb")
DIAGNOSTICS = (  # server_app.diagnostics.comparison computes them
    *("cka-global", "cka-clients", "effective-rank", "vci", "within-class-trace"),
    *("between-class-trace", "deviation-bound", "deviating-share", "drift", "relative-drift"),
)

ALWAYS_MEASURED = ("accuracy", "loss")
SCORES = (
    *ALWAYS_MEASURED,
    "macro-f1",
    "balanced-accuracy",
    "auroc",
    "ece",
)  # client_app.scores has the rest
MAX_SCORE_NAME = 40  # characters of an own score's name, which is part of a metric's


def names_in(text: str) -> list[str]:
    """The names in a value such as "drift, vci"."""
    return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True)
class RoundsConfig:
    """The run: who takes part, how long, whose updates count, what is evaluated and written."""

    preset: str = option(any_text(), "named paper settings; explicit keys override them")
    method: str = option(
        any_text(), "the method; see `keel methods`; or your own, such as mine.py:FedPull"
    )
    method_options: str = option(
        any_text(),
        "options of an own method, such as mu = 0.3, where only keys of pyproject.toml can be set: "
        "with `flwr run`",
    )
    server_optimizer: str = option(
        any_text(), "the server's update rule: " + ", ".join(SERVER_OPTIMIZERS)
    )
    weighting: str = option(
        one_of("auto", "examples", "uniform"),
        "weights of the clients' updates; auto: the paper's, or uniform with norm-bound or a "
        "robust aggregation",
    )
    max_weight_share: float = option(
        between(0, 1, open_low=True),
        "largest share of a round's weight for a client whose number of samples the server cannot "
        "check; 1: no cap",
    )
    seed: int = option(
        at_least(0), "seed of all randomness: weights, partition, sampling, batch order, dropout"
    )
    num_rounds: int = option(at_least(1), "number of rounds")
    num_clients: int = option(
        at_least(0), "expected number of clients; 0: as many as the federation has"
    )
    train_fraction: float = option(
        between(0, 1, open_low=True), "share of the clients that are sampled in a round"
    )
    min_replies: int = option(at_least(1), "a round with fewer accepted replies ends the run")
    round_timeout: float = option(
        more_than(0),
        "seconds to wait for the replies of a round; in a simulation, per client of a worker",
    )
    backoff_after: int = option(
        at_least(0),
        "unanswered messages in a row after which a client is neither sampled nor evaluated for "
        "five rounds, or until it answers; 0: never",
    )
    norm_bound: str = option(
        one_of("off", "fixed", "median"), "bound on the norm of a client's update"
    )
    norm_bound_value: float = option(
        more_than(0), "fixed: the largest norm; median: factor on the round's median norm"
    )
    aggregation: str = option(
        one_of("mean", "median", "trimmed-mean", "krum", "multi-krum"),
        "how the clients' updates are combined",
    )
    trim_fraction: float = option(
        between(0, 0.5, open_low=True, open_high=True),
        "trimmed-mean: share of the values removed at each end",
    )
    num_malicious: int = option(
        at_least(0), "krum, multi-krum: f, the number of malicious clients a round to tolerate"
    )
    tracker: str = option(
        Constraint(
            lambda v: v.strip() == "none" or {n.strip() for n in v.split(",")} <= {*TRACKERS},
            "none, or some of tensorboard, mlflow, wandb, comma-separated",
            ("none", *TRACKERS),
        ),
        "where the run's figures are copied: tensorboard (in the run directory), mlflow, wandb; "
        "each needs Keel's extra of that name",
    )
    checkpoint_every: int = option(
        at_least(1), "rounds between checkpoints, which a resume starts from"
    )
    keep_state: bool = option(
        true_or_false(),
        "keep the checkpoints and client state of a finished run, to continue it with more rounds; "
        "false: keep only personal models",
    )
    output_dir: str = option(any_text(), 'parent of run directories; "": $KEEL_HOME/runs')
    run_name: str = option(
        matching(
            # commands take -a for an option
            rf"|(?!(?:{STATE_FILE})\Z)[A-Za-z0-9_][A-Za-z0-9._-]{{0,63}}",
            "1 to 64 of the characters A-Z a-z 0-9 . _ -, not beginning with . or -, and not the "
            "name of a file of client state, such as reset-state",
        ),
        'name of the run directory, which must not exist; "": time, method and data',
    )
    resume: str = option(any_text(), "run directory to resume; `keel resume` sets it")
    evaluate_every: int = option(
        at_least(1), "rounds between evaluations; the last round is always evaluated"
    )
    evaluate_global: bool = option(
        true_or_false(), "evaluate the global model on the source's test set"
    )
    evaluate_clients: str = option(
        one_of("auto", "none", "cohort", "all"),
        "clients whose local test parts are used; auto: all for personal methods, else none",
    )
    metrics: str = option(
        any_text(),
        f"scores beside the accuracy: some of {', '.join(SCORES)}, or your own, such as "
        "mine.py:top2, comma-separated",
    )
    last_rounds: int = option(
        at_least(1), "the summary's mean and median are over this many last evaluations"
    )
    diagnostics: str = option(
        any_text(), 'measures of the local models: comma-separated names, or all; "": none'
    )
    diagnostics_every: int = option(at_least(1), "rounds between diagnostics")

    def is_due(self, number: int, every: int) -> bool:
        """Whether what is done every so many rounds, and after the last, is done in this one."""
        return number == self.num_rounds or number % every == 0

    @property
    def trackers(self) -> list[str]:
        """The trackers of the run, each once."""
        return [name for name in TRACKERS if name in names_in(self.tracker)]

    @property
    def is_defended(self) -> bool:
        """Whether each update is compared with the others before they are combined."""
        return self.norm_bound != "off" or self.aggregation != "mean"

    @property
    def fewest_replies(self) -> int:
        """A round with fewer accepted replies ends the run."""
        return max(self.min_replies, 1 if self.aggregation == "mean" else MIN_ROBUST_REPLIES)

    @property
    def fewest_replies_text(self) -> str:
        """What `fewest_replies` comes from."""
        if self.fewest_replies == self.min_replies:
            return f"min-replies = {self.min_replies}"
        return f"aggregation = {self.aggregation!r} needs {self.fewest_replies}"

    def aggregation_problem(self, num_clients: int) -> ConfigError | None:
        """Why `aggregation` tolerates no malicious client among so few; None if it does."""
        needed = 2 * self.num_malicious + 3
        if self.aggregation in ("krum", "multi-krum") and num_clients < needed:
            return ConfigError(
                "num-malicious",
                f"num-malicious = {self.num_malicious}: {self.aggregation} needs "
                f"2 * {self.num_malicious} + 3 = {needed} clients a round, there are {num_clients}",
            )
        if self.aggregation != "mean" and num_clients < MIN_ROBUST_REPLIES:
            return ConfigError(
                "aggregation",
                f"aggregation = {self.aggregation!r}: needs {MIN_ROBUST_REPLIES} clients a round, "
                f"there are {num_clients}",
            )
        if self.aggregation == "trimmed-mean" and int(self.trim_fraction * num_clients) == 0:
            return ConfigError(
                "trim-fraction",
                f"trim-fraction = {self.trim_fraction:g}: of "
                f"{num_of('client', num_clients)} a round it trims none; expected at least "
                f"{math.ceil(1000 / num_clients) / 1000:g}",
            )
        return None

    def check_cohort(self, cohort: int) -> None:
        """ValueError, one line, if a round of this number of clients cannot be aggregated."""
        if problem := self.aggregation_problem(cohort):
            raise problem
        if self.min_replies > cohort:
            raise ConfigError(
                "min-replies",
                f"min-replies = {self.min_replies}: only "
                f"{num_of('client trains', cohort, 'clients train')} in a round; lower it, "
                "or raise train-fraction",
            )
