"""What a run asks of its method, against the method's options and capability flags."""

from typing import Any

from client_app.method import Method
from protocol.catalogue import classes
from protocol.config import RunConfig, default_config
from protocol.models import model_spec
from protocol.options import ConfigError, keys_of
from protocol.server_optimizers import SERVER_OPTIMIZERS


def able(flag: str) -> str:
    """The methods that have this capability, separated by commas."""
    return ", ".join(name for name, each in sorted(classes.items()) if getattr(each, flag))


def check_tables(config: RunConfig) -> None:
    """ConfigError for a value, of any method or server optimizer, that its option does not accept.

    Tables that neither the run uses nor the user changed are left out.
    """
    defaults = default_config()
    changed = {
        key.partition(".")[0] for key, value in config.flat.items() if value != defaults.get(key)
    }
    tables: dict[str, type[Any]] = {**classes, **SERVER_OPTIMIZERS}
    tables[config.method_table] = config.method_class
    for name in sorted(changed | {config.method_table, config.rounds.server_optimizer}):
        if name in tables:
            check_table(config, name, tables[name])


def check_table(config: RunConfig, name: str, options: type[Any]) -> None:
    """ConfigError unless the keys `name.*` are the options of a method or server optimizer."""
    config.table(name, options)
    prefix = f"{name}."
    allowed = [prefix + key for key in keys_of(options)]
    for key, value in config.flat.items():
        if key.startswith(prefix) and key not in allowed:
            raise ConfigError(
                key,
                f"{key} = {value!r}: {name} has no such option, so it would have no effect; remove "
                f"it from [tool.flwr.app.config.{name}] in pyproject.toml, or declare it in the "
                f"class; options: {', '.join(allowed) or 'none'}",
            )


def check_method_config(config: RunConfig, method: Method) -> None:
    """ConfigError, one line, if the run asks of the method what it cannot do."""
    check_privacy(config, method)
    check_server_update(config, method)
    if config.train.optimizer != "sgd" and not method.supports_adam:
        raise ConfigError(
            "optimizer",
            f"optimizer = {config.train.optimizer!r}: {config.rounds.method} is defined for steps "
            "of SGD; it has to be sgd with it",
        )
    rounds, model, name = config.rounds, config.model, config.rounds.method
    check_batch_norm(config, method, has_batch_norm(config))
    if config.client_models and not method.supports_mixed_architectures:
        raise ConfigError(
            "client-models",
            f"client-models = {model.client_models!r}: with {name} all clients train one network; "
            f"leave the key out, or set method to one of {able('supports_mixed_architectures')}",
        )
    if rounds.evaluate_clients == "none" and method.is_personal and not method.has_global_model:
        raise ConfigError(
            "evaluate-clients",
            f"evaluate-clients = 'none': {name} has no global model, so nothing would be "
            "evaluated; it has to be auto, cohort or all",
        )


def check_batch_norm(config: RunConfig, method: Method, has_batch_norm: bool) -> None:
    """ConfigError if the network has BatchNorm, which the method or privacy does not allow."""
    model, epsilon = config.model.model, config.privacy.epsilon
    remedy = model_spec(model).without_batch_norm(model)
    if has_batch_norm and not method.supports_batch_norm:
        raise ConfigError(
            "model",
            f"model = {model!r} with BatchNorm: under {config.rounds.method} nobody updates the "
            f"shared model's running statistics, which would stay 0 and 1; {remedy}",
        )
    if has_batch_norm and epsilon:
        raise ConfigError(
            "privacy.epsilon",
            f"privacy.epsilon = {epsilon}: {model} with BatchNorm would send its statistics "
            f"without noise; {remedy}",
        )


def has_batch_norm(config: RunConfig) -> bool:
    """Whether one of Keel's networks has BatchNorm; what else a run names has yet to be built."""
    return model_spec(config.model.model).norm_layer(config.model.norm) == "batch"


def check_privacy(config: RunConfig, method: Method) -> None:
    """ConfigError if `privacy.epsilon` is set and something would leave a client without noise."""
    epsilon = config.privacy.epsilon
    if epsilon and not method.supports_privacy:
        raise ConfigError(
            "privacy.epsilon",
            f"privacy.epsilon = {epsilon}: method {config.rounds.method} sends nothing that is "
            f"clipped and noised; expected 0, or one of the methods {able('supports_privacy')}",
        )


def check_server_update(config: RunConfig, method: Method) -> None:
    """ConfigError if the method's own server update takes no such optimizer, mean or weights."""
    rounds, name = config.rounds, config.rounds.method
    if not method.supports_server_optimizer:
        for key, value, plain in (
            ("server-optimizer", rounds.server_optimizer, "fedavg"),
            ("aggregation", rounds.aggregation, "mean"),
        ):
            if value != plain:
                raise ConfigError(
                    key,
                    f"{key} = {value!r}: {name} has a server update of its own; {key} has to be "
                    f"{plain} with it",
                )
    if not method.supports_weighting and rounds.weighting not in ("auto", method.default_weighting):
        raise ConfigError(
            "weighting",
            f"weighting = {rounds.weighting!r}: the server update of {name} is defined for "
            f"{method.default_weighting} weights; weighting has to be auto or "
            f"{method.default_weighting}",
        )
    server = config.server_optimizer_options()
    term = server.client_term
    weight = getattr(server, term) if term else 0
    if weight and not method.is_local_objective:
        key = f"{rounds.server_optimizer}.{term}"
        raise ConfigError(
            key,
            f"{key} = {weight}: {name} trains without the clients' term of "
            f"{rounds.server_optimizer}; it has to be 0 with it",
        )
