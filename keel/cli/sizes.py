"""Sizes of data sets and models, without reading images or importing torch.

A data set's size comes from the header of its decoded cache, or from sizes.json, as parameter counts
do. `python -m keel.cli.sizes` writes sizes.json from the registries; a test compares it with them.
"""

import ast
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from protocol.config import RunConfig, keel_home

SIZES_FILE = Path(__file__).with_name("sizes.json")
INPUTS = ((1, 28), (1, 32), (3, 32), (3, 64))  # (channels, pixels) that counts are stored for
HEADS = "projection heads"
SHIPPED = ("digits",)  # data sets that need no download

Sizes = dict[str, Any]


@dataclass(frozen=True)
class DataSize:
    """A data set as the model sees it: images [C, H, W]."""

    num_train: int
    num_test: int
    num_classes: int
    shape: tuple[int, int, int]


@lru_cache(maxsize=1)
def stored_sizes() -> Sizes:
    """The content of sizes.json."""
    sizes: Sizes = json.loads(SIZES_FILE.read_text())
    return sizes


def data_size(config: RunConfig) -> DataSize | None:
    """The size of the run's data; None if it was never read on this machine."""
    image_size, channels = input_of(config)
    name = config.data.source
    if name.startswith(("folder:", "npz:")):
        kind, _, path = name.partition(":")
        name = f"{kind}:{Path(path).expanduser()}"
    entries = sorted((keel_home() / "cache").glob("*/about.json"), key=lambda p: p.stat().st_mtime)
    for about_file in reversed(entries):
        try:
            about = json.loads(about_file.read_text())
            key = about["key"]
            if (key["source"], key["image_size"], key["channels"]) != (name, image_size, channels):
                continue
            num_train, *shape = npy_shape(about_file.with_name("train-images.npy"))
            num_test = npy_shape(about_file.with_name("test-images.npy"))[0]
        except (OSError, ValueError, KeyError):  # an entry of another Keel, or being removed
            continue
        classes = len(about["class_names"])
        return DataSize(num_train, num_test, classes, (shape[0], shape[1], shape[2]))
    stored = stored_sizes()["data"].get(name)
    if not stored:
        return None
    own = stored["shape"]
    size = image_size or own[1]
    return DataSize(
        *(stored["train"], stored["test"], stored["classes"]), (channels or own[0], size, size)
    )


def input_of(config: RunConfig) -> tuple[int, int]:
    """(image size, channels) that the run asks its source for; 0 is the source's own."""
    model = stored_sizes()["models"].get(config.model.model, {"input": [0, 0]})
    image_size, channels = model["input"]
    return config.data.image_size or image_size, config.data.channels or channels


def npy_shape(path: Path) -> tuple[int, ...]:
    """The shape in the header of a .npy file."""
    with path.open("rb") as file:
        start = file.read(10)
        header = file.read(int.from_bytes(start[8:10], "little"))
    shape: tuple[int, ...] = ast.literal_eval(header.decode("latin1").strip())["shape"]
    return shape


def parameter_count(config: RunConfig, data: DataSize, model: str = "") -> int | None:
    """Parameters of the run's model (or `model`) on this data; None if sizes.json has no such input.

    The count is linear in the number of classes, so it is stored as its value at 0 and its slope.
    """
    sizes, method = stored_sizes(), config.rounds.method
    addition = config.flat.get(f"{method}.projection") or sizes["methods"].get(method, "none")
    counts = sizes["models"].get(model or config.model.model, {}).get("parameters", {})
    stored = counts.get(f"{data.shape[0]}x{data.shape[1]}", {}).get(addition)
    return stored[0] + stored[1] * data.num_classes if stored else None


def measured_sizes() -> Sizes:
    """The sizes of all registered models and methods and of the shipped data sets, measured."""
    import torch

    from client_app.methods import METHODS, method_of
    from client_app.setup import open_source
    from models import build_model
    from models.registry import MODELS, PROJECTION_TAILS, input_spec
    from protocol.config import resolve_config

    def count(name: str, channels: int, size: int, classes: int, addition: str) -> int:
        with torch.device("meta"):  # shapes without memory or initialisation
            network = build_model(
                name,
                num_classes=classes,
                channels=channels,
                image_size=size,
                projection="none" if addition == HEADS else addition,
                projection_heads=addition == HEADS,
            )
        return sum(parameter.numel() for parameter in network.parameters())

    additions = ("none", "gaussian", *PROJECTION_TAILS, HEADS)
    models: Sizes = {}
    for name in MODELS:
        spec = input_spec(name)
        models[name] = {"input": [spec.image_size, spec.channels], "parameters": {}}
        for channels, size in INPUTS:
            counts = {}
            for addition in additions:
                two, three = (count(name, channels, size, k, addition) for k in (2, 3))
                counts[addition] = [two - 2 * (three - two), three - two]
            models[name]["parameters"][f"{channels}x{size}"] = counts
    methods = {}  # that add to the model
    for name in METHODS:
        parts = method_of(resolve_config({"method": name})).model_parts()
        if parts.projection_heads or parts.projection != "none":
            methods[name] = HEADS if parts.projection_heads else parts.projection
    data = {}
    for name in SHIPPED:
        source = open_source(resolve_config({"source": name, "model": "cnn-fedcka"}))
        data[name] = {
            "train": len(source.train.labels),
            "test": len(source.test.labels),
            "classes": source.num_classes,
            "shape": list(source.image_shape),
        }
    return {"data": data, "methods": methods, "models": models}


def as_json(sizes: Sizes) -> str:
    """The text of sizes.json: one line for each data set, method and model."""
    parts = [
        f'"{part}": {{\n'
        + ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in sizes[part].items())
        + "\n}"
        for part in sizes
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    SIZES_FILE.write_text(as_json(measured_sizes()))
    print(SIZES_FILE)
