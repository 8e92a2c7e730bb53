"""A run's model as ONNX, with its normalisation inside and the rest of its input's preparation."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from protocol.code import is_installed
from protocol.files import write_output
from protocol.text import in_one_line
from server_app.load_model import TrainedModel, load_model


class Classifier(nn.Module):
    """A trained network that takes prepared pixels 0..255 as float32 [N, C, H, W]."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.network = model.network
        mean, std = model.pixels.mean, model.pixels.std
        self.mean = nn.Buffer(255 * torch.tensor(mean).view(1, -1, 1, 1))
        self.std = nn.Buffer(255 * torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and probabilities, [N, num_classes] each."""
        logits: Tensor = self.network((pixels - self.mean) / self.std)
        return logits, torch.softmax(logits, dim=1)


def preparation_of(model: TrainedModel) -> dict[str, object]:
    """All that makes an image file into the exported model's input, in the order of `steps`."""
    how, is_grey = model.preparation, model.preparation.channels == 1
    mode, window = ("L" if is_grey else "RGB"), list(how.window) or None
    steps = [
        "decode the first image of the file and turn it upright by its EXIF orientation, as "
        "Pillow's ImageOps.exif_transpose does",
        "8 bits a channel are required"
        if window is None
        else "16 bits a channel are required: round(255 * (value - window[0]) / (window[1] - "
        "window[0])), clipped to 0..255, as uint8",
        f"convert to {mode}, as Pillow's Image.convert({mode!r}) does; transparency is discarded",
        f"resize to {how.width} x {how.height} without keeping the proportions, as Pillow's "
        "Image.resize((width, height), Image.Resampling.BILINEAR) does on uint8: antialiased",
        "as float32 0..255 in the order [N, C, H, W]",
        "(pixels / 255 - mean) / std is part of this model: do not repeat it",
    ]
    return {
        "steps": steps,
        "exif_orientation": "applied",
        "window": window,
        "channels": mode,
        "height": how.height,
        "width": how.width,
        "resize": "Pillow BILINEAR, antialiased, on uint8",
        "layout": "NCHW",
        "mean": list(model.pixels.mean),
        "std": list(model.pixels.std),
        "normalisation": "inside the model",
        "outputs": {"logits": "[N, classes]", "probabilities": "softmax of the logits"},
    }


def export_model(directory: Path, client: str, path: Path) -> None:
    """Write the run's final global model, or a client's personal one, as ONNX.

    Its metadata has "classes", a JSON list of names, and "preprocessing", a JSON object.
    ValueError, one line, if a package is missing or too old, or the run has no such model.
    """
    missing = [name for name in ("onnx", "onnxscript") if not is_installed(name)]
    if missing:
        raise ValueError(
            f"--to onnx needs {' and '.join(missing)}: pip install {' '.join(missing)} "
            "(Keel's extra export)"
        )
    model = load_model(directory, client)
    example = torch.zeros(2, *model.network.input_shape)  # a batch of 1 would become a constant
    try:
        import onnx

        program = torch.onnx.export(
            Classifier(model).eval(),
            (example,),
            input_names=["pixels"],
            output_names=["logits", "probabilities"],
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
    about = {"classes": model.class_names, "preprocessing": preparation_of(model)}
    onnx.helper.set_model_props(stored, {key: json.dumps(value) for key, value in about.items()})
    write_output(path, stored.SerializeToString())
