"""What a run trains: config, data, network, method and server half, each built and checked once."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from client_app.config_checks import check_batch_norm
from client_app.method import Method
from client_app.methods import method_of
from client_app.networks import placed
from client_app.samples import Samples
from client_app.scores import score_functions
from client_app.setup import checked_model, dataset_spec_of, device_for, open_source, pixels_of
from data.sources import Source
from models import StagedModel
from protocol.arrays import Arrays
from protocol.code import place_of
from protocol.config import RunConfig
from protocol.messages import DatasetSpec
from protocol.options import ConfigError
from server_app.pool import Pool
from server_app.roster import Clients, clients_of, roster_warnings
from strategies import Average, strategy_for


@dataclass(frozen=True)
class Experiment:
    """What a run trains. initial_weights, first_arrays (what is sent in round 1): on the CPU."""

    config: RunConfig
    source: Source
    data: DatasetSpec
    method: Method
    device: torch.device
    model: StagedModel  # on that device
    initial_weights: Arrays
    first_arrays: Arrays
    strategy: Average
    test_samples: Samples


def build_experiment(config: RunConfig) -> Experiment:
    """The experiment of a config; ValueError, one line, if its parts do not fit together."""
    method = method_of(config)
    source = open_source(config)  # decoded here, before any client opens it
    model = checked_model(config, source)
    check_batch_norm(config, method, has_running_statistics(model))
    score_functions(config)  # raises for own code that is no function
    method.check_model(model)  # raises for layers that this network does not have
    initial_weights = {name: array.clone() for name, array in model.state_dict().items()}
    strategy = strategy_for(config, model)
    first_arrays = strategy.initial_arrays(model)
    unknown = first_arrays.keys() - initial_weights.keys()
    if method.has_global_model and unknown:
        raise ValueError(
            f"{place_of(strategy.initial_arrays)} returned {min(unknown)!r}, which {model.name} "
            "lacks: return arrays of the network, and others from `extra`"
        )
    device = device_for(config.train.device)
    images, labels = np.asarray(source.test.images), np.asarray(source.test.labels)
    return Experiment(
        config=config,
        source=source,
        data=dataset_spec_of(config, source),
        method=method,
        device=device,
        model=placed(model, device),
        initial_weights=initial_weights,
        first_arrays=first_arrays,
        strategy=strategy,
        test_samples=Samples(images, labels, pixels_of(config, source), device),
    )


def has_running_statistics(model: StagedModel) -> bool:
    """Whether the network has BatchNorm."""
    return any(isinstance(m, _NormBase) and m.track_running_stats for m in model.modules())


def admit_clients(experiment: Experiment, pool: Pool) -> tuple[Clients, list[str]]:
    """The clients, of which the server half is told, and a line for each unusual thing about them.

    ValueError, one line, where the method cannot train with them, or too few are sampled.
    """
    config, strategy = experiment.config, experiment.strategy
    clients = clients_of(config, pool.roster)
    begin_alike = not experiment.method.is_stateful and experiment.method.shared_part == "model"
    if config.model.weights and not clients.are_simulated and not begin_alike:
        raise ConfigError(
            "weights",
            f"weights = {config.model.weights!r}: the sites have no such file, and clients of "
            f"{config.rounds.method} begin with initial weights of their own",
        )
    strategy.roster = pool.roster
    strategy.partition_sizes = clients.sizes
    warnings = roster_warnings(config, clients)
    if experiment.model.left_out:
        warnings.append(
            f"weights: {config.model.weights} has a head of another width than the classes: it is "
            "left out, and the head begins at random"
        )
    config.rounds.check_cohort(len(strategy.cohort.sample(1)))
    return clients, warnings
