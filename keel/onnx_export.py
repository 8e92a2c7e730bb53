"""A run's model as ONNX, with its normalisation inside."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from protocol.code import is_installed
from protocol.files import write_output
from protocol.text import in_one_line
from server_app.load_model import TrainedModel, load_model


class Classifier(nn.Module):
    """A trained network that takes pixels 0..255 as float32 [N, C, H, W]; returns logits."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.network = model.network
        mean, std = model.pixels.mean, model.pixels.std
        self.mean = nn.Buffer(255 * torch.tensor(mean).view(1, -1, 1, 1))
        self.std = nn.Buffer(255 * torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits [N, num_classes]."""
        logits: Tensor = self.network((pixels - self.mean) / self.std)
        return logits


def export_model(directory: Path, client: str, path: Path) -> None:
    """Write the run's final global model, or a client's personal one, as ONNX.

    The class names are stored with it, as metadata "classes".
    ValueError, one line, if a package is missing or too old, or the run has no such model.
    """
    missing = [name for name in ("onnx", "onnxscript") if not is_installed(name)]
    if missing:
        raise ValueError(
            f"--to onnx needs {' and '.join(missing)}: pip install {' '.join(missing)} "
            "(Keel's extra export)"
        )
    model = load_model(directory, client)
    classifier = Classifier(model).eval()
    example = torch.zeros(2, *model.network.input_shape)  # a batch of 1 would become a constant
    classes = json.dumps(model.class_names)
    try:
        import onnx

        program = torch.onnx.export(
            classifier,
            (example,),
            input_names=["pixels"],
            output_names=["logits"],
            dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
            verbose=False,
            dynamo=True,
        )
    except ImportError as error:  # onnxscript has a module for each version of torch
        raise ValueError(
            f"--to onnx: {in_one_line(error)}: the packages may be older than torch "
            f"{torch.__version__}: pip install --upgrade onnx onnxscript"
        ) from error
    assert program is not None
    stored = program.model_proto
    for node in stored.graph.node:
        del node.metadata_props[:]  # its stack trace, with paths of this machine
    onnx.helper.set_model_props(stored, {"classes": classes})
    write_output(path, stored.SerializeToString())
