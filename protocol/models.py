"""What is known of every model without building it; `models.registry` builds them by name."""

import re
from dataclasses import dataclass

from protocol.options import ConfigError

IMAGE_SIZES = range(8, 512 + 1)  # pixels of a side
Size = tuple[int, int]  # (height, width) in pixels; (0, 0): the source's own
OWN_SIZE: Size = (0, 0)
LIBRARIES = {"torchvision": "torchvision.models", "timm": "timm"}  # whose networks have names
MAX_WIDTH = 1024  # channels of a first stage; the last has 8 times as many, or more
MAX_LAYER_WIDTH = 8192


def size_in(text: str) -> Size:
    """The size in an `image-size`: "32" is a square, "28x36" has 28 rows; "0" is (0, 0)."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def is_size(text: str) -> bool:
    """Whether a text is an `image-size`."""
    is_form = re.fullmatch(r"\d{1,3}(x\d{1,3})?", text) is not None
    return text == "0" or (is_form and all(side in IMAGE_SIZES for side in size_in(text)))


def size_text(size: Size) -> str:
    """The `image-size` of a size."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def widths_in(text: str) -> tuple[int, ...]:
    """The numbers in a `layer-widths`."""
    return tuple(int(part) for part in text.split(",") if part)


@dataclass(frozen=True)
class ModelSpec:
    """norms: the norm layers to choose from, the default first ("": none); () for no choice.

    projection: what is added before the classifier where the method adds none.
    width: channels of the first stage where `width` may change them, else 0. layer_widths: of its
    layers before the classifier where `layer-widths` may change them. variants: beside its own.
    image_size (of squares), channels: of the images that the model's paper uses; 0: as the data
    source has them.
    """

    norms: tuple[str, ...] = ()
    projection: str = "none"
    width: int = 0
    layer_widths: tuple[int, ...] = ()
    variants: tuple[str, ...] = ()
    image_size: int = 0
    channels: int = 0

    def norm_layer(self, norm: str) -> str:
        """The norm layer under the config's `norm`; "" for none."""
        return norm or next(iter(self.norms), "")

    def without_batch_norm(self, name: str) -> str:
        """How a config avoids BatchNorm in the model `name`."""
        if "group" in self.norms:
            return "set norm = 'group'"
        if name not in MODELS:
            return "use GroupNorm or LayerNorm in it"
        return (
            f'{name} has no other norm layer: choose another model, or add "group" to its norms in '
            "protocol/models.py"
        )

    def check(
        self, name: str, norm: str, width: int, layer_widths: str = "", variant: str = ""
    ) -> None:
        """ValueError, one line, for an option that the model `name` does not have."""
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
        if layer_widths:
            self.check_layer_widths(name, layer_widths)
        if variant and variant not in self.variants:
            able = ", ".join(n for n, spec in MODELS.items() if variant in spec.variants)
            raise ConfigError(
                "variant", f"variant = {variant!r}: {name} has none: expected nothing (or {able})"
            )

    def check_layer_widths(self, name: str, text: str) -> None:
        """ValueError, one line, unless these are as many widths as the model `name` has."""
        if not self.layer_widths:
            able = ", ".join(n for n, spec in MODELS.items() if spec.layer_widths)
            raise ConfigError(
                "layer-widths",
                f"layer-widths = {text!r}: {name} has its own: expected nothing (or {able})",
            )
        widths = widths_in(text)
        if len(widths) != len(self.layer_widths) or any(
            n % 2 or not 2 <= n <= MAX_LAYER_WIDTH for n in widths
        ):
            own = ",".join(map(str, self.layer_widths))
            raise ConfigError(
                "layer-widths",
                f"layer-widths = {text!r}: {name} has {len(self.layer_widths)}: expected as many "
                f"even numbers from 2 to {MAX_LAYER_WIDTH}, such as its own {own}",
            )


def model_spec(name: str) -> ModelSpec:
    """What is known of a model; of a network that is not Keel's, that it offers no choice."""
    is_for_colours = name.startswith("torchvision:")
    return MODELS.get(name) or ModelSpec(channels=3 if is_for_colours else 0)


def is_library(name: str) -> bool:
    """Whether a model is one of another library's, such as torchvision:resnet18."""
    library, _, called = name.partition(":")
    return library in LIBRARIES and bool(called)


MODELS: dict[str, ModelSpec] = {
    "cnn-fedintr": ModelSpec(norms=("", "group"), image_size=32, channels=3),
    "cnn-fedcka": ModelSpec(norms=("", "group")),
    "cnn-fedreco": ModelSpec(norms=("", "group"), layer_widths=(6, 16, 120, 84)),
    "resnet20": ModelSpec(norms=("batch", "group"), width=16),
    "resnet18": ModelSpec(norms=("group", "batch"), width=64),
    "resnet50": ModelSpec(norms=("batch", "group"), projection="mlp", width=64),
    "vgg9": ModelSpec(norms=("group", "batch"), variants=("fedrcl",)),
    "mobilenet-v2": ModelSpec(norms=("group", "batch"), variants=("fedrcl",)),
    "shufflenet": ModelSpec(norms=("group", "batch"), variants=("fedrcl",)),
    "squeezenet": ModelSpec(norms=("group", "batch"), variants=("fedrcl",)),
}
