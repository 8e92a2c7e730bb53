"""Names in messages: those of clients, and the one sanitiser of all other text from them."""

import re
from collections.abc import Sequence, Sized

MAX_SHOWN_LABELS = 50
CLIENT_NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', not dots alone"
_client_name = re.compile(r"(?!\.+\Z)[A-Za-z0-9._-]{1,64}")
_ansi = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_look_alikes = str.maketrans("<>", "‹›")  # HTML's brackets
_markup = re.compile(r"\[(?=[a-z#/@])")  # the start of a tag of the terminal library (rich)


def in_one_line(text: object, max_length: int = 300) -> str:
    """Text from a client, fit for any output: one line without markup, at most `max_length` long.

    ANSI sequences, control and bidirectional characters, surrogates and newlines become spaces;
    '<' and '>' become '‹' and '›', and '[' at the start of a tag becomes '('.
    """
    line = _ansi.sub(" ", str(text)[: 20 * max_length])
    line = " ".join(printable(line).split())
    line = _markup.sub("(", line.translate(_look_alikes))
    return line if len(line) <= max_length else f"{line[: max_length - 1].rstrip()}…"


def printable(text: str) -> str:
    """The text with a space for each control and bidirectional character and each surrogate."""
    return "".join(c if c.isprintable() else " " for c in text)


def is_client_name(name: object) -> bool:
    """Whether this can name a client: in a log, in a path and in a page."""
    return isinstance(name, str) and _client_name.fullmatch(name) is not None


def check_client_name(name: object) -> str:
    """The name. ValueError, one line, if it breaks the rule."""
    if not is_client_name(name):
        raise ValueError(f"client name {in_one_line(name, 80)!r}: expected {CLIENT_NAME_RULE}")
    return str(name)


def num_of(noun: str, things: Sized | float, plural: str = "") -> str:
    """How many there are, with the noun: `1 run`, `2 runs`, `0.5 seconds`.

    plural: of the noun, if not with an "s" at its end.
    """
    num = len(things) if isinstance(things, Sized) else things
    text = f"{num:g}" if isinstance(num, float) else str(num)
    return f"{text} {noun if num == 1 else plural or noun + 's'}"


def labels_text(own_labels: Sequence[str], names: Sequence[str], counts: Sequence[int]) -> str:
    """What a client's labels mean, with the samples of each: `1 = cat (30), dog (0)`.

    own_labels: what the client calls each of `names`; "" for one that it lacks.
    """
    parts = [
        f"{own} = {name} ({count})" if own not in (name, "") else f"{name} ({count})"
        for own, name, count in zip(own_labels, names, counts, strict=True)
    ]
    more = f", and {len(parts) - MAX_SHOWN_LABELS} more" if len(parts) > MAX_SHOWN_LABELS else ""
    return printable(", ".join(parts[:MAX_SHOWN_LABELS]) + more)


def size_of_data(num_train: int, num_test: int, shape: Sequence[int], num_classes: int) -> str:
    """The numbers of images, their shape and the number of classes, in words."""
    noun = "image" if num_test == 1 else "images"
    images = f"{num_train:,} training and {num_test:,} test {noun}"
    return f"{images}, {' x '.join(map(str, shape))}, {num_of('class', num_classes, 'classes')}"


def shortened(names: Sequence[str]) -> str:
    """The first five names, separated by commas, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
