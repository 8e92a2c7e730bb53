"""The run config: flat keys from pyproject.toml, presets and overrides, parsed once, typed.

Order of precedence: overrides (`--run-config`), then the preset, then pyproject.toml.
Tables such as `fedintr.*` hold the options of one method or server optimizer, declared where it is
implemented and checked when its class is imported (`client_app.methods.method_of`), so that a new
method touches nothing here. Nothing here imports torch: a mistake in a common key or in a name is
refused in a fraction of a second.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from protocol.catalogue import app_folder as app_folder
from protocol.catalogue import classes, method_names
from protocol.config_keys import (
    ALWAYS_MEASURED,
    DIAGNOSTICS,
    MAX_SCORE_NAME,
    SCORES,
    ModelConfig,
    PrivacyConfig,
    RoundsConfig,
    TrainConfig,
    names_in,
)
from protocol.data_keys import DataConfig
from protocol.files import full_path
from protocol.models import MODELS, OWN_SIZE, Size, is_library, model_spec, size_in
from protocol.options import ConfigError, OptionValue, did_you_mean, parse_options
from protocol.own_code import Own, known, table_of
from protocol.own_keys import own_code_in, own_options
from protocol.server_optimizers import SERVER_OPTIMIZERS
from protocol.source_spec import SITES, parse_source

FlatConfig = dict[str, OptionValue]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RunConfig:
    """A whole config, parsed. `flat` holds every key with its final value.

    own: the own code that values of `flat` name, by spec. Compared by identity, so that it can key
    what is built from it once a process.
    """

    rounds: RoundsConfig
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    privacy: PrivacyConfig
    flat: Mapping[str, OptionValue]
    own: Mapping[str, Own] = field(default_factory=dict)

    @property
    def image_size(self) -> Size:
        """(height, width) to which images are converted; (0, 0): they keep the source's own."""
        size, preferred = size_in(self.data.image_size), model_spec(self.model.model).image_size
        return size if size != OWN_SIZE else (preferred, preferred)

    def refuse_unknown_model(self, what: str, name: str) -> None:
        """ConfigError unless a network is Keel's, the run's own code, or a library's."""
        if not is_library(name):
            refuse_unknown(what, name, [*MODELS, *self.own])

    @property
    def client_models(self) -> list[str]:
        """The networks of `client-models`; [] where all clients train the run's."""
        return names_in(self.model.client_models)

    @property
    def evaluated_clients(self) -> str:
        """Whose local test parts are evaluated on: none, cohort or all."""
        if self.privacy.withholds_metrics:
            return "none"
        choice = self.rounds.evaluate_clients
        if choice != "auto":
            return choice
        is_only_there = self.data.source == SITES  # the server has no test images
        return "all" if self.method_options().is_personal or is_only_there else "none"

    @property
    def scores(self) -> dict[str, Own | None]:
        """The scores of `metrics` by name, with their own code, or None of those of Keel."""
        specs = names_in(self.rounds.metrics)
        return {spec.rpartition(":")[2]: self.own.get(spec) for spec in specs}

    @property
    def evaluates_global(self) -> bool:
        """Whether the server evaluates the global model on its source's test set."""
        return self.rounds.evaluate_global and self.data.source != SITES

    def check_is_for_simulation(self) -> None:
        """ConfigError if the run's data are those of a deployment's sites."""
        if self.data.source == SITES:
            raise ConfigError(
                "source",
                f"source = {SITES!r}: the data of a deployment's sites; a simulation needs a data "
                "set",
            )

    def no_test_part(self, client: str, has_own_data: bool = False) -> ValueError:
        """The error for a client without the local test part on which it is to be evaluated."""
        remedy = "set local-test-fraction, such as 0.2, or give it more samples of a class"
        if has_own_data:
            remedy += ", or put images under test/ in the client's own data"
        return ValueError(
            f"client {client} has no local test part to evaluate its model on (evaluate-clients = "
            f"{self.rounds.evaluate_clients!r}): {remedy}"
        )

    def table(self, name: str, cls: type[T]) -> T:
        """The options dataclass `cls` from the keys `name.*`, of a method or server optimizer."""
        return parse_options(cls, self.flat, prefix=f"{name}.")

    @property
    def method_table(self) -> str:
        """The table of the method's options: its name, and fedpull of `mine.py:FedPull`."""
        return table_of(self.rounds.method) or self.rounds.method

    @property
    def method_class(self) -> type[Any]:
        """The method's class: `client_app.methods` has registered it, or it is own code."""
        name = self.rounds.method
        if name not in self.own:
            return classes[name]
        method = self.own[name].value
        return method if isinstance(method, type) else type(method)  # a spec may name an instance

    def method_options(self) -> Any:
        """The method's options and capability flags."""
        return self.table(self.method_table, self.method_class)

    def server_optimizer_options(self) -> Any:
        """The server optimizer's options, of its type in SERVER_OPTIMIZERS."""
        name = self.rounds.server_optimizer
        return self.table(name, SERVER_OPTIMIZERS[name])

    def to_json(self) -> str:
        """One line that `config_from_json` reads back; what clients are sent.

        Of own code it has the digests.
        """
        return json.dumps({**self.flat, **digests_entry(self.own)}, sort_keys=True)


def digests_entry(own: Mapping[str, Own]) -> dict[str, dict[str, str]]:
    """{"own": the digest of each spec}; {} without own code."""
    return {"own": {spec: own[spec].digest for spec in sorted(own)}} if own else {}


def keel_home() -> Path:
    """$KEEL_HOME, or ~/.keel: where runs, data and caches go unless the config says otherwise."""
    try:
        return full_path(Path(os.environ.get("KEEL_HOME") or Path.home() / ".keel"))
    except RuntimeError as error:  # no HOME, and a user id without an entry in /etc/passwd
        raise ValueError(f"{error} Set KEEL_HOME to a directory that you can write to") from error


def project_file() -> Path:
    """pyproject.toml: of the wheel if Keel is installed from one, else of the checkout."""
    installed = app_folder / "protocol" / "pyproject.toml"
    return installed if installed.exists() else app_folder / "pyproject.toml"


@lru_cache(maxsize=1)
def _project() -> dict[str, Any]:
    try:
        return tomllib.loads(project_file().read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{project_file()}: {error}") from error


def keel_version() -> str:
    """The version in pyproject.toml: of what runs here, installed or unpacked by Flower."""
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
    return flat


def default_config() -> FlatConfig:
    """Every key and its default, flat, as [tool.flwr.app.config] of pyproject.toml says."""
    return dict(_defaults())


@lru_cache(maxsize=1)
def presets() -> dict[str, FlatConfig]:
    """The named paper settings of presets.yaml: name to the keys it sets."""
    text = (app_folder / "protocol" / "presets.yaml").read_text()
    loaded: dict[str, FlatConfig] = yaml.safe_load(text)
    return loaded


max_shown = 60  # names in a line
SMALLEST_EPSILON = 1e-6
# what other programs call a key
OTHER_NAMES = {"learning-rate": "lr", "dataset": "source", "epochs": "local-epochs"}


def refuse_unknown(what: str, name: str, allowed: list[str], method: str = "") -> None:
    """ValueError with the nearest name if `name` is not allowed; `what` is the key holding it.

    An option of `method` comes first, and of a known table only its own options are near. The
    options of an own method, which are not known here, are named by their table.
    """
    if name in allowed:
        return
    table = [key for key in allowed if key.startswith(name.partition(".")[0] + ".")]
    own = f"{method}.{name}"
    near = own if own in allowed else OTHER_NAMES.get(name.replace("_", "-"))
    if near in allowed:
        hint = f"; did you mean {near}?"
    else:
        hint = did_you_mean(name, table or allowed) or "."
    if hint == "." and (own_table := table_of(method)):
        hint = f"; if it is an option of {method}, write {own_table}.{name}."
    key = name if what == "config key" else what
    shown = table if len(allowed) > max_shown and table else allowed
    if len(shown) > max_shown:
        more = " `keel keys` lists all." if hint == "." else ""
        raise ConfigError(key, f"{what} = {name!r} is unknown{hint}{more}")
    raise ConfigError(
        key, f"{what} = {name!r} is unknown{hint} Allowed: {', '.join(sorted(shown))}"
    )


def resolve_config(
    overrides: Mapping[str, OptionValue], own: Mapping[str, Own] | None = None
) -> RunConfig:
    """The run's config from the keys that the user gave.

    own: what specs name, such as the own code that a run began with; other specs are read from
    their files and modules. ValueError, one line, for an unknown key, preset, method or other name,
    for a value that is not allowed, and for values that contradict each other (`validate`). The
    class of an own method is loaded last.
    """
    flat = default_config()
    names, table = list(flat), table_of(str(overrides.get("method", "")))
    for key in overrides:
        if not (table and key.startswith(f"{table}.")):
            refuse_unknown("config key", key, names, str(overrides.get("method", "")))
    preset = overrides.get("preset", flat["preset"])
    if preset:
        refuse_unknown("preset", str(preset), list(presets()))
        flat |= presets()[str(preset)]
    flat |= overrides
    if type(flat["image-size"]) is int:  # as well as "28x36"
        flat["image-size"] = str(flat["image-size"])
    config = _parse(flat, own_code_in(flat, own or {}))
    validate(config)
    if table:
        return with_own_options(config, overrides)
    if config.rounds.method_options:
        raise ConfigError(
            "method-options",
            f"method-options = {config.rounds.method_options!r}: the options of "
            f"{config.rounds.method} are keys of their own: {config.rounds.method}.NAME",
        )
    return config


def with_own_options(config: RunConfig, overrides: Mapping[str, OptionValue]) -> RunConfig:
    """The config with the options of its own method: their defaults, or as they were set."""
    method, table = config.own[config.rounds.method], config.method_table
    options = own_options(method, names_taken())
    text = config.rounds.method_options
    try:
        inline = tomllib.loads(f"options = {{{text}}}")["options"]
    except tomllib.TOMLDecodeError as error:
        reason = "expected options as in TOML, such as mu = 0.3, tau = 1.0"
        raise ConfigError("method-options", f"method-options = {text!r}: {reason}") from error
    given = {f"{table}.{key}": value for key, value in inline.items()}
    given |= {key: value for key, value in overrides.items() if key.startswith(f"{table}.")}
    for key in given:
        refuse_unknown("config key", key, list(options))
    return replace(config, flat={**config.flat, **options, **given, "method-options": ""})


def names_taken() -> set[str]:
    """The names of Keel's methods, server optimizers and config keys, which share the tables."""
    return {key.partition(".")[0] for key in default_config()} | {*method_names()}


@lru_cache(maxsize=64)  # of all runs that train together
def config_from_json(text: str) -> RunConfig:
    """The config that `RunConfig.to_json` wrote; parsed once a process, as every message has it."""
    try:
        flat = json.loads(text)
    except RecursionError:
        flat = None
    if not isinstance(flat, dict):
        raise ValueError("the run's config is not a JSON object of keys and values")
    own = flat.pop("own", {})
    return _parse(flat, {spec: known(spec, digest) for spec, digest in own.items()})


def _parse(flat: FlatConfig, own: Mapping[str, Own]) -> RunConfig:
    rounds, data = parse_options(RoundsConfig, flat), parse_options(DataConfig, flat)
    model, train = parse_options(ModelConfig, flat), parse_options(TrainConfig, flat)
    privacy = parse_options(PrivacyConfig, flat, prefix="privacy.")
    config = RunConfig(rounds, data, model, train, privacy, flat, own)
    for name in ("resume", "output-dir", "data-dir", "weights"):
        if not flat[name]:
            continue
        path = Path(os.path.expanduser(str(flat[name])))  # pathlib's raises for an unknown user
        is_run_name = name == "resume" and len(path.parts) == 1
        if not path.is_absolute() and not is_run_name:
            raise ConfigError(
                name,
                f"{name} = {str(flat[name])!r}: expected an absolute path, because a Flower run "
                f"has a working directory of its own; from here it would be {path.absolute()}",
            )
    return config


def validate(config: RunConfig) -> None:
    """ConfigError, one line, for unknown names and for keys that contradict each other.

    Everything that can be checked without torch, data, clients or the method's class.
    """
    rounds, model, epsilon = config.rounds, config.model, config.privacy.epsilon
    own = list(config.own)
    refuse_unknown("method", rounds.method, [*method_names(), *({rounds.method} & {*own})])
    refuse_unknown("server-optimizer", rounds.server_optimizer, list(SERVER_OPTIMIZERS))
    config.refuse_unknown_model("model", model.model)
    for name in config.client_models:
        config.refuse_unknown_model("client-models", name)
    for name in names_in(rounds.diagnostics):
        refuse_unknown("diagnostics", name, ["all", *DIAGNOSTICS])
    for name in names_in(rounds.metrics):
        if name not in own:
            refuse_unknown("metrics", name, list(SCORES))
        score = name.rpartition(":")[2]
        if len(score) > MAX_SCORE_NAME or (name in own and score in ALWAYS_MEASURED):
            raise ConfigError(
                "metrics",
                f"metrics = {name!r}: expected another name, of up to {MAX_SCORE_NAME} characters: "
                "Keel measures accuracy and loss itself",
            )
    model_spec(model.model).check(
        model.model, model.norm, model.width, model.layer_widths, model.variant
    )
    if config.data.source not in config.own:
        parse_source(config.data.source)
    if config.data.pool_test and rounds.evaluate_global:
        raise ConfigError(
            "evaluate-global",
            "evaluate-global = true: with pool-test = true clients train on the test images; it "
            "has to be false",
        )
    config.server_optimizer_options()
    if 0 < epsilon < SMALLEST_EPSILON:
        raise ConfigError(
            "privacy.epsilon",
            f"privacy.epsilon = {epsilon}: expected 0 (no noise) or at least {SMALLEST_EPSILON:g}; "
            "with less, the noise would hide every update",
        )
    if epsilon >= 1:
        raise ConfigError(
            "privacy.epsilon",
            f"privacy.epsilon = {epsilon}: the Gaussian mechanism's formula needs a number below 1 "
            "for one release; 0 turns noise and clipping off",
        )
