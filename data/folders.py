"""Images in folders: one folder a class in train/ and test/, and labels.csv beside them."""

import csv
import os
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.cache import files_under, is_system
from data.decoding import ImageFileError, RawSource, RawSplit, one_line
from protocol.text import num_of, printable, shortened

IMAGE_SUFFIXES = (
    ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff",
    ".webp",
)  # fmt: skip
LABELS_FILE = "labels.csv"  # beside train/ and test/; its column `path` is relative to its folder


def read_folder(path: Path) -> RawSource:
    """A test split without images where there is no folder test/, or no image in it."""
    notes: list[str] = []
    class_names = _class_folders(path / "train", notes)
    test = path / "test"
    test_names = _class_folders(test, notes) if test.exists() and any(_images_in(test)) else []
    unknown = sorted(set(test_names) - set(class_names))
    if unknown:
        reason = f"this class is not in train/, which has {', '.join(class_names)}"
        raise ImageFileError(f"{test / unknown[0]}: {reason}", f"a folder in test/: {reason}")
    return RawSource(
        tuple(class_names),
        labelled_images(path / "train", class_names, class_names, notes),
        labelled_images(test, test_names, class_names, notes),
        notes=notes,
    )


def _class_folders(folder: Path, notes: list[str]) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder with one folder per class")
    entries = [f for f in folder.iterdir() if not is_system(f.name)]
    names = sorted(f.name for f in entries if f.is_dir())
    loose = {f.name for f in entries if f.suffix.lower() in IMAGE_SUFFIXES} - set(names)
    if loose:
        notes.append(
            f"{folder}: images outside the class folders are not read: {len(loose)}, such as "
            f"{printable(min(loose))}"
        )
    if not names:
        raise ValueError(f"{folder} is empty; expected one folder of images per class")
    for name in names:
        # Cs: no UTF-8; the others break lines
        if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
            raise ValueError(
                f"{folder} has the class {name!r}: rename it without line breaks and control "
                "characters, in UTF-8"
            )
    return names


def _images_in(folder: Path) -> list[str]:
    return [f for f in files_under(folder) if os.path.splitext(f)[1].lower() in IMAGE_SUFFIXES]


def labelled_images(
    folder: Path, present: list[str], class_names: list[str], notes: list[str]
) -> RawSplit:
    """The images at or below folder/<class> for each class in `present`.

    notes: gets a line for files of a class that are not read, and for images in its subfolders.
    """
    files: list[str] = []
    labels: list[int] = []
    for class_name in present:
        place = folder / class_name
        images = _images_in(place)
        if not images:
            reason = f"has no images; expected files ending in one of {', '.join(IMAGE_SUFFIXES)}"
            raise ImageFileError(f"{place} {reason}", f"a folder of a class {reason}")
        if others := sorted(set(files_under(place)) - set(images)):
            notes.append(
                f"{place}: files that are not read: {len(others)}, such as "
                f"{printable(os.path.basename(others[0]))}; expected the endings "
                f"{', '.join(IMAGE_SUFFIXES)}"
            )
        if inner := Counter(top for f in images if (top := _subfolder(f, place))):
            counts = [f"{printable(name)} ({num})" for name, num in sorted(inner.items())]
            notes.append(
                f"{place}: {inner.total()} of {num_of('image', images)} of this class are in "
                f"subfolders: {shortened(counts)}"
            )
        files += images
        labels += [class_names.index(class_name)] * len(images)
    return RawSplit(files, np.array(labels, dtype=np.int64))


def _subfolder(file: str, folder: Path) -> str:
    """The folder directly below `folder` that the file is in; "" if it is in `folder` itself."""
    first, separator, _ = os.path.relpath(file, folder).partition(os.sep)
    return first if separator else ""


def _label_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and rows of labels.csv; none where there is no such file.

    ValueError naming the file if it is no text in UTF-8.
    """
    file = path / LABELS_FILE
    if not file.exists():
        return [], []
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            table = csv.DictReader(opened, restval="")
            rows = [row | {"path": _normal(row["path"])} for row in table if "path" in row]
            return list(table.fieldnames or ()), rows
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: not a table in UTF-8: {one_line(error)}") from error


def _normal(path: str) -> str:
    return os.path.normpath(path.strip().replace("\\", "/"))


def grouped_folder(path: Path, column: str, raw: RawSource) -> RawSource:
    """The groups in a column of labels.csv, which has a row for each image.

    column: "" adds a note if there is such a column. ValueError naming an image with two groups.
    """
    file = path / LABELS_FILE
    found, rows = _label_table(path)
    if not column:
        if others := [each for each in found if each not in ("path", "label")]:
            raw.notes.append(
                f"{file} has the column {printable(others[0])}, which group-by does not name: "
                "images of one of its values may be in train and test"
            )
        return raw
    if lacks := {"path", column} - set(found):
        raise ValueError(
            f"group-by = {column!r}: {file} has no column {min(lacks)!r}: it has "
            f"{', '.join(found) or 'none'}"
        )
    group_of: dict[str, str] = {}
    for row in rows:
        image, group = row["path"], row[column].strip()
        if group_of.setdefault(image, group) != group:
            raise ValueError(
                f"group-by = {column!r}: {file}: {image} is in {group_of[image]!r} and in {group!r}"
            )

    def groups_of(split: RawSplit) -> RawSplit:
        found = [group_of.get(os.path.relpath(image, path)) for image in split.images]
        for image, group in zip(split.images, found, strict=True):
            if not group:
                lack = f"has no value of {column!r} in {LABELS_FILE}"
                raise ImageFileError(f"{image} {lack}", f"an image {lack}")
        return replace(split, groups=np.array(found, dtype=str))

    return replace(raw, train=groups_of(raw.train), test=groups_of(raw.test))
