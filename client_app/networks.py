"""The networks that a process reuses for all the clients of a run."""

from collections.abc import Callable

import torch

from models import StagedModel
from protocol.arrays import Arrays


class Networks:
    """Each network of a run on one device, built once and lent to one client after the other.

    build: the network of a name with the weights that the run's seed gives it, on the CPU.
    """

    def __init__(self, build: Callable[[str], StagedModel], device: torch.device) -> None:
        self.build, self.device = build, device
        self.built: dict[tuple[str, str], StagedModel] = {}  # by name and slot
        self.initial_weights: dict[str, Arrays] = {}  # by name, of those that are built
        self.has_logged_full_cache = False  # see `FrozenFeatureCache`

    def network(self, name: str, slot: str) -> StagedModel:
        """The network `name`: one instance per slot ("local", "global", ...)."""
        if (name, slot) not in self.built:
            model = self.build(name)
            self.initial_weights[name] = {k: v.clone() for k, v in model.state_dict().items()}
            self.built[name, slot] = placed(model, self.device)
        return self.built[name, slot]


def placed(model: StagedModel, device: torch.device) -> StagedModel:
    """The model, moved to this device and to the memory format that is fastest there.

    CUDA's GroupNorm works on contiguous memory only: in channels-last memory it would copy the
    input of every such layer, and its output for the next convolution.
    """
    model.to(device)
    if device.type == "cuda" and any(isinstance(p, torch.nn.GroupNorm) for p in model.modules()):
        model.to(memory_format=torch.contiguous_format)
    return model
