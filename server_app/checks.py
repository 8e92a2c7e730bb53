"""Checks before anything is trained: options, model and method that do not fit together."""

from collections.abc import Mapping

from client_app.look_ahead import FedACGClient
from client_app.method import LocalObjective, Method
from client_app.methods import METHODS, method_of
from models import StagedModel
from protocol.config import RunConfig, all_group_keys, default_config
from protocol.options import OptionValue
from protocol.privacy import check_privacy
from server_app.diagnostics.comparison import chosen_diagnostics
from server_app.observers import check_tensorboard
from server_app.roster import evaluates_clients
from strategies import STRATEGIES
from strategies.server_optimizers import SERVER_OPTIMIZERS


def check_config(config: RunConfig) -> None:
    """ValueError, one line, for options that exclude each other."""
    method, rounds = method_of(config), config.rounds
    check_privacy(config.privacy)
    chosen_diagnostics(rounds.diagnostics)
    if rounds.tensorboard:
        check_tensorboard()
    if config.privacy.epsilon and not method.supports_privacy:
        able = ", ".join(name for name, cls in METHODS.items() if cls.supports_privacy)
        raise ValueError(
            f"privacy.epsilon = {config.privacy.epsilon}: method {rounds.method} sends nothing "
            f"that "
            f"is clipped and noised; methods that do: {able}"
        )
    for key, value, default in (
        ("server-optimizer", rounds.server_optimizer, "fedavg"),
        ("aggregation", rounds.aggregation, "mean"),
    ):
        if value != default and not STRATEGIES[rounds.method].supports_server_optimizer:
            raise ValueError(
                f"{key} = {value!r}: {rounds.method} has a server update of its own; {key} has to "
                f"be "
                f"{default} with it"
            )
    if rounds.server_optimizer == "fedacg":
        beta = config.table("fedacg", FedACGClient).beta
        if beta and not isinstance(method, LocalObjective):
            raise ValueError(
                f"fedacg.beta = {beta}: {rounds.method} trains without FedACG's client term; "
                "fedacg.beta has to be 0 with it"
            )
    if config.model.client_models and not method.supports_mixed_architectures:
        able = ", ".join(n for n, cls in METHODS.items() if cls.supports_mixed_architectures)
        raise ValueError(
            f"client-models = {config.model.client_models!r}: all clients of {rounds.method} train "
            f"one architecture; methods that allow several: {able}"
        )
    if method.is_personal and rounds.evaluate_clients == "none" and not method.has_global_model:
        raise ValueError(
            f"evaluate-clients = 'none': {rounds.method} has no global model, so nothing would be "
            "evaluated; it has to be auto, cohort or all"
        )
    for name, cls in METHODS.items():  # a bad value is a mistake in the table of any method
        config.table(name, cls)
    for optimizer in SERVER_OPTIMIZERS.values():
        optimizer(config)
    tables = {key.partition(".")[0] for key in default_config().keys() - all_group_keys()}
    assert tables <= METHODS.keys() | SERVER_OPTIMIZERS.keys()


def check_model(config: RunConfig, method: Method, model: StagedModel) -> None:
    """ValueError, one line, where the method cannot train this network."""
    if config.privacy.epsilon and method.sends_weights and list(model.buffers()):
        raise ValueError(
            f"privacy.epsilon = {config.privacy.epsilon}: {config.model.model} with BatchNorm "
            f"would "
            "send its statistics without noise; norm has to be 'group'"
        )
    if isinstance(method, LocalObjective):
        method.taps(model)  # raises for layers that this network does not have


def config_warnings(config: RunConfig, overrides: Mapping[str, OptionValue]) -> list[str]:
    """A line for each key that the user set without effect, and for models never evaluated."""
    rounds, method = config.rounds, method_of(config)
    tables = (METHODS.keys() | SERVER_OPTIMIZERS.keys()) - {rounds.method, rounds.server_optimizer}
    lines = [
        f"{key} has no effect: method is {rounds.method}, server-optimizer is "
        f"{rounds.server_optimizer}"
        for key in sorted(overrides)
        if key.partition(".")[0] in tables and "." in key
    ]
    on_clients = evaluates_clients(config, method) != "none"
    if method.is_personal and not on_clients:
        lines.append("evaluate-clients = 'none': the clients' personal models are never evaluated")
    elif not on_clients and not rounds.evaluate_global:
        lines.append("evaluate-global = false: nothing is evaluated in this run")
    return lines
