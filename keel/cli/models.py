"""`keel models`: the networks, and one with its layers."""

from typing import Any

from keel.cli.arguments import JsonOption, NameArgument
from keel.tables import Row, show, show_one, terminal_console
from protocol.config import refuse_unknown
from protocol.models import MODELS, is_library, model_spec
from protocol.own_code import find, is_spec

NUM_CLASSES = 10
DEFAULT_INPUT = (3, 32)  # (channels, pixels) of a model whose paper names none
ABOUT_WIDTH = "Width: entries of one image's representation if the model is split after this layer."


def models(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the models, or show one, also FILE.py:NAME or torchvision:NAME, with its layers."""
    if name is None:
        rows = [model_row(each, layers_of(each)) for each in MODELS]
        show(rows, as_json, "Models", f"Parameters with {NUM_CLASSES} classes.")
        return
    if not is_spec(name):
        refuse_unknown("model", name, list(MODELS))
    layers = layers_of(name)
    show_one(model_row(name, layers), {"layers": layers}, as_json)
    if not as_json:
        terminal_console().print(ABOUT_WIDTH)


def model_row(name: str, layers: list[Row]) -> Row:
    """Norms, input and parameters of a model."""
    spec = model_spec(name)
    size = spec.image_size
    return {
        "name": name,
        "norms": ", ".join(norm or "none" for norm in spec.norms) or "none",
        "input": f"{spec.channels} x {size} x {size}" if size else "as the data",
        "parameters": sum(row["parameters"] for row in layers),
    }


def default_input(name: str) -> tuple[int, int]:
    """(channels, pixels) of the images of a model's paper, else of CIFAR's."""
    spec = model_spec(name)
    return spec.channels or DEFAULT_INPUT[0], spec.image_size or DEFAULT_INPUT[1]


def own_network(name: str) -> Any:
    """What a spec of own code names; None for a network of Keel's or of a library."""
    return find(name, "model").value if is_spec(name) and not is_library(name) else None


def layers_of(name: str) -> list[Row]:
    """Every stage's output for one image, parameters, and width where the model is split there.

    The last stage is called "features": split there, the representation is the classifier's input,
    whichever stage that is.
    """
    import torch

    from models import build_model

    channels, pixels = default_input(name)
    # on device "meta" torch's compiler would be imported, which takes 2 s
    model = build_model(
        name,
        num_classes=NUM_CLASSES,
        channels=channels,
        image_size=pixels,
        own=own_network(name),
    ).eval()
    with torch.no_grad():
        _, outputs = model.run(torch.zeros(1, channels, pixels, pixels), model.stage_names)
    rows = [
        {
            "layer": stage,
            "shape": list(output.shape[1:]),
            "parameters": sum(p.numel() for p in model.stages[stage].parameters()),
            "width": output.numel(),
        }
        for stage, output in zip(model.stage_names, outputs, strict=True)
    ]
    rows[-1] |= {"layer": "features", "width": model.feature_width}
    head = sum(p.numel() for p in model.classifier.parameters())
    classifier = {"layer": "classifier", "shape": [model.num_classes], "parameters": head}
    return [*rows, classifier | {"width": None}]
