"""Sizes of data sets and models, without reading images or importing torch.

Parameter counts are in sizes.json, which `python -m tests.tools.sizes` writes from the registries;
a test compares it with them.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from data.readers import PublishedSizes
from data.sources import published_size
from protocol.config import RunConfig, default_config
from protocol.models import MODELS
from protocol.options import ConfigError
from protocol.source_spec import parse_source

SIZES_FILE = Path(__file__).with_name("sizes.json")

Sizes = dict[str, Any]


@lru_cache(maxsize=1)
def stored_sizes() -> Sizes:
    """The content of sizes.json."""
    sizes: Sizes = json.loads(SIZES_FILE.read_text())
    return sizes


def data_size(config: RunConfig) -> PublishedSizes | None:
    """The size of the run's data as the model sees it; None for the user's own files."""
    name, data = config.data.source, config.data
    _, path = parse_source(name)
    if path and not path.exists():
        raise ConfigError("source", f"source = {name!r}: {path} does not exist")
    preferred = MODELS[config.model.model]
    return published_size(
        name, data.image_size or preferred.image_size, data.channels or preferred.channels
    )


def parameter_count(config: RunConfig, data: PublishedSizes, model: str = "") -> int | None:
    """Parameters of the run's model (or `model`) on this data; None if not known before the run.

    The count is linear in the number of classes, so it is stored as its value at 0 and its slope.
    """
    width = f"{config.rounds.method}.projection-width"
    if config.flat.get(width) != default_config().get(width):
        return None
    sizes, method = stored_sizes(), config.rounds.method
    addition = config.flat.get(f"{method}.projection") or sizes["methods"].get(method, "none")
    counts = sizes["models"].get(model or config.model.model, {})
    stored = counts.get(f"{data.image_shape[0]}x{data.image_shape[1]}", {}).get(addition)
    return stored[0] + stored[1] * data.num_classes if stored else None
