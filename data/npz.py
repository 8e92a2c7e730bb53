"""Arrays in a NumPy file: x_train, y_train, x_test, y_test, and what its labels mean."""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.decoding import ImageFileError, RawSource, RawSplit, one_line
from protocol.options import ConfigError
from protocol.text import num_of, shortened

MAX_CLASSES = 100_000  # of an npz file; each has an output of the network
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")


def read_npz(path: Path) -> RawSource:
    """A label's name is its own text, unless the array `classes` names it.

    A test split without images where the file has neither x_test nor y_test.
    """
    arrays, found = _npz_arrays(path, (*NPZ_KEYS, "classes"))
    if not {"x_test", "y_test"} & arrays.keys() and {"x_train", "y_train"} <= arrays.keys():
        arrays |= {"x_test": arrays["x_train"][:0], "y_test": arrays["y_train"][:0]}
    if missing := [key for key in NPZ_KEYS if key not in arrays]:
        lack = f"no {', '.join(missing)}; expected {', '.join(NPZ_KEYS)}"
        has = f"{shortened(found) or 'no arrays'} and "
        raise ImageFileError(f"{path} has {has}{lack}", f"an npz file has {lack}")
    for split in ("train", "test"):
        labels, num_images = arrays[f"y_{split}"], len(np.atleast_1d(arrays[f"x_{split}"]))
        if labels.dtype.kind not in "iuU" or labels.shape != (num_images,):
            raise ValueError(
                f"{path}: y_{split} is {labels.dtype} {list(labels.shape)}; expected integers or "
                f"names [{num_images}], because x_{split} has {num_of('image', num_images)}"
            )
        if labels.dtype.kind == "i" and num_images and labels.min() < 0:
            raise ValueError(f"{path}: y_{split} has the label {labels.min()}; expected 0 or more")
    names = {str(label): str(label) for label in np.unique(arrays["y_train"]).tolist()}
    if "classes" in arrays:
        try:
            names = label_names(np.atleast_1d(arrays["classes"]).tolist())
        except (ConfigError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error
    if not 0 < len(names) <= MAX_CLASSES:
        raise ValueError(f"{path}: {len(names)} classes; expected 1 to {MAX_CLASSES}")
    label_of = {own: label for label, own in enumerate(names)}

    def split_of(part: str) -> RawSplit:
        y = arrays[f"y_{part}"]
        found, places = np.unique(y, return_inverse=True)
        texts = [str(label) for label in found.tolist()]
        if unknown := [text for text in texts if text not in label_of]:
            where = "classes" if "classes" in arrays else "y_train"
            raise ValueError(
                f"{path}: y_{part} has the label {unknown[0]!r}, {where} has "
                f"{shortened(list(names))}"
            )
        labels = np.array([label_of[text] for text in texts], dtype=np.int64)[places]
        images = _npz_images(path, f"x_{part}", arrays[f"x_{part}"], part == "test")
        return RawSplit(images, labels.reshape(-1), array=f"{path}: x_{part}")

    return RawSource(tuple(names.values()), split_of("train"), split_of("test"), tuple(names))


def _npz_arrays(path: Path, keys: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those of these arrays that the file has, and the names of all that it has.

    ValueError if it, or one of them, is damaged.
    """
    if path.is_dir() or not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not an npz file, as numpy.savez writes it")
    try:
        with np.load(path) as file:
            return {key: file[key] for key in keys if key in file}, list(file.files)
    except Exception as error:  # those of zipfile and zlib, and MemoryError for a damaged header
        raise ValueError(f"{path}: not a readable npz file: {one_line(error)}") from error


def grouped_npz(path: Path, name: str, raw: RawSource) -> RawSource:
    """The groups in the arrays NAME_train and NAME_test; without NAME the source as it is."""
    if not name:
        return raw
    arrays, _ = _npz_arrays(path, (f"{name}_train", f"{name}_test"))

    def groups_of(split: RawSplit, part: str) -> RawSplit:
        groups = arrays.get(f"{name}_{part}", np.empty(0, str) if not len(split.labels) else None)
        if groups is None or groups.shape != split.labels.shape:
            found = "missing" if groups is None else f"{groups.dtype} {list(groups.shape)}"
            raise ValueError(
                f"group-by = {name!r}: {path}: {name}_{part} is {found}; expected an entry for "
                f"each of the {num_of('image', split.labels)} of x_{part}"
            )
        return replace(split, groups=groups.astype(str))

    return replace(raw, train=groups_of(raw.train, "train"), test=groups_of(raw.test, "test"))


def label_names(texts: Sequence[object]) -> dict[str, str]:
    """The name of each label, in order: from "cat", "dog" of 0, 1; from "1=cat", "2=dog" of 1, 2.

    ValueError for a name that is empty or there twice.
    """
    given = [(text.decode() if isinstance(text, bytes) else str(text)).strip() for text in texts]
    labels = [str(label) for label in range(len(given))]
    if all("=" in text for text in given):
        labels, given = ([text.partition("=")[i].strip() for text in given] for i in (0, 2))
    names = dict(zip(labels, given, strict=True))
    if len(names) < len(given) or len(set(names.values())) < len(given) or "" in names.values():
        raise ConfigError(
            "classes",
            f"classes = {shortened(given)!r}: expected a name for each label, and each only once",
        )
    return names


def _npz_images(path: Path, key: str, x: np.ndarray, may_be_empty: bool) -> np.ndarray:
    """`x` as [N, H, W] or [N, H, W, C]."""
    try:
        return channels_last(x, may_be_empty)
    except ValueError as error:
        raise ValueError(f"{path}: {key} {error}") from error


def channels_last(x: np.ndarray, may_be_empty: bool) -> np.ndarray:
    """Images [N, H, W], [N, H, W, C] or [N, C, H, W] as one of the first two; C is less than W.

    uint8, uint16 with 1 or 3 channels, or float32. ValueError, the end of a line, for others.
    """
    is_known = x.dtype in (np.uint8, np.uint16, np.float32) and x.ndim in (3, 4)
    if not is_known or 0 in x.shape[1:] or (len(x) == 0 and not may_be_empty):
        raise ValueError(
            f"is {x.dtype} {list(x.shape)}; expected uint8, uint16 or float32 [N, H, W], "
            "[N, H, W, C] or [N, C, H, W] with at least 1 image"
        )
    if x.ndim == 4:
        first, last = x.shape[1], x.shape[3]
        if first == last or (first in (1, 3) and last in (1, 3)):
            raise ValueError(f"is {list(x.shape)}; expected an axis of channels that is shorter")
        x = x.transpose(0, 2, 3, 1) if first < last else x
    if x.dtype == np.uint16 and x.shape[3:] not in ((), (1,), (3,)):
        raise ValueError(f"is uint16 {list(x.shape)}; expected 1 or 3 channels of 16 bits")
    if x.dtype == np.float32 and not np.isfinite(x).all():
        raise ValueError("has values that are not finite")
    return x[..., 0] if x.ndim == 4 and x.shape[-1] == 1 else x
