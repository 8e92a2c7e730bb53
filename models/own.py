"""Networks that are not Keel's: own modules and functions, and torchvision's and timm's by name."""

import copy
import importlib
import inspect
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from models.cut import TORCH, CutError, cut
from models.staged import Trunk
from protocol.code import is_installed
from protocol.models import IMAGE_SIZES, LIBRARIES, Size, is_library
from protocol.options import ConfigError, did_you_mean
from protocol.text import in_one_line

COARSE = 4  # pixels between the sizes that are tried first


def own_trunk(name: str, own: Any, input_shape: tuple[int, int, int], num_classes: int) -> Trunk:
    """The network `name`, cut into stages. own: the module, function or class that it names.

    ConfigError, one line, if it cannot be made or cut, or cannot take such images.
    """
    channels, *size = input_shape
    make = maker(name, own, channels, num_classes)
    try:
        network = make((size[0], size[1])).float()
    except ConfigError:
        raise
    except Exception as error:
        if is_library(name):
            raise too_small(name, make, input_shape, error) from error
        raise ConfigError("model", f"model = {name!r}: {in_file(error)}") from error
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(2, *input_shape, generator=generator)
    try:
        with torch.no_grad():
            network.eval()(example)
    except Exception as error:
        raise too_small(name, make, input_shape, error) from error
    try:
        return cut(network, example)
    except CutError as error:
        raise ConfigError("model", f"model = {name!r}: {error}") from error


def maker(name: str, own: Any, channels: int, num_classes: int) -> Callable[[Size], nn.Module]:
    """The function from the images' size to the network, uncut.

    A function or class is given `num_classes` and `input_shape` where it has such parameters.
    """
    if is_library(name):
        return lambda size: of_library(name, channels, size, num_classes)
    if isinstance(own, nn.Module):
        return lambda size: copy.deepcopy(own)
    if not callable(own):
        raise ConfigError(
            "model",
            f"model = {name!r} is a {type(own).__name__}: expected an nn.Module, or a function or "
            "class that makes one",
        )
    parameters = inspect.signature(own).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def make(size: Size) -> nn.Module:
        offered: dict[str, Any] = {"input_shape": (channels, *size)}
        found = {key: value for key, value in offered.items() if key in parameters}
        if takes_any or "num_classes" in parameters:
            found["num_classes"] = num_classes
        made = own(**found)
        if not isinstance(made, nn.Module):
            raise ConfigError(
                "model",
                f"model = {name!r} returned a {type(made).__name__}: expected an nn.Module",
            )
        return made

    return make


def of_library(name: str, channels: int, size: Size, num_classes: int) -> nn.Module:
    """A network of torchvision or timm, with random weights. ConfigError for an unknown name."""
    library, _, called = name.partition(":")
    if not is_installed(library):
        raise ConfigError("model", f"model = {name!r}: {library} is not installed")
    models = importlib.import_module(LIBRARIES[library])
    names = models.list_models(module=models) if library == "torchvision" else models.list_models()
    if called not in names:
        near = did_you_mean(called, names)
        raise ConfigError("model", f"model = {name!r}: {library} has no {called!r}{near}")
    options: dict[str, Any] = {"num_classes": num_classes}
    if library == "torchvision":
        if called.startswith("vit_"):
            options["image_size"] = size[0]
        made = models.get_model(called, weights=None, **options)
    else:
        options |= {"in_chans": channels, "pretrained": False}
        try:
            made = models.create_model(called, img_size=size, **options)
        except TypeError:  # convolutional networks have no such argument
            made = models.create_model(called, **options)
    assert isinstance(made, nn.Module)
    return made


def in_file(error: Exception) -> str:
    """An error of a user's code, with the file and line."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(TORCH)]
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return f"{place}{type(error).__name__}: {in_one_line(error, 200)}"


# --- sizes ----------------------------------------------------------------------------------------


def too_small(
    name: str,
    make: Callable[[Size], nn.Module],
    input_shape: tuple[int, int, int],
    error: Exception,
) -> ConfigError:
    """The refusal of images that a network cannot take, with the least size that it can."""
    channels, height, width = input_shape
    least = least_size(make, channels)
    advice = f"set image-size to {least} or more" if least else "set image-size or channels"
    if least and least <= min(height, width):
        advice = f"it takes {least} x {least}: set image-size={least}"
    return ConfigError(
        "image-size",
        f"model = {name!r} cannot take {channels} x {height} x {width} (channels, height, width): "
        f"{advice} ({in_one_line(error, 160)})",
    )


def least_size(make: Callable[[Size], nn.Module], channels: int) -> int:
    """The least side of a square that a network takes, in pixels; 0 if it takes none.

    On device "meta", where tensors have shapes but no values.
    """
    for coarse in IMAGE_SIZES[::COARSE]:
        if takes(make, channels, coarse):
            finer = range(max(IMAGE_SIZES[0], coarse - COARSE + 1), coarse)
            return next((side for side in finer if takes(make, channels, side)), coarse)
    return 0


def takes(make: Callable[[Size], nn.Module], channels: int, side: int) -> bool:
    """Whether a network takes squares of this side."""
    with torch.device("meta"), torch.no_grad(), suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make((side, side)).to("meta").eval()(torch.zeros(2, channels, side, side))
        return True
    return False
