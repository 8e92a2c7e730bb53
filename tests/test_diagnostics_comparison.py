"""What a comparison of models measures, without a run."""

import torch
from run_fixtures import SMALL

import server_app.diagnostics.comparison
from client_app.setup import build_network, open_source
from protocol.config import resolve_config
from server_app.diagnostics.comparison import Comparison, probe_of


def test_drift_is_of_weights_and_not_of_batch_norms_statistics():
    config = resolve_config(SMALL | {"model": "resnet20"})
    model = build_network(config, (1, 28, 28), 10)
    w_g = {name: array.clone() for name, array in model.state_dict().items()}
    moved = {name: w_g[name] + 1 for name, _ in model.named_buffers()}
    comparison = Comparison(("drift",), None, lambda name: model, "resnet20", w_g)
    comparison.add("a", "resnet20", w_g | moved)
    comparison.add("b", "resnet20", w_g | moved | {"classifier.bias": w_g["classifier.bias"] + 2})
    a, b = comparison.numbers()["drift"]["clients"].values()
    assert a == 0
    assert abs(b - 40**0.5) < 1e-6


def test_samples_without_a_deviation_bound_are_left_out_of_its_median(monkeypatch):
    bounds = torch.tensor([torch.nan, 0.5, 2.0, 3.0], dtype=torch.float64)
    monkeypatch.setattr(server_app.diagnostics.comparison, "deviation_bounds", lambda *_: bounds)
    config = resolve_config(SMALL)
    source = open_source(config)
    model = build_network(config, source.image_shape, source.num_classes)
    probe = probe_of(config, source, torch.device("cpu"), 4)
    names = ("deviation-bound", "deviating-share")
    comparison = Comparison(names, probe, lambda name: model, model.name, model.state_dict())
    assert comparison.numbers()["deviation-bound"]["global"] == 2.0
    assert comparison.numbers()["deviating-share"]["global"] == 0.25
