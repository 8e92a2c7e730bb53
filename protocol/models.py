"""What is known of every model without building it; `models.registry` builds them by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """The input that a model's paper uses; 0: as the data source has it."""

    image_size: int = 0
    channels: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """norms: the norm layers to choose from, the default first; () for a model without any.

    projection: what is added before the classifier where the method adds none.
    """

    norms: tuple[str, ...] = ()
    projection: str = "none"
    input: InputSpec = InputSpec()

    def norm_layer(self, norm: str) -> str:
        """The norm layer under the config's `norm`, "" for a model without any."""
        return norm or next(iter(self.norms), "")


MODELS: dict[str, ModelSpec] = {
    "cnn-fedintr": ModelSpec(input=InputSpec(image_size=32, channels=3)),
    "cnn-fedcka": ModelSpec(),
    "cnn-fedreco": ModelSpec(),
    "resnet20": ModelSpec(norms=("batch", "group")),
    "resnet18": ModelSpec(norms=("group", "batch")),
    "resnet50": ModelSpec(norms=("batch", "group"), projection="mlp"),
    "vgg9": ModelSpec(norms=("group", "batch")),
    "mobilenet-v2": ModelSpec(norms=("group", "batch")),
    "shufflenet": ModelSpec(norms=("group", "batch")),
    "squeezenet": ModelSpec(norms=("group", "batch")),
}
