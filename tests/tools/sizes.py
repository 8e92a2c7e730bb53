"""Writes keel/cli/sizes.json: the parameter counts of all models, from the registries.

python -m tests.tools.sizes
"""

import json
from collections.abc import Sequence

from client_app.methods import method_of
from keel.cli.sizes import SIZES_FILE, Sizes
from models import build_model
from models.registry import PROJECTION_TAILS, PROJECTION_WIDTH
from protocol.catalogue import method_names
from protocol.config import resolve_config
from protocol.models import MODELS
from tests.model_fixtures import undrawn

INPUTS = ((1, 28), (1, 32), (3, 32), (3, 64))  # (channels, pixels) that counts are stored for
HEADS = "projection heads"


def measured_sizes(inputs: Sequence[tuple[int, int]] = INPUTS) -> Sizes:
    """Parameter counts of all registered models, and what each method adds to them, measured."""

    def counted(name: str, channels: int, size: int, addition: str) -> list[int]:
        with undrawn():
            network = build_model(
                name,
                num_classes=2,
                channels=channels,
                image_size=size,
                projection="none" if addition == HEADS else addition,
                projection_heads=PROJECTION_WIDTH if addition == HEADS else 0,
            )
        of_two = sum(parameter.numel() for parameter in network.classifier.parameters())
        total = sum(parameter.numel() for parameter in network.parameters())
        return [total - of_two, of_two // 2]

    additions = ("none", "gaussian", *PROJECTION_TAILS, HEADS)
    models = {
        name: {
            f"{channels}x{size}": {each: counted(name, channels, size, each) for each in additions}
            for channels, size in inputs
        }
        for name in MODELS
    }
    methods = {}  # that add to the model
    for name in method_names():
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
