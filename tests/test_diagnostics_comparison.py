"""What a comparison of models measures, without a run."""

import torch
from run_fixtures import SMALL

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
