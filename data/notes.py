"""What is unusual about a data set, but allowed: the same image twice, and blank images.

Each line is shown where the data is first used (a run's log and summary, a site's worker, the
doctor, `keel datasets`) and stays on that machine, as it may name files.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from data.decoding import RawSource
from protocol.text import num_of, printable

Place = tuple[int, int]  # (0 in train or 1 in test, number of the image there)


def blank_and_equal(
    images: Sequence[np.ndarray],
) -> tuple[list[Place], dict[bytes, list[Place]]]:
    """The places of images of one colour, and by their content those of all others."""
    blank, places = list[Place](), dict[bytes, list[Place]]()
    for part, array in enumerate(images):
        for i, pixels in enumerate(array):
            if (pixels == pixels[:, :1, :1]).all():
                blank.append((part, i))
                continue
            content = hashlib.sha256(pixels.tobytes()).digest()
            places.setdefault(content, []).append((part, i))
    return blank, places


def notes_on_images(raw: RawSource, images: Sequence[np.ndarray]) -> list[str]:
    """A line for images of one colour, for those in train and test, and for those in two classes.

    images: [N, C, H, W], as decoded, of train and test. Images of one colour are not counted as the
    same.
    """
    blank, places = blank_and_equal(images)
    splits = raw.train, raw.test

    def name(place: Place) -> str:
        part, i = place
        return printable(splits[part].name(i))

    def label(place: Place) -> int:
        part, i = place
        return int(splits[part].labels[i])

    notes = []
    if blank:
        of = f"{len(blank)} of {num_of('image', sum(map(len, images)))}"
        are = "is" if len(blank) == 1 else "are"
        notes.append(f"{of} {are} blank: all pixels are equal, as in {name(blank[0])}")
    both = [found for found in places.values() if found[0][0] != found[-1][0]]
    if both:
        num = sum(part for found in both for part, _ in found)
        notes.append(
            f"{num_of('test image is', num, 'test images are')} in train too: {name(both[0][-1])} "
            f"is the same as {name(both[0][0])}"
        )
    several = [found for found in places.values() if len({label(place) for place in found}) > 1]
    if several:
        a, b = several[0][0], next(p for p in several[0] if label(p) != label(several[0][0]))
        of_a, of_b = (printable(raw.class_names[label(place)]) for place in (a, b))
        notes.append(
            f"{num_of('image is', len(several), 'images are')} in several classes: {name(a)} in "
            f"{of_a}, {name(b)} in {of_b}"
        )
    return notes
