"""A model as a chain of named stages: methods read, stop at or split any network at a layer.

A network is one chain of modules, each with the name of the layer that it ends in:
    "conv1:pre", "conv1", "conv2:pre", "conv2", ..., "features", "logits"
The output of a layer is a representation. No method names a layer of a concrete model, and no model
knows a method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Stage(nn.Module):
    """Weights (`body`), then what has none (`tail`): the activation, the pooling or both.

    The layer "<stage>:pre" lies between the two, so a tail must not overwrite its input.
    """

    def __init__(self, body: nn.Module, tail: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        """The stage's output, the layer of its name."""
        out: Tensor = self.tail(self.body(x))
        return out


@dataclass(frozen=True)
class Trunk:
    """A network up to its classifier; each model family builds one.

    classifier, own_names: of a network that was cut (models/cut.py), its last layer, and the name
    here of each array in its own state_dict.
    """

    stages: dict[str, Stage]  # ordered input to output
    to_features: nn.Module  # the last stage's output -> [B, width]; no parameters
    width: int  # of the classifier's input
    classifier: nn.Linear | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)


class StagedModel(nn.Module):
    """Ordered named stages, pooling or flattening to features, and a classifier.

    `projection_heads` (FedIntR's q_k) are empty unless the model was built with them. They are part
    of the state, but not of the forward pass, the extractor or the head: a method applies them
    with `project`.
    """

    def __init__(
        self, name: str, input_shape: tuple[int, int, int], num_classes: int, trunk: Trunk
    ) -> None:
        super().__init__()
        self.name = name
        self.input_shape = input_shape
        self.num_classes = num_classes
        self.stages = nn.ModuleDict(trunk.stages)
        self.to_features = trunk.to_features
        own = trunk.classifier
        is_kept = own is not None and (own.in_features, own.out_features) == (
            trunk.width,
            num_classes,
        )
        self.classifier = own if own and is_kept else nn.Linear(trunk.width, num_classes)
        self.own_names = trunk.own_names
        self.left_out: tuple[str, ...] = ()  # arrays of saved weights that did not fit
        has_norm = any(isinstance(module, _BatchNorm) for module in self.modules())
        self.min_batch = 2 if own is not None and has_norm else 1
        self.projection_heads = nn.ModuleDict()
        in_stages = [layer for stage in trunk.stages for layer in (f"{stage}:pre", stage)]
        self.layer_names = (*in_stages, "features", "logits")
        self._extractors: dict[str, Extractor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers themselves, in the order and by the names of `state_dict`."""
        return dict(self.state_dict(keep_vars=True))

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Ordered input to output."""
        return tuple(self.stages)

    @property
    def regularised_stages(self) -> tuple[str, ...]:
        """The network's own stages: all but an added projection."""
        return tuple(name for name in self.stages if name != "projection")

    @property
    def feature_width(self) -> int:
        """Entries of the classifier's input, for each sample."""
        return self.classifier.in_features

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, num_classes]."""
        for stage in self.stages.values():
            x = stage(x)
        return _in_full(self.classifier(self.to_features(x)))

    def run(
        self, x: Tensor, layers: Sequence[str] = (), *, to_logits: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Logits, and the outputs of these layers in their order; gradients flow through both.

        "<stage>" is a stage's output, "<stage>:pre" its body's, "features" the classifier's input,
        "logits" the classifier's output. With to_logits=False nothing after the last of the layers
        runs, and the logits are None.
        """
        depths = [self._depth(layer) for layer in layers]
        chain = self._chain() if to_logits else self._chain()[: max(depths, default=0)]
        found: dict[int, Tensor] = {}
        for depth, module in enumerate(chain, start=1):
            x = module(x)
            if depth in depths:
                found[depth] = x
        return _in_full(x) if to_logits else None, [_in_full(found[d]) for d in depths]

    def project(self, layers: Sequence[str], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs [B, ...] of these stages, each through its projection head: [B, d] each."""
        named = zip(layers, outputs, strict=True)
        return [self.projection_heads[name](h.flatten(1)) for name, h in named]

    def extract(self, x: Tensor, split: str) -> Tensor:
        """Output of stage `split`; the features, [B, feature_width], if it is the last stage."""
        _, (h,) = self.run(x, [self._split_layer(split)], to_logits=False)
        return h

    def predict(self, h: Tensor, split: str) -> Tensor:
        """Logits from the output of `extract` for the same split."""
        return self.resume(h, after=self._split_layer(split))

    def resume(self, h: Tensor, after: str) -> Tensor:
        """Logits from the output of layer `after`, as `run` returns it."""
        for module in self._chain()[self._depth(after) :]:
            h = module(h)
        return _in_full(h)

    def extractor(self, split: str) -> "Extractor":
        """The stages up to and including `split`, made once: `extract` as a module."""
        if split not in self._extractors:
            self._extractors[split] = Extractor(self, split)
        return self._extractors[split]

    def extractor_keys(self, split: str) -> list[str]:
        """The state_dict keys of the stages up to and including `split`."""
        last = self._stage_index(split)
        prefixes = tuple(f"stages.{name}." for name in self.stage_names[: last + 1])
        return [key for key in self.tensors if key.startswith(prefixes)]

    def head_keys(self, split: str) -> list[str]:
        """The state_dict keys of the stages after `split` and of the classifier."""
        first = self._stage_index(split) + 1
        prefixes = (*(f"stages.{name}." for name in self.stage_names[first:]), "classifier.")
        return [key for key in self.tensors if key.startswith(prefixes)]

    def _chain(self) -> list[nn.Module]:
        """For each of `layer_names`, the module that computes it from the one before."""
        parts = [part for stage in self.stages.values() for part in stage.children()]
        return [*parts, self.to_features, self.classifier]

    def _depth(self, layer: str) -> int:
        """The number of modules of the chain that compute the layer."""
        if layer not in self.layer_names:
            raise ValueError(f"layer {layer!r}: {self.name} has {', '.join(self.layer_names)}")
        return self.layer_names.index(layer) + 1

    def _stage_index(self, split: str) -> int:
        if split not in self.stages:
            raise ValueError(f"stage {split!r}: {self.name} has {', '.join(self.stages)}")
        return self.stage_names.index(split)

    def _split_layer(self, split: str) -> str:
        return "features" if self._stage_index(split) == len(self.stages) - 1 else split


def _in_full(x: Tensor) -> Tensor:
    """The bfloat16 output of an autocast pass as float32, in which losses are computed."""
    return x.float() if x.dtype is torch.bfloat16 else x


class Extractor(nn.Module):
    """The stages of a model up to `split`, as a module of their own that shares its weights."""

    def __init__(self, model: StagedModel, split: str) -> None:
        super().__init__()
        self.stages = nn.ModuleDict()
        for name, stage in model.stages.items():
            self.stages[name] = stage
            if name == split:
                break
        self.to_features = model.to_features if split == model.stage_names[-1] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The representation of x [B, C, H, W], [B, ...]."""
        for stage in self.stages.values():
            x = stage(x)
        return _in_full(self.to_features(x))
