"""`keel export` to ONNX."""

import json

import numpy as np
import pytest
import torch

from keel.cli.main import main
from server_app.trained import load_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of two rounds."""
    from server_app.inline import run_inline

    keys = {"source": "digits", "model": "cnn-fedreco", "num-rounds": 2, "batch-size": 64}
    return run_inline(keys | {"output-dir": str(tmp_path_factory.mktemp("trained"))}, 3)


def expected_logits(directory, pixels):
    model = load_model(directory)
    with torch.no_grad():
        return model.network(model.pixels.normalise(pixels)).numpy()


@pytest.mark.filterwarnings("ignore")
def test_onnx_gives_the_models_logits(trained, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    path = tmp_path / "model.onnx"
    assert main(["export", str(trained), "--to", "onnx", "-o", str(path)]) == 0
    pixels = torch.randint(0, 256, (5, 1, 32, 32), generator=torch.manual_seed(0)).float()
    [found] = ReferenceEvaluator(str(path)).run(None, {"pixels": pixels.numpy()})
    np.testing.assert_allclose(found, expected_logits(trained, pixels), atol=1e-4)
    [metadata] = [p for p in onnx.load(str(path)).metadata_props if p.key == "classes"]
    assert tuple(json.loads(metadata.value)) == load_model(trained).class_names
