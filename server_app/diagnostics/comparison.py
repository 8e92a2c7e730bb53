"""Compares local models with a global one and with each other, one model at a time.

Of each model only what the measures need stays in memory: views of its representations for CKA, and
numbers. Its weights are needed only during `add`.
"""

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_app.networks import products
from client_app.samples import Samples
from client_app.setup import pixels_of
from client_app.similarity import linear_view
from data.sources import Source
from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig, refuse_unknown
from protocol.config_keys import DIAGNOSTICS, names_in
from protocol.options import ConfigError
from protocol.seeds import seed_of
from server_app.diagnostics.measures import (
    between_class_trace,
    cka_of_views,
    deviation_bounds,
    effective_rank,
    mean_and_variance,
    variability_collapse_index,
    weight_drift,
    within_class_trace,
)

Numbers = dict[str, Any]

SIMILARITIES = ("cka-global", "cka-clients")  # of every layer
FEATURES: dict[str, Callable[[Tensor, Tensor], float | None]] = {  # of features [N, d], labels [N]
    "effective-rank": lambda phi, y: effective_rank(phi),
    "vci": variability_collapse_index,
    "within-class-trace": within_class_trace,
    "between-class-trace": between_class_trace,
}
DEVIATIONS = ("deviation-bound", "deviating-share")  # of features and class probabilities

NUM_PROBE_SAMPLES = 2000  # VCI needs several times as many as there are features
NUM_CKA_SAMPLES = 256  # a view takes its square in memory, for each layer and client
MAX_PAIRED = 20  # clients, the first by name, that are compared with each other
BATCH_SIZE = 500


def chosen_diagnostics(text: str) -> tuple[str, ...]:
    """The names in `diagnostics = "..."`, in the order of DIAGNOSTICS; ValueError if unknown."""
    names = names_in(text)
    for name in names:
        refuse_unknown("diagnostics", name, ["all", *DIAGNOSTICS])
    return tuple(name for name in DIAGNOSTICS if name in names or "all" in names)


def probe_of(config: RunConfig, source: Source, device: torch.device, count: int) -> Samples:
    """`count` images of the source's test set (or all), drawn from the run's seed alone."""
    if not len(source.test.labels):
        raise ConfigError(
            "diagnostics",
            f"diagnostics = {config.rounds.diagnostics!r}: source = {source.name!r} has no test "
            "images to measure with: it has to be empty",
        )
    rng = np.random.default_rng(seed_of(config.rounds.seed, "diagnostics"))
    chosen = rng.permutation(len(source.test.labels))[:count]
    return Samples(
        source.test.images[chosen], source.test.labels[chosen], pixels_of(config, source), device
    )


def covered_layers(model: StagedModel, arrays: Arrays) -> list[str]:
    """The layers that these arrays suffice for: stages from the input on, "features", "logits"."""
    layers: list[str] = []
    state = model.state_dict()
    for stage in model.stage_names:
        if any(k not in arrays for k in state if k.startswith(f"stages.{stage}.")):
            return layers
        layers.append(stage)
    layers.append("features")
    if all(k in arrays for k in state if k.startswith("classifier.")):
        layers.append("logits")
    return layers


class Comparison:
    """Collects the measures `names` of the models added, by client.

    network: returns the instance of an architecture into which weights are loaded in turn.
    architecture_g, w_g: the global model's; w_g may be only a part of it.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        probe: Samples,
        network: Callable[[str], StagedModel],
        architecture_g: str,
        w_g: Arrays,
    ) -> None:
        self.names, self.probe, self.network = names, probe, network
        self.architecture_g, self.w_g = architecture_g, w_g
        self.views: dict[str, dict[str, Tensor]] = {}
        self.values: dict[str, dict[str, float | None]] = {name: {} for name in names}
        self.similarities: dict[str, dict[str, float]] = {}
        self.views_g, self.global_values = self.measured(architecture_g, w_g)

    def add(self, client: str, architecture: str, arrays: Arrays) -> None:
        """Measure a client's model; `arrays` may be only a part of it."""
        views, values = self.measured(architecture, arrays)
        if "cka-clients" in self.names and len(self.views) < MAX_PAIRED:
            self.views[client] = views
        common = views.keys() & self.views_g.keys() if "cka-global" in self.names else ()
        for layer in common:
            similarity = cka_of_views(views[layer], self.views_g[layer])
            self.similarities.setdefault(layer, {})[client] = similarity
        if architecture == self.architecture_g:
            parameters = {name for name, _ in self.network(architecture).named_parameters()}
            shared = parameters & arrays.keys() & self.w_g.keys()
            if shared:
                drift = weight_drift({name: arrays[name] for name in sorted(shared)}, self.w_g)
                values |= dict(zip(("drift", "relative-drift"), drift, strict=True))
        for name in values.keys() & self.values.keys():
            self.values[name][client] = values[name]

    @torch.no_grad()
    @products("fp32")
    def measured(
        self, architecture: str, arrays: Arrays
    ) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        """(view of each layer, value of each measure) of one model on the probe."""
        names = set(self.names)
        model = self.network(architecture)
        layers = covered_layers(model, arrays)
        if not layers or names <= {"drift", "relative-drift"}:
            return {}, {}
        model.load_state_dict(model.state_dict() | arrays)
        was_training = model.training
        model.eval()
        views: dict[str, Tensor] = {}
        if names.intersection(SIMILARITIES):
            if architecture != self.architecture_g:  # stages of one name differ
                layers = [layer for layer in layers if layer in ("features", "logits")]
            x, _ = next(self.probe.in_order(NUM_CKA_SAMPLES))
            _, reps = model.run(x, layers, to_logits=False)
            views = {layer: linear_view(a) for layer, a in zip(layers, reps, strict=True)}
        values: dict[str, float | None] = {}
        if "features" in layers and names - set(SIMILARITIES):
            read = layers[layers.index("features") :]
            batches = [
                [t.cpu() for t in model.run(x, read, to_logits=False)[1]]
                for x, _ in self.probe.in_order(BATCH_SIZE)
            ]
            phi, *logits = (torch.cat(parts) for parts in zip(*batches, strict=True))
            y = self.probe.labels.cpu()
            for name in names & FEATURES.keys():
                values[name] = FEATURES[name](phi, y)
            if logits and names.intersection(DEVIATIONS):
                bounds = deviation_bounds(phi, logits[0].double().softmax(1), y)
                values["deviation-bound"] = bounds.nanmedian().item()
                values["deviating-share"] = (bounds < 1).double().mean().item()
        model.train(was_training)
        return views, values

    def numbers(self) -> Numbers:
        """Each measure's summary, for JSON; of CKA one per layer, from input to output.

        A measure that these models do not allow (CKA with a global model, without one) is missing.
        """
        numbers: Numbers = {}
        layer_names = self.network(self.architecture_g).layer_names
        if "cka-global" in self.names:
            numbers["cka-global"] = {
                layer: summary(self.similarities[layer])
                for layer in layer_names
                if layer in self.similarities
            }
        if "cka-clients" in self.names:
            numbers["cka-clients"] = {}
            for layer in layer_names:
                views = [each[layer] for each in self.views.values() if layer in each]
                pairs = [cka_of_views(a, b) for a, b in combinations(views, 2)]
                if pairs:
                    mean, variance = mean_and_variance(pairs)
                    numbers["cka-clients"][layer] = {
                        "mean": mean,
                        "variance": variance,
                        "pairs": len(pairs),
                    }
        for name in self.names:
            if name not in SIMILARITIES:
                numbers[name] = summary(self.values[name])
                if name in self.global_values:
                    numbers[name]["global"] = self.global_values[name]
        return {name: values for name, values in numbers.items() if values}


def summary(each: Mapping[str, float | None]) -> Numbers:
    """Mean, variance, lowest and highest of the finite values, and every client's value."""
    if not each:
        return {}
    finite = [value for value in each.values() if value is not None and math.isfinite(value)]
    mean, variance = mean_and_variance(finite) if finite else (None, None)
    return {
        "mean": mean,
        "variance": variance,
        "lowest": min(finite, default=None),
        "highest": max(finite, default=None),
        "clients": dict(sorted(each.items())),
    }
