"""Local models against a global one and each other: the measures asked for, one model at a time.

What is kept of a model is what the measures need: the views of its taps for CKA, and numbers. Its
weights are in memory only while it is `add`ed.
"""

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_app.samples import Samples
from client_app.setup import pixels_of
from client_app.similarity import linear_view
from data.sources import Source
from models import StagedModel
from protocol.config import RunConfig, refuse_unknown
from protocol.messages import Arrays
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

SIMILARITIES = ("cka-global", "cka-clients")  # of every tap
FEATURES: dict[str, Callable[[Tensor, Tensor], float | None]] = {  # of features [N, d], labels [N]
    "effective-rank": lambda phi, y: effective_rank(phi),
    "vci": variability_collapse_index,
    "within-class-trace": within_class_trace,
    "between-class-trace": between_class_trace,
}
DEVIATIONS = ("deviation-bound", "deviating-share")  # of features and class probabilities
DIAGNOSTICS = (*SIMILARITIES, *FEATURES, *DEVIATIONS, "drift", "relative-drift")

probe_samples = 2000  # VCI needs several times as many as there are features
cka_samples = 256  # the first of them: a view takes their square, for each tap and client
most_paired = 20  # so many clients, the first by name, are compared with each other
batch_size = 500


def chosen_diagnostics(text: str) -> tuple[str, ...]:
    """The names in `diagnostics = "..."`, in the order of DIAGNOSTICS; ValueError if unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        refuse_unknown("diagnostics", name, ["all", *DIAGNOSTICS])
    return tuple(name for name in DIAGNOSTICS if name in names or "all" in names)


def probe_of(config: RunConfig, source: Source, device: torch.device, count: int) -> Samples:
    """`count` images of the source's test set (or all), drawn from the run's seed alone."""
    total = len(source.test.labels)
    rng = np.random.default_rng(seed_of(config.rounds.seed, "diagnostics"))
    chosen = rng.permutation(total)[:count]
    return Samples(
        source.test.images[chosen],
        source.test.labels[chosen],
        pixels_of(config, source),
        device,
    )


def covered_taps(model: StagedModel, arrays: Arrays) -> list[str]:
    """The taps that these arrays suffice for: stages from the input on, "features", "logits"."""
    taps: list[str] = []
    state = model.state_dict()
    for stage in model.stage_names:
        if any(k not in arrays for k in state if k.startswith(f"stages.{stage}.")):
            return taps
        taps.append(stage)
    taps.append("features")
    if all(k in arrays for k in state if k.startswith("classifier.")):
        taps.append("logits")
    return taps


class Comparison:
    """Collects the measures `names` over the models added, by client.

    network: gives the instance of an architecture into which weights are loaded, in turn.
    architecture_g, w_g: of the global model, or as much of it as there is.
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
        """A client's model, or as much of it as there is."""
        views, values = self.measured(architecture, arrays)
        if "cka-clients" in self.names and len(self.views) < most_paired:
            self.views[client] = views
        common = views.keys() & self.views_g.keys() if "cka-global" in self.names else ()
        for tap in common:
            alike = cka_of_views(views[tap], self.views_g[tap])
            self.similarities.setdefault(tap, {})[client] = alike
        if architecture == self.architecture_g:
            parameters = {name for name, _ in self.network(architecture).named_parameters()}
            shared = parameters & arrays.keys() & self.w_g.keys()
            if shared:
                w = {name: arrays[name] for name in sorted(shared)}
                drift = weight_drift(w, self.w_g)
                values |= dict(zip(("drift", "relative-drift"), drift, strict=True))
        for name in values.keys() & self.values.keys():
            self.values[name][client] = values[name]

    @torch.no_grad()
    def measured(
        self, architecture: str, arrays: Arrays
    ) -> tuple[dict[str, Tensor], dict[str, float | None]]:
        """(view of each tap, value of each measure) of one model on the probe."""
        wanted = set(self.names)
        model = self.network(architecture)
        taps = covered_taps(model, arrays)
        if not taps or wanted <= {"drift", "relative-drift"}:
            return {}, {}
        model.load_state_dict(model.state_dict() | arrays)
        was_training = model.training
        model.eval()
        views: dict[str, Tensor] = {}
        if wanted.intersection(SIMILARITIES):
            if architecture != self.architecture_g:  # its stages are others, by whatever name
                taps = [tap for tap in taps if tap in ("features", "logits")]
            x, _ = next(self.probe.in_order(cka_samples))
            _, found = model.run(x, taps, to_logits=False)
            views = {tap: linear_view(a) for tap, a in zip(taps, found, strict=True)}
        values: dict[str, float | None] = {}
        if "features" in taps and wanted - set(SIMILARITIES):
            read = taps[taps.index("features") :]
            batches = [
                [t.cpu() for t in model.run(x, read, to_logits=False)[1]]
                for x, _ in self.probe.in_order(batch_size)
            ]
            phi, *logits = (torch.cat(parts) for parts in zip(*batches, strict=True))
            y = self.probe.labels.cpu()
            for name in wanted & FEATURES.keys():
                values[name] = FEATURES[name](phi, y)
            if logits and wanted.intersection(DEVIATIONS):
                bounds = deviation_bounds(phi, logits[0].double().softmax(1), y)
                values["deviation-bound"] = bounds.nanmedian().item()
                values["deviating-share"] = (bounds < 1).double().mean().item()
        model.train(was_training)
        return views, values

    def numbers(self) -> Numbers:
        """What was measured, for JSON: each measure's summary, of CKA one a tap, input to output.

        A measure that these models do not allow (CKA to a global model that there is none of) is
        left out.
        """
        numbers: Numbers = {}
        layer_names = self.network(self.architecture_g).layer_names
        if "cka-global" in self.names:
            numbers["cka-global"] = {
                tap: summary(self.similarities[tap])
                for tap in layer_names
                if tap in self.similarities
            }
        if "cka-clients" in self.names:
            numbers["cka-clients"] = {}
            for tap in layer_names:
                having = {c: views[tap] for c, views in self.views.items() if tap in views}
                pairs = [cka_of_views(a, b) for a, b in combinations(having.values(), 2)]
                if pairs:
                    mean, variance = mean_and_variance(pairs)
                    about = {"mean": mean, "variance": variance, "pairs": len(pairs)}
                    numbers["cka-clients"][tap] = about
        for name in self.names:
            if name not in SIMILARITIES:
                numbers[name] = summary(self.values[name])
                if name in self.global_values:
                    numbers[name]["global"] = self.global_values[name]
        return {name: about for name, about in numbers.items() if about}


def summary(each: Mapping[str, float | None]) -> Numbers:
    """Mean and variance over the clients that have a finite value, and every client's value."""
    finite = [value for value in each.values() if value is not None and math.isfinite(value)]
    if not each:
        return {}
    mean, variance = mean_and_variance(finite) if finite else (None, None)
    return {"mean": mean, "variance": variance, "clients": dict(sorted(each.items()))}
