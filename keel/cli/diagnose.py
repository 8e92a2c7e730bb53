"""Diagnostics of a run's saved models: `python -m keel.cli.diagnose RUN_FOLDER [MODEL...]`.

A MODEL is a client's name (the model that it keeps) or a file: a checkpoint of the run, or another
run's model.safetensors. Without any, all clients that keep a model. They are compared with the
run's final global model, or as much of one as there is. Writes numbers.json, cka.png, features.png.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from client_app.setup import build_network, device_for, open_source
from models import StagedModel
from protocol.config import config_from_json, default_config
from protocol.files import write_atomically
from protocol.messages import Arrays
from server_app.diagnostics.comparison import (
    DIAGNOSTICS,
    NUM_PROBE_SAMPLES,
    Comparison,
    chosen_diagnostics,
    probe_of,
)
from server_app.diagnostics.plots import plot_models
from server_app.history import finite_or_null
from server_app.run_directory import read_arrays
from server_app.trained import load_model


def clients_with_models(folder: Path) -> list[str]:
    """The clients of the run whose own model can be loaded."""
    found = []
    for path in sorted((folder / "clients").glob("*")):
        try:
            load_model(folder, client=path.name)
        except ValueError:
            continue
        found.append(path.name)
    return found


def saved_model(folder: Path, model: str) -> tuple[str, Arrays]:
    """(architecture, arrays) of a client's model, or of a file; architecture "" there: the run's.

    ValueError, one line, where there is no such model.
    """
    if (folder / "clients" / model).is_dir():
        network = load_model(folder, client=model).network
        return network.name, network.state_dict()
    path = Path(model).expanduser()
    if not path.is_file():
        raise ValueError(
            f"{model!r} is neither a client with state in {folder / 'clients'} nor a file"
        )
    try:
        arrays = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from error
    # a checkpoint, or a client's file, holds more than a model
    model_alone = {k.removeprefix("model/"): v for k, v in arrays.items() if k.startswith("model/")}
    return "", model_alone or arrays


def diagnose(folder: Path, models: Sequence[str], names: str, samples: int, output: Path) -> None:
    """Measure and write; ValueError, one line, where folder, models or names do not fit."""
    chosen = chosen_diagnostics(names)
    if samples < 2:
        raise ValueError(f"--samples = {samples}: it has to be at least 2")
    if output.exists():
        raise ValueError(f"{output} exists: nothing is overwritten; give another --output")
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder} has no model.safetensors: it is not a finished run's folder")
    kept = json.loads((folder / "config.json").read_text())["config"]
    config = config_from_json(json.dumps(default_config() | kept))
    source = open_source(config)
    device = device_for(config.train.device)
    networks: dict[str, StagedModel] = {}

    def network(name: str) -> StagedModel:
        if name not in networks:
            shape, num_classes = source.image_shape, source.num_classes
            networks[name] = build_network(config, shape, num_classes, name).to(device)
        return networks[name]

    w_g, _ = read_arrays(folder / "model.safetensors")
    probe = probe_of(config, source, device, samples)
    comparison = Comparison(chosen, probe, network, config.model.model, w_g)
    subjects = list(models) or clients_with_models(folder)
    for model in subjects:
        architecture, arrays = saved_model(folder, model)
        architecture = architecture or config.model.model
        refuse_strange(model, arrays, network(architecture))
        comparison.add(model, architecture, arrays)
    numbers = comparison.numbers()
    about = {
        "run": str(folder),
        "models": subjects,
        "probe": {"source": config.data.source, "samples": len(probe)},
        "diagnostics": numbers,
    }
    output.mkdir(parents=True)
    text = json.dumps(finite_or_null(about), indent=2, allow_nan=False)
    write_atomically(output / "numbers.json", text.encode())
    title = f"{config.rounds.method}, {config.data.source}, {config.model.model}"
    plot_models(numbers, title, output)


def refuse_strange(model: str, arrays: Arrays, network: StagedModel) -> None:
    """ValueError if these arrays are not of this network."""
    expected = network.state_dict()
    for name, array in arrays.items():
        want = list(expected[name].shape) if name in expected else "not there"
        if want != list(array.shape):
            raise ValueError(
                f"{model}: array {name!r} is {list(array.shape)}, in the run's {network.name} it "
                f"is {want}"
            )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m keel.cli.diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("models", metavar="MODEL", nargs="*")
    parser.add_argument("--only", default="all", help=f"of {', '.join(DIAGNOSTICS)}; default all")
    parser.add_argument("--samples", type=int, default=NUM_PROBE_SAMPLES, help="of the test set")
    parser.add_argument("--output", type=Path, help="default RUN_FOLDER/diagnostics-models")
    given = parser.parse_args()
    folder = given.folder.expanduser().absolute()
    output = (given.output or folder / "diagnostics-models").expanduser().absolute()
    try:
        diagnose(folder, given.models, given.only, given.samples, output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
