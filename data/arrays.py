"""Arrays of images that Python hands over: checked, stored once as an npz file, named as a source.

Images are uint8, or floats of which 1.0 is white, with any number of channels. A run on them is one
on `source = npz:PATH`, so that it resumes, predicts and verifies like any other. Needs no torch.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data.npz import MAX_CLASSES, channels_last, label_names
from protocol.files import digest
from protocol.options import ConfigError, did_you_mean
from protocol.own_code import Own
from protocol.text import num_of, shortened

ARRAYS = "data/arrays"  # in $KEEL_HOME


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images and labels, `keel.run(data=keel.Arrays(x_train, y_train, x_test, y_test))`.

    x_train, x_test: uint8, or floats from 0 to 1, of shape [N, H, W], [N, C, H, W] or [N, H, W, C];
    of the two sizes the smaller one is the channels. y_train, y_test: integers from 0, or names.
    Without a test set, `test-fraction` holds one out. classes: names of the labels, 0 first.
    ConfigError naming the array that does not fit.
    """

    x_train: Any
    y_train: Any
    x_test: Any = None
    y_test: Any = None
    classes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.x_test is None) != (self.y_test is None):
            raise wrong("x_test and y_test", "only one of them is given")
        self.as_dict()  # raises

    def as_dict(self) -> dict[str, np.ndarray]:
        """The arrays as an npz file has them: images are [N, H, W] or [N, H, W, C]."""
        given = {"train": (self.x_train, self.y_train)}
        if self.x_test is not None:
            given["test"] = (self.x_test, self.y_test)
        found: dict[str, np.ndarray] = {}
        for part, (x, y) in given.items():
            found[f"x_{part}"] = images_last(f"x_{part}", np.asarray(x), part == "test")
            found[f"y_{part}"] = labels = np.asarray(y)
            if labels.dtype.kind not in "iuU" or labels.ndim != 1:
                what = f"is {labels.dtype} {list(labels.shape)}: expected integers or names [N]"
                raise wrong(f"y_{part}", what)
            num = len(found[f"x_{part}"])
            if len(labels) != num:
                what = f"has {num_of('label', labels)}, x_{part} {num_of('image', num)}"
                raise wrong(f"y_{part}", f"{what}: expected one for each image")
        if self.classes:
            label_names(list(self.classes))
            found["classes"] = np.array([str(name) for name in self.classes])
        shapes = [found[name].shape[1:] for name in ("x_train", "x_test") if name in found]
        if len({*shapes}) > 1:
            raise wrong("x_test", f"has images {list(shapes[1])}, x_train {list(shapes[0])}")
        check_labels(found)
        return found


def wrong(name: str, what: str) -> ConfigError:
    """The refusal of an array."""
    return ConfigError("source", f"data: {name} {what}")


def images_last(name: str, x: np.ndarray, may_be_empty: bool) -> np.ndarray:
    """The images as [N, H, W] or [N, H, W, C]; floats as float32."""
    try:
        return channels_last(x.astype(np.float32) if x.dtype.kind == "f" else x, may_be_empty)
    except ValueError as error:
        raise wrong(name, str(error)) from error


def check_labels(found: dict[str, np.ndarray]) -> None:
    """ConfigError naming a label below 0, or one that is none of the classes."""
    for part in ("train", "test"):
        labels = found.get(f"y_{part}", np.empty(0, int))
        if labels.dtype.kind == "i" and len(labels) and labels.min() < 0:
            raise wrong(f"y_{part}", f"has the label {labels.min()}: expected 0 or more")
    known = [str(label) for label in np.unique(found["y_train"]).tolist()]
    where = "y_train"
    if "classes" in found:
        known, where = list(label_names(found["classes"].tolist())), "classes"
    if len(known) > MAX_CLASSES:
        raise wrong(where, f"has {len(known)} labels: expected at most {MAX_CLASSES}")
    for part in ("train", "test"):
        labels = np.unique(found.get(f"y_{part}", np.empty(0, int))).tolist()
        for label in map(str, labels):
            if label not in known:
                hint = did_you_mean(label, known)
                raise wrong(
                    f"y_{part}", f"has the label {label}, {where} has {shortened(known)}{hint}"
                )


def arrays_of(data: Any) -> Arrays:
    """The Arrays in Arrays, a Dataset, or a pair of Datasets, of which the second is the test set.

    A Dataset gives pairs of an image (tensor, array or PIL image) and a label by number.
    """
    if isinstance(data, Arrays):
        return data
    parts = data if isinstance(data, tuple) else (data,)
    is_dataset = [hasattr(p, "__getitem__") and not hasattr(p, "dtype") for p in parts]
    if len(parts) not in (1, 2) or not all(is_dataset):
        raise ConfigError(
            "source",
            f"data is {' and '.join(type(part).__name__ for part in parts)}: expected "
            "keel.Arrays(x_train, y_train, x_test, y_test), a Dataset, or a pair of Datasets",
        )
    found: dict[str, Any] = {}
    for name, part in zip(("train", "test"), parts, strict=False):
        items = [part[i] for i in range(len(part))]
        found[f"x_{name}"] = np.stack([np.asarray(image) for image, _ in items])
        found[f"y_{name}"] = np.array([int(label) for _, label in items])
    return Arrays(**found, classes=tuple(map(str, getattr(parts[0], "classes", ()))))


def stored(data: Any, folder: Path, name: str = "arrays") -> str:
    """The `source` of this data: npz:PATH of a file in `folder`, written if it is not there.

    The file is named after the content: the same arrays are stored once.
    """
    found = arrays_of(data).as_dict()
    pieces: Iterable[Any] = (
        piece
        for key, array in found.items()
        for piece in (f"{key} {array.dtype} {array.shape}".encode(), np.ascontiguousarray(array))
    )
    path = folder / f"{name}-{digest(*pieces)}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f".{path.stem}-{os.getpid()}.npz")
        try:
            np.savez(part, **found)  # type: ignore[arg-type]
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return f"npz:{path}"


@lru_cache(maxsize=4)  # asked for with every client
def stored_by(own: Own, folder: Path) -> str:
    """The same of what an own function returns; ConfigError, one line, if it fails."""
    what = f"source = {own.spec!r}"
    try:
        data = own.value() if callable(own.value) else own.value
    except ValueError as error:
        raise ConfigError("source", f"{what}: {error}") from error
    return stored(data, folder, own.name)
