"""A run's model as ONNX or TorchScript, with its normalisation inside."""

import json
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from server_app.trained import TrainedModel, load_model


class Classifier(nn.Module):
    """A trained network that takes pixels 0..255 as float32 [N, C, H, W]; returns logits."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.network = model.network
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (model.pixels.mean, model.pixels.std))
        self.register_buffer("mean", 255 * mean)
        self.register_buffer("std", 255 * std)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits [N, num_classes]."""
        logits: Tensor = self.network((pixels - self.mean) / self.std)
        return logits


def export_model(directory: Path, client: str, to: str, path: Path) -> None:
    """Write the run's final global model, or a client's personal one; `to` is onnx or torchscript.

    The names of the classes are stored with it: as metadata "classes" or as extra file classes.json.
    ValueError, one line, if a package is missing or the run holds no such model.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if to == "onnx" and missing:
        raise ValueError(
            f"--to onnx: not installed: {', '.join(missing)}; `pip install 'keel[export]'` brings them"
        )
    model = load_model(directory, client)
    classifier = Classifier(model).eval()
    example = torch.zeros(2, *model.network.input_shape)  # a batch of 1 would be taken for fixed
    classes = json.dumps(model.class_names)
    if to == "torchscript":
        traced = torch.jit.trace(classifier, example)
        torch.jit.save(traced, str(path), _extra_files={"classes.json": classes})
        return
    import onnx

    torch.onnx.export(
        classifier,
        (example,),
        str(path),
        input_names=["pixels"],
        output_names=["logits"],
        dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
        external_data=False,
        verbose=False,
    )
    stored = onnx.load(str(path))
    onnx.helper.set_model_props(stored, {"classes": classes})
    onnx.save(stored, str(path))
