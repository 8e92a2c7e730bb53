"""What a comparison of models measures, without a run."""

import math

import torch
from run_fixtures import SMALL

import server_app.diagnostics.comparison
from client_app.setup import build_network, open_source
from protocol.config import resolve_config
from server_app.diagnostics.comparison import Comparison, covered_layers, probe_of, summary


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


def test_models_are_measured_in_evaluation_mode_and_left_as_they_were():
    config = resolve_config(SMALL | {"model": "resnet20", "width": 4})
    source = open_source(config)
    model = build_network(config, source.image_shape, source.num_classes)
    probe, w_g = probe_of(config, source, torch.device("cpu"), 20), model.state_dict()
    w_g = {name: array.clone() for name, array in w_g.items()}
    found = []
    for mode in (True, False):
        model.train(mode)
        comparison = Comparison(("vci",), probe, lambda name: model, model.name, w_g)
        found.append(comparison.numbers())
        assert model.training == mode
    assert found[0] == found[1]


def test_a_stage_of_which_an_array_is_missing_ends_the_layers_that_are_covered():
    model = build_network(resolve_config(SMALL), (1, 28, 28), 10)
    first, second, *_ = model.stage_names
    of_second = [name for name in model.state_dict() if name.startswith(f"stages.{second}.")]
    arrays = {name: a for name, a in model.state_dict().items() if name != of_second[-1]}
    assert len(of_second) > 1
    assert covered_layers(model, arrays) == [first]


def test_values_that_are_not_finite_are_listed_and_not_averaged():
    each = {"a": 1.0, "b": math.inf, "c": None, "d": 3.0}
    found = {"mean": 2.0, "variance": 1.0, "lowest": 1.0, "highest": 3.0}
    assert summary(each) == found | {"clients": each}
