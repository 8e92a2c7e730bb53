"""Networks that are not Keel's: own modules and functions, and torchvision's and timm's by name."""

import copy
import importlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.cut import TORCH, CutError, cut
from models.staged import Trunk
from protocol.code import is_installed
from protocol.models import LIBRARIES, Size, is_library
from protocol.options import ConfigError, did_you_mean
from protocol.text import in_one_line


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
            raise refused_size(name, input_shape, error) from error
        raise ConfigError("model", f"model = {name!r}: {in_file(error)}") from error
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(2, *input_shape, generator=generator)
    try:
        with torch.no_grad():
            network.eval()(example)
    except Exception as error:
        raise refused_size(name, input_shape, error) from error
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


def refused_size(name: str, input_shape: tuple[int, int, int], error: Exception) -> ConfigError:
    """The refusal of images that a network cannot take."""
    channels, height, width = input_shape
    return ConfigError(
        "image-size",
        f"model = {name!r} cannot take {channels} x {height} x {width} (channels, height, width): "
        f"set image-size or channels ({in_one_line(error, 160)})",
    )
