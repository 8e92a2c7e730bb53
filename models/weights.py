"""Saved weights, from which a run starts: a safetensors file, or a state_dict that torch saved."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.staged import StagedModel
from protocol.options import ConfigError
from protocol.text import in_one_line, shortened

HEAD = "classifier."
NOT_TENSORS = (
    "expected a state_dict, that is, tensors by name, as torch.save(network.state_dict(), FILE) "
    "writes"
)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The arrays of a file by name. ConfigError, one line, if it has anything else.

    A file of torch may hold tensors alone: nothing in it is executed.
    """
    try:
        is_safe = path.suffix == ".safetensors"
        found: Any = load_file(path) if is_safe else torch.load(path, "cpu", weights_only=True)
    except UnpicklingError as error:
        raise ConfigError("weights", f"weights = '{path}': {NOT_TENSORS}") from error
    except Exception as error:
        raise ConfigError("weights", f"weights = '{path}': {in_one_line(error, 200)}") from error
    is_flat = isinstance(found, Mapping) and all(isinstance(v, Tensor) for v in found.values())
    if not is_flat:
        raise ConfigError("weights", f"weights = '{path}': {NOT_TENSORS}")
    return dict(found)


def load_weights(model: StagedModel, path: Path) -> None:
    """Give the model the arrays of a file, by the names of the network itself or as Keel saves it.

    What a method adds to the network keeps its own. A head of another width is left out, and then
    in `model.left_out`. ConfigError naming the arrays that are missing, unknown or of other shape.
    """
    own = model.tensors
    found = {model.own_names.get(k, k): v for k, v in read_weights(path).items()}
    needed = {k for k in own if not k.startswith(("projection_heads.", "stages.projection."))}
    head = [k for k in found if k.startswith(HEAD) and k in own]
    if any(found[k].shape != own[k].shape for k in head):
        model.left_out = tuple(head)
        found = {k: v for k, v in found.items() if k not in head}
        needed -= {*head}
    own_name = {ours: theirs for theirs, ours in model.own_names.items()}
    unknown = found.keys() - own.keys()
    shapes = [k for k in found.keys() & own.keys() if found[k].shape != own[k].shape]
    for what, names in (
        ("it lacks", needed - found.keys()),
        (f"{model.name} has no", unknown),
        ("it has another shape of", shapes),
    ):
        if names:
            listed = shortened(sorted(own_name.get(k, k) for k in names))
            raise ConfigError("weights", f"weights = '{path}': {what} {listed}")
    with torch.no_grad():
        for name, array in found.items():
            own[name].copy_(array)
