"""The run config: flat keys from pyproject.toml, presets and overrides, parsed once, typed.

Order of precedence: overrides (`--run-config`), then the preset, then pyproject.toml.
Tables such as `fedintr.*` hold the options of one method or server step; its own half parses them
(`RunConfig.table`), so that a new method touches nothing here.
"""

import difflib
import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from protocol.options import (
    Constraint,
    OptionValue,
    any_text,
    at_least,
    between,
    keys_of,
    more_than,
    one_of,
    option,
    parse_options,
    true_or_false,
)

FlatConfig = dict[str, OptionValue]
T = TypeVar("T")
log = logging.getLogger("keel.config")
app_folder = Path(__file__).resolve().parent.parent

# Names of keys and values before 0.2: accepted until 0.3, with a warning. `flwr run` refuses a key
# that is not in pyproject.toml, so the old keys are listed there too.
RENAMED_KEYS = {
    "server": "server-optimizer",
    "rest-after": "backoff-after",
    "rest-rounds": "backoff-rounds",
}
RENAMED_VALUES = {("evaluate-clients", "participants"): "cohort"}


def with_current_names(flat: Mapping[str, OptionValue], warn: bool = True) -> FlatConfig:
    """The same config under today's names of keys and values; each old one logs a warning.

    ValueError if a key is given under both of its names.
    """
    renamed: FlatConfig = {}
    for key, value in flat.items():
        name = RENAMED_KEYS.get(key, key)
        if name != key:
            if name in flat:
                raise ValueError(f"{key} and {name} are the same key: give {name} only")
            if warn:
                log.warning("%s is now called %s; the old name works until Keel 0.3", key, name)
        new_value = RENAMED_VALUES.get((name, str(value)), value)
        if new_value != value and warn:
            log.warning("%s = %r is now called %r", name, value, new_value)
        renamed[name] = new_value
    return renamed


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from, how they are split over clients, and how they are augmented."""

    source: str = option(any_text())
    data_dir: str = option(any_text())
    data_fraction: float = option(between(0, 1, open_low=True))
    image_size: int = option(between(0, 64))
    channels: int = option(between(0, 3))
    normalise: str = option(one_of("source", "half"))
    partition: str = option(one_of("iid", "dirichlet", "dirichlet-balanced", "classes", "shards"))
    alpha: float = option(more_than(0))
    classes_per_client: int = option(at_least(1))
    shards_per_client: int = option(at_least(1))
    min_samples: int = option(at_least(1))
    local_test_fraction: float = option(between(0, 1, open_high=True))
    flip: bool = option(true_or_false())
    crop_padding: int = option(between(0, 16))
    rotation: float = option(between(0, 180))


@dataclass(frozen=True)
class ModelConfig:
    """Which network; its parts that a method adds are the method's business."""

    model: str = option(any_text())
    client_models: str = option(any_text())
    norm: str = option(one_of("", "group", "batch"))


@dataclass(frozen=True)
class TrainConfig:
    """Local training: SGD over a client's own samples."""

    local_epochs: int = option(at_least(0))
    batch_size: int = option(at_least(1))
    batches_per_epoch: int = option(at_least(0))
    lr: float = option(at_least(0))
    lr_decay: float = option(between(0, 1, open_low=True))
    lr_decay_epoch: float = option(between(0, 1, open_low=True))
    momentum: float = option(between(0, 1, open_high=True))
    weight_decay: float = option(at_least(0))
    clip_norm: float = option(at_least(0))
    device: str = option(any_text())
    threads: int = option(at_least(0))
    precision: str = option(one_of("fp32", "tf32", "bf16"))
    compile: bool = option(true_or_false())
    cache_mb: int = option(at_least(0))


@dataclass(frozen=True)
class PrivacyConfig:
    """Clipping and Gaussian noise on what a client sends; epsilon and delta are of one release."""

    epsilon: float = option(at_least(0))
    delta: float = option(between(0, 1, open_low=True, open_high=True))
    clip_norm: float = option(more_than(0))
    sensitivity: str = option(one_of("local", "central"))


RUN_NAME_RULE = "1 to 64 of the characters A-Z a-z 0-9 . _ -, not beginning with a dot"


def is_run_name(name: str) -> bool:
    """Whether `name` can name a run directory; "" leaves the choice to Keel."""
    return not name or re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name) is not None


@dataclass(frozen=True)
class RoundsConfig:
    """The run: who takes part, how long, whose updates count, what is evaluated and written."""

    preset: str = option(any_text())
    method: str = option(any_text())
    server_optimizer: str = option(any_text())
    weighting: str = option(one_of("auto", "examples", "uniform"))
    seed: int = option(at_least(0))
    num_rounds: int = option(at_least(1))
    num_clients: int = option(at_least(0))
    fraction_train: float = option(between(0, 1, open_low=True))
    min_replies: int = option(at_least(1))
    round_timeout: float = option(more_than(0))
    start_timeout: float = option(more_than(0))
    backoff_after: int = option(at_least(0))
    backoff_rounds: int = option(at_least(1))
    norm_bound: str = option(one_of("off", "fixed", "median"))
    norm_bound_value: float = option(more_than(0))
    aggregation: str = option(one_of("mean", "median", "trimmed-mean", "krum", "multi-krum"))
    trim_fraction: float = option(between(0, 0.5, open_low=True, open_high=True))
    num_malicious: int = option(at_least(0))
    num_selected: int = option(at_least(0))
    tensorboard: bool = option(true_or_false())
    output_dir: str = option(any_text())
    run_name: str = option(Constraint(is_run_name, RUN_NAME_RULE))
    resume: str = option(any_text())
    evaluate_every: int = option(at_least(1))
    evaluate_global: bool = option(true_or_false())
    evaluate_clients: str = option(one_of("auto", "none", "cohort", "all"))
    last_rounds: int = option(at_least(1))
    diagnostics: str = option(any_text())
    diagnostics_every: int = option(at_least(1))


@dataclass(frozen=True, eq=False)
class RunConfig:
    """A whole, checked config. `flat` holds every key with its final value.

    Compared by identity, so that it can key what is built from it once a process.
    """

    rounds: RoundsConfig
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    privacy: PrivacyConfig
    flat: Mapping[str, OptionValue]

    def table(self, name: str, cls: type[T]) -> T:
        """The options dataclass `cls` from the keys `name.*`: one method's, or a server step's."""
        return parse_options(cls, self.flat, prefix=f"{name}.")

    def to_json(self) -> str:
        """One line that `config_from_json` reads back; what clients are sent."""
        return json.dumps(dict(self.flat), sort_keys=True)


def keel_home() -> Path:
    """$KEEL_HOME, or ~/.keel: where runs, data and caches go unless the config says otherwise."""
    return Path(os.environ.get("KEEL_HOME") or Path.home() / ".keel").expanduser().absolute()


def project_file() -> Path:
    """pyproject.toml: of the wheel if Keel is installed from one, else of the checkout or bundle."""
    installed = app_folder / "protocol" / "pyproject.toml"
    return installed if installed.exists() else app_folder / "pyproject.toml"


@lru_cache(maxsize=1)
def _project() -> dict[str, Any]:
    return tomllib.loads(project_file().read_text())


def keel_version() -> str:
    """The version in pyproject.toml: of what runs here, installed or from an app bundle."""
    return str(_project()["project"]["version"])


@lru_cache(maxsize=1)
def _defaults() -> Mapping[str, OptionValue]:
    table = _project()
    flat: FlatConfig = {}
    for key, value in table["tool"]["flwr"]["app"]["config"].items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": v for name, v in value.items()}
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if key not in RENAMED_KEYS}


def default_config() -> FlatConfig:
    """Every key and its default, flat, as [tool.flwr.app.config] of pyproject.toml says."""
    return dict(_defaults())


@lru_cache(maxsize=1)
def presets() -> dict[str, FlatConfig]:
    """The named paper settings of presets.yaml: name to the keys it sets."""
    text = (app_folder / "protocol" / "presets.yaml").read_text()
    loaded: dict[str, FlatConfig] = yaml.safe_load(text)
    return loaded


most_shown = 60  # names in a line


def refuse_unknown(what: str, name: str, allowed: list[str]) -> None:
    """ValueError with the nearest names if `name` is not allowed; `what` is the key holding it."""
    if name in allowed:
        return
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    table = [key for key in allowed if key.startswith(name.partition(".")[0] + ".")]
    shown = table if len(allowed) > most_shown and table else allowed
    if near and len(shown) > most_shown:
        raise ValueError(f"{what} = {name!r} is unknown{hint}")
    raise ValueError(f"{what} = {name!r} is unknown{hint} Allowed: {', '.join(sorted(shown))}")


def resolve_config(overrides: Mapping[str, OptionValue]) -> RunConfig:
    """The run's config from the keys that the user gave.

    ValueError, one line, for an unknown key or preset and for a value that is not allowed.
    """
    overrides = with_current_names(overrides)
    flat = default_config()
    known = list(flat)
    for key in overrides:
        refuse_unknown("config key", key, known)
    preset = overrides.get("preset", flat["preset"])
    if preset:
        refuse_unknown("preset", str(preset), list(presets()))
        flat |= presets()[str(preset)]
    flat |= overrides
    return _parse(flat)


@lru_cache(maxsize=16)
def config_from_json(text: str) -> RunConfig:
    """The config that `RunConfig.to_json` wrote; parsed once a process, as every message has it."""
    return _parse(with_current_names(json.loads(text)))


def _parse(flat: FlatConfig) -> RunConfig:
    rounds, data = parse_options(RoundsConfig, flat), parse_options(DataConfig, flat)
    model, train = parse_options(ModelConfig, flat), parse_options(TrainConfig, flat)
    privacy = parse_options(PrivacyConfig, flat, prefix="privacy.")
    if data.channels == 2:
        raise ValueError("channels = 2: it has to be 0 (the source's own), 1 or 3")
    if 0 < data.image_size < 28:
        raise ValueError(f"image-size = {data.image_size}: it has to be 0, or from 28 to 64")
    config = RunConfig(rounds, data, model, train, privacy, flat)
    for name in ("resume", "output-dir", "data-dir"):
        path = Path(str(flat[name])).expanduser()
        if flat[name] and not path.is_absolute():
            raise ValueError(
                f"{name} = {str(flat[name])!r}: it has to be an absolute path; a Flower run has a "
                f"working directory of its own. From here it would be {path.absolute()}"
            )
    return config


group_types = (RoundsConfig, DataConfig, ModelConfig, TrainConfig)


def all_group_keys() -> set[str]:
    """Every key outside the tables of methods and server steps."""
    keys = {key for cls in group_types for key in keys_of(cls)}
    return keys | {f"privacy.{key}" for key in keys_of(PrivacyConfig)}
