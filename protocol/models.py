"""What is known of every model without building it; `models.registry` builds them by name."""

from dataclasses import dataclass

from protocol.options import ConfigError

IMAGE_SIZES = range(28, 64 + 1)  # pixels of a side that every model takes
MAX_WIDTH = 1024  # channels of a first stage; the last has 8 times as many, or more


@dataclass(frozen=True)
class ModelSpec:
    """norms: the norm layers to choose from, the default first ("": none); () for no choice.

    projection: what is added before the classifier where the method adds none.
    width: channels of the first stage where `width` may change them, else 0. image_size, channels:
    of the images that the model's paper uses; 0: as the data source has them.
    """

    norms: tuple[str, ...] = ()
    projection: str = "none"
    width: int = 0
    image_size: int = 0
    channels: int = 0

    def norm_layer(self, norm: str) -> str:
        """The norm layer under the config's `norm`; "" for none."""
        return norm or next(iter(self.norms), "")

    def without_batch_norm(self, name: str) -> str:
        """How a config avoids BatchNorm in the model `name`."""
        if "group" in self.norms:
            return "set norm = 'group'"
        return (
            f'{name} has no other norm layer: choose another model, or add "group" to its norms in '
            "protocol/models.py"
        )

    def check(self, name: str, norm: str, width: int) -> None:
        """ValueError, one line, for a `norm` or `width` that the model `name` does not have."""
        if norm and norm not in self.norms:
            allowed = " or ".join(n for n in self.norms if n)
            allowed = f"expected {allowed}" if allowed else "it has no norm layer"
            raise ConfigError("norm", f"norm = {norm!r}: {name}: {allowed}; empty: its default")
        if width and not self.width:
            able = ", ".join(n for n, spec in MODELS.items() if spec.width)
            raise ConfigError(
                "width", f"width = {width}: {name} has one width: expected 0 (or {able})"
            )
        if width % 4 or width > MAX_WIDTH:
            raise ConfigError(
                "width",
                f"width = {width}: expected a multiple of 4 up to {MAX_WIDTH}, or 0 for "
                f"{name}'s {self.width}",
            )


def model_spec(name: str) -> ModelSpec:
    """What is known of a model; of a network that is own code, that it offers no choice."""
    return MODELS.get(name) or ModelSpec()


MODELS: dict[str, ModelSpec] = {
    "cnn-fedintr": ModelSpec(norms=("", "group"), image_size=32, channels=3),
    "cnn-fedcka": ModelSpec(norms=("", "group")),
    "cnn-fedreco": ModelSpec(norms=("", "group")),
    "resnet20": ModelSpec(norms=("batch", "group"), width=16),
    "resnet18": ModelSpec(norms=("group", "batch"), width=64),
    "resnet50": ModelSpec(norms=("batch", "group"), projection="mlp", width=64),
    "vgg9": ModelSpec(norms=("group", "batch")),
    "mobilenet-v2": ModelSpec(norms=("group", "batch")),
    "shufflenet": ModelSpec(norms=("group", "batch")),
    "squeezenet": ModelSpec(norms=("group", "batch")),
}
