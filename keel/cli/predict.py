"""`keel predict`: images in, classes out."""

import json
from pathlib import Path
from typing import Annotated

import typer

from keel.cli.arguments import ClientOption, JsonOption, RunArgument
from keel.interrupts import uninterrupted
from keel.saved_runs import find_run
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
        probabilities = model.of_file(str(path.expanduser()))
        best = int(probabilities.argmax())
        name, share = model.class_names[best], float(probabilities[best])
        found.append({"image": str(path), "class": name, "probability": round(share, 6)})
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        image, name = (printable(str(row[key])) for key in ("image", "class"))
        print(f"{image}\t{name}\t{row['probability']:.3f}")


def check_image(path: Path) -> None:
    """ValueError naming the file if it is missing, or training would refuse it."""
    from data.decoding import open_image

    place = path.expanduser()
    if not place.exists():
        raise ValueError(f"{path} does not exist")
    if not place.is_file() and not place.is_dir():  # a folder: `open_image`
        raise ValueError(f"{path}: not a plain file: write the image to one")  # a pipe blocks
    open_image(str(place))
