"""`keel datasets`: the data sets, and one with its classes and pixel statistics."""

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.arguments import JsonOption, NameArgument
from keel.tables import Row, show, show_one
from protocol.config import keel_home, resolve_config
from protocol.models import size_in

SAME_KEY = "The config key of this name."
# Files in data-dir that a download creates or the user provides.
DATA_FILES = {
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw"),
    "mnist": ("mnist", "MNIST/raw"),
    "cifar10": ("cifar-10-batches-py",),
    "cifar100": ("cifar-100-python",),
    "svhn": ("train_32x32.mat",),
    "tiny-imagenet": ("tiny-imagenet-200",),
}


def datasets(
    name: NameArgument = None,
    as_json: JsonOption = False,
    image_size: Annotated[
        str, typer.Option(help="Pixels of a side, or HEIGHTxWIDTH; 0: the images' own size.")
    ] = "0",
    window: Annotated[str, typer.Option(help=SAME_KEY)] = "",
    classes: Annotated[str, typer.Option(help=SAME_KEY)] = "",
    group_by: Annotated[str, typer.Option(help=SAME_KEY)] = "",
    test_fraction: Annotated[float, typer.Option(help=SAME_KEY)] = 0.0,
) -> None:
    """List the data sets, or show one: its classes, pixel statistics and what is unusual."""
    from data.readers import READERS
    from data.sources import Reading, load_source

    keys: Row = {"image-size": image_size, "window": window, "classes": classes}
    keys |= {"group-by": group_by, "test-fraction": test_fraction}
    bounds = resolve_config(keys).data.bounds
    data_dir, cache_dir = keel_home() / "data", keel_home() / "cache"
    rows = {
        each: {
            "name": each,
            "train": reader.published and reader.published.num_train,
            "test": reader.published and reader.published.num_test,
            "classes": reader.published and reader.published.num_classes,
            "shape": reader.published and list(reader.published.image_shape),
            "description": reader.description,
            "here": availability(each, data_dir, cache_dir),
        }
        for each, reader in READERS.items()
    }
    if name is None:
        caption = f"data-dir is {data_dir} by default."
        show(list(rows.values()), as_json, "Data sets", caption, ["description"])
        return
    if name in rows and rows[name]["here"] != "yes":
        show_one(rows[name], {}, as_json)
        return
    reading = Reading(size_in(image_size), 0, bounds, classes, group_by, test_fraction)
    source = load_source(name, data_dir, cache_dir, reading)
    facts: Row = {
        "name": source.name,
        "shape": list(source.image_shape),
        "mean": [round(value, 4) for value in source.mean],
        "std": [round(value, 4) for value in source.std],
    }
    if source.window:
        facts["window of 16 bits"] = list(source.window)
    if source.notes:
        facts["warnings"] = list(source.notes) if as_json else "\n".join(source.notes)
    published = rows[name]["shape"] if name in rows else None
    if published and published != facts["shape"]:
        facts |= {"shape as published": published}
    is_renamed = source.own_labels != source.class_names
    counts = [
        {
            "class": class_name,
            **({"label": source.own_labels[label]} if is_renamed else {}),
            "train": int((source.train.labels == label).sum()),
            "test": int((source.test.labels == label).sum()),
        }
        for label, class_name in enumerate(source.class_names)
    ]
    show_one(facts, {"classes": counts}, as_json)


def availability(name: str, data_dir: Path, cache_dir: Path) -> str:
    """Whether the data set can be used here without a download, else how to get it."""
    from data.cache import is_cached
    from data.readers import DEBIAN_DATASETS

    if name.endswith(":PATH"):
        return "your own images"
    if name not in DATA_FILES:
        return "yes"
    files = [data_dir / file for file in DATA_FILES[name]]
    if is_cached(name, cache_dir) or any(
        path.exists() for path in (*files, DEBIAN_DATASETS / name)
    ):
        return "yes"
    place = f"data-dir/{DATA_FILES[name][0]}"
    return f"put it in {place}" if name == "tiny-imagenet" else f"download, or put it in {place}"
