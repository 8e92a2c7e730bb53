"""The keys of the config about data: type, range and meaning of each."""

import re
from dataclasses import dataclass

from protocol.models import IMAGE_SIZES, is_size
from protocol.options import (
    Constraint,
    any_text,
    at_least,
    between,
    more_than,
    one_of,
    option,
    true_or_false,
)
from protocol.own_code import is_spec
from protocol.source_spec import SITES, SOURCE_NAMES


def or_own_code(names: Constraint) -> Constraint:
    """One of these names, or a spec of own code."""
    allowed = f"{names.description}, or FILE.py:NAME"
    return Constraint(lambda v: names.holds(v) or is_spec(v), allowed, names.choices)


def is_window(text: str) -> bool:
    """Whether this is a value of `window`."""
    bounds = re.fullmatch(r"(-?\d+),(-?\d+)", text)
    return not text or (bounds is not None and int(bounds[1]) < int(bounds[2]))


NORMALISATIONS = ("source", "half", "imagenet")


def numbers_in(text: str) -> list[float]:
    """The numbers of MEAN,STD; [] for anything else, and for a deviation that is not positive."""
    parts = text.split(",")
    if not all(re.fullmatch(r" *\d+(\.\d+)?(e-\d+)? *", part) for part in parts):
        return []
    numbers = [float(part) for part in parts]
    return numbers if all(numbers[len(numbers) // 2 :]) else []


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from, how they are split over clients, and how they are augmented."""

    source: str = option(
        any_text(),
        f"the data set: {', '.join(SOURCE_NAMES)}; {SITES}: a deployment's sites, not the server",
    )
    data_dir: str = option(
        any_text(), 'folder of downloaded data sets; "": $KEEL_HOME/data, else ~/.keel/data'
    )
    data_fraction: float = option(
        between(0, 1, open_low=True),
        "share of the training set that is split over the clients, stratified by class",
    )
    image_size: str = option(
        Constraint(is_size, f"0, {IMAGE_SIZES[0]} to {IMAGE_SIZES[-1]}, or HEIGHTxWIDTH"),
        "pixels of a side, or HEIGHTxWIDTH; 0: the model's input size, else the source's own",
    )
    channels: int = option(
        Constraint(lambda v: v in (0, 1, 3), "0, 1 or 3"),
        "1 or 3; 0: the model's number of channels, else the source's own",
    )
    window: str = option(
        Constraint(is_window, "'', or LOW,HIGH as in 0,4095"),
        'values of images of 16 bits that become 0 and 255; "": the training images\' smallest and '
        "largest",
    )
    classes: str = option(
        any_text(),
        "names of the source's labels, 0 first, or as in 1=cat,2=dog; with source = sites: the "
        "run's classes",
    )
    group_by: str = option(
        any_text(),
        "column of labels.csv, or arrays NAME_train and NAME_test of an npz file: images of one "
        "value (a patient) stay together, in train or test and at one client",
    )
    test_fraction: float = option(
        between(0, 1, open_high=True),
        "share of the training images that becomes the test set of a source without one",
    )
    normalise: str = option(
        Constraint(
            lambda v: v in NORMALISATIONS or len(numbers_in(v)) in (2, 6),
            "source, half, imagenet, or MEAN,STD",
            NORMALISATIONS,
        ),
        "mean and standard deviation of the pixels: source: the training images'; half: 0.5 each; "
        "imagenet: ImageNet's; MEAN,STD: two numbers from 0 to 1, or three and three for RGB",
    )
    pool_test: bool = option(
        true_or_false(),
        "split the test images over simulated clients too, as FedReCo's code: then no images are "
        "left to evaluate a global model on, and evaluate-global has to be false",
    )
    partition: str = option(
        or_own_code(one_of("iid", "dirichlet", "dirichlet-balanced", "classes", "shards")),
        "how the training set is split over the clients",
    )
    alpha: float = option(more_than(0), "concentration of both Dirichlet partitions")
    balanced_order: str = option(
        one_of("interleaved", "sequential"),
        "partition = dirichlet-balanced: clients draw in turn, or client after client by what "
        "remains, as in FedRCL's released splits, which is more skewed",
    )
    classes_per_client: int = option(at_least(1), "classes of each client, for partition = classes")
    shards_per_client: int = option(at_least(1), "shards of each client, for partition = shards")
    min_samples: int = option(
        at_least(1), "partition = dirichlet is redrawn until every client has this many samples"
    )
    local_test_fraction: float = option(
        between(0, 1, open_high=True), "share of a client's samples held out as its local test part"
    )
    flip: bool = option(true_or_false(), "random horizontal flip in training")
    crop_padding: int = option(between(0, 16), "random crop after padding by this many pixels")
    rotation: float = option(between(0, 180), "random rotation by up to this many degrees")

    @property
    def bounds(self) -> tuple[int, ...] | None:
        """The two numbers of `window`; None if it is not set."""
        return tuple(map(int, self.window.split(","))) if self.window else None
