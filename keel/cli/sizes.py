"""Sizes of data sets and models, without reading images or importing torch.

Parameter counts are in sizes.json, which `python -m keel.cli.sizes` writes from the registries; a
test compares it with them.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from data.sources import SourceInfo, source_info
from protocol.config import RunConfig, default_config, keel_home
from protocol.models import MODELS

SIZES_FILE = Path(__file__).with_name("sizes.json")
INPUTS = ((1, 28), (1, 32), (3, 32), (3, 64))  # (channels, pixels) that counts are stored for
HEADS = "projection heads"

Sizes = dict[str, Any]


@lru_cache(maxsize=1)
def stored_sizes() -> Sizes:
    """The content of sizes.json."""
    sizes: Sizes = json.loads(SIZES_FILE.read_text())
    return sizes


def data_size(config: RunConfig) -> SourceInfo | None:
    """The size of the run's data as the model sees it; None if it would take reading the images."""
    name, data = config.data.source, config.data
    kind, colon, path = name.partition(":")
    if colon and not Path(path).expanduser().exists():
        raise ValueError(f"source = {name!r}: {path} does not exist")
    if colon and not is_cached(f"{kind}:{Path(path).expanduser()}"):
        return None
    preferred = MODELS[config.model.model].input
    return source_info(
        name,
        Path(data.data_dir).expanduser() if data.data_dir else keel_home() / "data",
        keel_home() / "cache",
        data.image_size or preferred.image_size,
        data.channels or preferred.channels,
    )


def is_cached(source: str) -> bool:
    """Whether this source was read before."""
    for about in (keel_home() / "cache").glob("*/about.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # being removed, or another Keel's
            if json.loads(about.read_text())["key"]["source"] == source:
                return True
    return False


def parameter_count(config: RunConfig, data: SourceInfo, model: str = "") -> int | None:
    """Parameters of the run's model (or `model`) on this data; None if not known before the run.

    The count is linear in the number of classes, so it is stored as its value at 0 and its slope.
    """
    width = f"{config.rounds.method}.projection-width"
    if data.image_shape is None or config.flat.get(width) != default_config().get(width):
        return None
    sizes, method = stored_sizes(), config.rounds.method
    addition = config.flat.get(f"{method}.projection") or sizes["methods"].get(method, "none")
    counts = sizes["models"].get(model or config.model.model, {})
    stored = counts.get(f"{data.image_shape[0]}x{data.image_shape[1]}", {}).get(addition)
    return stored[0] + stored[1] * data.num_classes if stored else None


def measured_sizes(inputs: Sequence[tuple[int, int]] = INPUTS) -> Sizes:
    """Parameter counts of all registered models, and what each method adds to them, measured."""
    import torch

    from client_app.methods import METHODS, method_of
    from models import build_model
    from models.registry import PROJECTION_TAILS, PROJECTION_WIDTH
    from protocol.config import resolve_config

    def count(name: str, channels: int, size: int, classes: int, addition: str) -> int:
        with torch.device("meta"):  # shapes without memory or initialisation
            network = build_model(
                name,
                num_classes=classes,
                channels=channels,
                image_size=size,
                projection="none" if addition == HEADS else addition,
                projection_heads=PROJECTION_WIDTH if addition == HEADS else 0,
            )
        return sum(parameter.numel() for parameter in network.parameters())

    additions = ("none", "gaussian", *PROJECTION_TAILS, HEADS)
    models: Sizes = {}
    for name in MODELS:
        models[name] = {}
        for channels, size in inputs:
            counts = {}
            for addition in additions:
                two, three = (count(name, channels, size, k, addition) for k in (2, 3))
                counts[addition] = [two - 2 * (three - two), three - two]
            models[name][f"{channels}x{size}"] = counts
    methods = {}  # that add to the model
    for name in METHODS:
        parts = method_of(resolve_config({"method": name})).model_parts()
        if parts.projection_heads or parts.projection != "none":
            methods[name] = HEADS if parts.projection_heads else parts.projection
    return {"methods": methods, "models": models}


def as_json(sizes: Sizes) -> str:
    """The text of sizes.json: one line for each method and model."""
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
