"""`keel predict`: images in, classes out."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.cli.arguments import ClientOption, JsonOption, RunArgument
from keel.interrupts import uninterrupted
from keel.runs import find_run
from protocol.text import printable


def predict(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...")],
    client: ClientOption = "",
    as_json: JsonOption = False,
) -> None:
    """Classify images with the final model of a run: file, class, probability."""
    directory = find_run(run).directory
    for path in images:  # before torch is imported
        check_image(path)

    with uninterrupted():
        from server_app.load_model import load_model

    model = load_model(directory, client)
    found = []
    for path in images:
        probabilities = model.probabilities(read_image(path)[None])[0]
        best = int(probabilities.argmax())
        name, share = model.class_names[best], float(probabilities[best])
        found.append({"image": str(path), "class": name, "probability": round(share, 4)})
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        image, name = (printable(str(row[key])) for key in ("image", "class"))
        print(f"{image}\t{name}\t{row['probability']:.3f}")


def check_image(path: Path) -> None:
    """ValueError naming the file if it is missing, or training would refuse it by its header."""
    from data.decoding import with_file

    if not path.expanduser().exists():
        raise ValueError(f"{path} does not exist")
    if not path.expanduser().is_file() and not path.expanduser().is_dir():  # a folder: `with_file`
        raise ValueError(f"{path}: not a plain file: write the image to one")  # a pipe blocks
    with_file(str(path.expanduser()), lambda image: None, upright=False)


def read_image(path: Path) -> Any:
    """An image as uint8 [H, W] if it is grey, else [H, W, 3], read as training reads it."""
    import numpy as np

    from data.decoding import CHANNELS_OF_MODE, with_file

    modes = {1: "L", 3: "RGB"}
    return with_file(
        str(path.expanduser()),
        lambda image: np.array(image.convert(modes[CHANNELS_OF_MODE[image.mode]])),
    )
