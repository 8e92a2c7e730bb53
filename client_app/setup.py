"""The data source, partition and network of a config; the same on server and clients."""

import os
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client_app.methods import method_of
from client_app.samples import Pixels
from data.arrays import ARRAYS, stored_by
from data.decoding import Window
from data.own_partition import fixed_number, own_parts
from data.partitions import (
    Parts,
    group_labels,
    partition_indices,
    split_local_test,
    stratified_share,
)
from data.sources import Reading, Source, load_source, source_without_images
from models import StagedModel, build_model
from models.own import refused_size
from models.weights import load_weights
from protocol.config import RunConfig, keel_home
from protocol.data_keys import numbers_in
from protocol.messages import DatasetSpec
from protocol.models import IMAGE_SIZES, model_spec
from protocol.options import ConfigError
from protocol.own_code import Own
from protocol.seeds import seed_of
from protocol.source_spec import SITES
from protocol.text import num_of

IMAGENET = [0.485, 0.456, 0.406, 0.229, 0.224, 0.225]  # of the weights of torchvision and timm
_open_source = lru_cache(maxsize=2)(load_source)
_without_images = lru_cache(maxsize=1)(source_without_images)


def open_source(config: RunConfig) -> Source:
    """The run's data source, memory-mapped; decoded once on each machine."""
    data = config.data
    reading = replace(reading_of(config, data.classes, data.bounds), pool_test=data.pool_test)
    if own := config.own.get(data.source):
        return _open(config, stored_by(own, keel_home() / ARRAYS), reading)
    if data.source != SITES:
        return _open(config, data.source, reading)
    if data.normalise == "source":
        raise ConfigError(
            "normalise",
            f"normalise = 'source': with source = {SITES!r}, the server has no images to measure: "
            "set normalise=half",
        )
    return _without_images(reading)


def open_site(
    config: RunConfig,
    spec: str,
    classes: str,
    window: Window | None,
    shape: tuple[int, int, int] | None = None,
) -> Source:
    """A site's own data, memory-mapped. classes: of its node config. window: the run's.

    shape: (channels, height, width) to which its images are converted; None: as in the config.
    """
    reading = reading_of(config, classes, window)
    if shape:
        channels, *size = shape
        if channels not in (1, 3) or not {*size} <= {*IMAGE_SIZES}:  # before images are decoded
            raise ValueError(
                f"the run's images are {list(shape)}: expected 1 or 3 channels, "
                f"{IMAGE_SIZES[0]} to {IMAGE_SIZES[-1]} pixels a side"
            )
        reading = replace(reading, channels=channels, image_size=(shape[1], shape[2]))
    return _open(config, spec, reading)


def reading_of(config: RunConfig, classes: str, window: Window | None) -> Reading:
    """How the config has files read: to the size and channels that it, or else the model, sets."""
    config.refuse_unknown_model("model", config.model.model)  # a server may send any
    data, expected = config.data, model_spec(config.model.model)
    return Reading(
        image_size=config.image_size,
        channels=data.channels or expected.channels,
        window=window,
        classes=classes,
        group_by=data.group_by,
        test_fraction=data.test_fraction,
    )


def _open(config: RunConfig, spec: str, reading: Reading) -> Source:
    data_dir, home = config.data.data_dir, keel_home()
    folder = Path(data_dir) if data_dir else home / "data"
    return _open_source(spec, folder, home / "cache", reading)


def dataset_spec_of(config: RunConfig, source: Source) -> DatasetSpec:
    """The shape, classes, window and normalisation of the run's data, which all clients use."""
    mean, std = normalisation(config.data.normalise, source)
    return DatasetSpec(source.image_shape, source.class_names, mean, std, source.window)


def normalisation(choice: str, source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel. ConfigError for those of colours where there are none."""
    channels = len(source.mean)
    if choice == "source":
        return source.mean, source.std
    numbers = {"half": [0.5, 0.5], "imagenet": IMAGENET}.get(choice) or numbers_in(choice)
    if len(numbers) == 2:
        return (numbers[0],) * channels, (numbers[1],) * channels
    if channels != 3:
        raise ConfigError(
            "normalise", f"normalise = {choice!r}: the images have one channel: set channels=3"
        )
    return tuple(numbers[:3]), tuple(numbers[3:])


def pixels_of(config: RunConfig, source: Source) -> Pixels:
    """The run's normalisation of this source."""
    spec = dataset_spec_of(config, source)
    return Pixels(spec.mean, spec.std)


def client_indices(
    config: RunConfig, partition: int, num_clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """(training, local test) indices of simulated client `partition` into the training images."""
    mine = split_over_clients(config, num_clients)[partition]
    fraction = config.data.local_test_fraction
    if fraction == 0:
        return mine, mine[:0]
    train = open_source(config).train
    seed = seed_of(config.rounds.seed, "local-test", partition)
    return split_local_test(mine, np.asarray(train.labels), fraction, seed, train.groups)


@lru_cache(maxsize=8)
def split_over_clients(config: RunConfig, num_clients: int) -> Parts:
    """The indices of every simulated client's samples, of its local test part too.

    With `group-by`, what is dealt are groups, and the partition's keys count groups.
    """
    data = config.data
    config.check_is_for_simulation()
    train = open_source(config).train
    labels = np.asarray(train.labels)
    own = config.own.get(data.partition)
    if own and fixed_number(own):
        return parts_of_samples(config, own, labels, num_clients)
    if train.groups is not None:
        labels = group_labels(labels, train.groups)
    share = np.arange(len(labels))
    if data.data_fraction < 1:
        share = stratified_share(
            labels, data.data_fraction, seed_of(config.rounds.seed, "data-fraction")
        )
    seed = seed_of(config.rounds.seed, "partition")
    if own:
        parts = own_parts(own, labels[share], num_clients, seed)
    else:
        parts = partition_indices(
            data.partition,
            labels[share],
            num_clients,
            alpha=data.alpha,
            order=data.balanced_order,
            classes_per_client=data.classes_per_client,
            shards_per_client=data.shards_per_client,
            min_size=data.min_samples,
            seed=seed,
        )
    parts = parts.of(share)
    return parts if train.groups is None else parts.of_groups(train.groups)


def parts_of_samples(config: RunConfig, own: Own, labels: np.ndarray, num_clients: int) -> Parts:
    """The parts of an own partition that names training samples; with `group-by`, no groups."""
    if config.data.data_fraction < 1:
        raise ConfigError(
            "data-fraction",
            f"data-fraction = {config.data.data_fraction:g}: the partition {own.spec} names the "
            "samples that are used: set it to 1",
        )
    return own_parts(own, labels, num_clients, config.rounds.seed)


def unused_warnings(config: RunConfig, num_clients: int) -> list[str]:
    """A line if an own partition leaves training samples unused."""
    if config.data.partition not in config.own:
        return []
    num = len(open_source(config).train.labels)
    used = len(split_over_clients(config, num_clients).indices)
    text = f"partition = {config.data.partition!r} leaves {num - used} of {num} samples unused"
    return [text] if used < num else []


def simulated_node(config: RunConfig, number: int, num_clients: int) -> dict[str, Any]:
    """The node config of a simulated client, with its name if the partition gives it one."""
    node: dict[str, Any] = {"partition-id": number, "num-partitions": num_clients}
    if config.data.partition in config.own:
        names = split_over_clients(config, num_clients).names
        node |= {"name": names[number]} if names else {}
    return node


def forget_sources() -> None:
    """Reopen the data at its next use: its files may have changed."""
    _open_source.cache_clear()
    stored_by.cache_clear()
    split_over_clients.cache_clear()


def model_for(
    config: RunConfig, source: Source, name: str = "", seed: int | None = None
) -> StagedModel:
    """The run's network (or `name`) for this source, with its initial weights."""
    return build_network(config, source.image_shape, source.num_classes, name, seed, from_file=True)


def checked_model(config: RunConfig, source: Source) -> StagedModel:
    """The run's network with its initial weights.

    ConfigError if it cannot take the source's images.
    """
    try:
        model = model_for(config, source)
        with torch.no_grad():
            model.eval()(torch.zeros(1, *source.image_shape))
    except RuntimeError as error:
        raise refused_size(config.model.model, source.image_shape, error) from error
    return model.train()


def build_network(
    config: RunConfig,
    shape: tuple[int, int, int],
    num_classes: int,
    name: str = "",
    seed: int | None = None,
    from_file: bool = False,
) -> StagedModel:
    """The run's network (or `name`) with the parts its method adds.

    shape: (channels, height, width). Weights from `seed`, or from the run's; from_file: in the
    run's network with the arrays of `weights`, if that is set. On the CPU, in channels-last memory,
    in which convolutions are fastest.
    """
    if num_classes < 2:
        raise ValueError(
            f"source = {config.data.source!r} has {num_classes} class: expected at least 2"
        )
    parts = method_of(config).model_parts()
    name = name or config.model.model
    own = config.model if name == config.model.model else None  # other networks have their defaults
    model = build_model(
        name,
        num_classes=num_classes,
        channels=shape[0],
        image_size=shape[1:],
        seed=seed_of(config.rounds.seed, "weights") if seed is None else seed,
        norm=own.norm if own else "",
        width=own.width if own else 0,
        layer_widths=own.layer_widths if own else "",
        variant=own.variant if own else "",
        init=config.model.init,
        projection=parts.projection,
        projection_heads=parts.projection_heads,
        head_stages=parts.head_stages,
        own=config.own[name].value if name in config.own else None,
    )
    if from_file and own and own.weights:
        load_weights(model, Path(own.weights).expanduser())
    return model.to(memory_format=torch.channels_last)


@lru_cache(maxsize=4)  # the roster needs it for every client, and the networks are the same
def representation_width(config: RunConfig, model: StagedModel) -> int:
    """Entries of the representation of one image where the method splits the network."""
    image = torch.zeros(1, *model.input_shape, device=model.classifier.weight.device)
    with torch.no_grad():
        return model.eval().extract(image, method_of(config).split_stage(model)).numel()


@lru_cache  # torch takes its time to look for a GPU
def device_for(name: str) -> torch.device:
    """The device called `name`; auto is cuda where available. ValueError for an absent device."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    kind, _, number = name.partition(":")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device = {name!r}: expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        gpus, visible = num_of("GPU", torch.cuda.device_count()), os.getenv("CUDA_VISIBLE_DEVICES")
        found = f"this machine has {gpus}"
        if visible is not None:  # set by the user, or by Ray for a worker
            found = f"this process sees {gpus}, CUDA_VISIBLE_DEVICES={visible!r}"
        raise ValueError(f"device = {name!r}: {found}")
    return torch.device(name)


def device_or_cpu(name: str) -> tuple[torch.device, str]:
    """The device called `name` and ""; if it is absent, the CPU and the reason.

    For reading a run that was made on another machine.
    """
    try:
        return device_for(name), ""
    except ValueError as error:
        return torch.device("cpu"), str(error)
