"""Measure the representations of a finished run's saved models."""

import json
import logging
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from client_app.networks import placed
from client_app.setup import build_network, device_or_cpu, open_source
from models import StagedModel
from protocol.arrays import Arrays, mismatch
from protocol.files import VERSION_NAME, digest, write_atomically
from protocol.text import in_one_line, shortened
from server_app.diagnostics.comparison import Comparison, chosen_diagnostics, probe_of
from server_app.diagnostics.plots import plot_models
from server_app.load_model import NoPersonalModel, check_is_as_written, check_rounds, read_model
from server_app.record import finite_or_null
from server_app.run_directory import read_arrays
from server_app.run_reader import MODEL_FILE, RunReader

log = logging.getLogger("keel.server")

NO_MODELS = "no client of the run stores a model; name a checkpoint or a model.safetensors"


def write_diagnostics(
    run_dir: Path, models: Sequence[str], names: str, num_samples: int, output: Path
) -> None:
    """Measure and write; ValueError where the run, models or names do not fit.

    names: "all", or comma-separated names of DIAGNOSTICS.
    """
    chosen = chosen_diagnostics(names)
    if num_samples < 2:
        raise ValueError(f"--samples = {num_samples}: expected at least 2")
    if output.exists():
        raise ValueError(f"{output} exists and is not overwritten: give another --output")
    run, path = RunReader(run_dir), run_dir / MODEL_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the run has not ended, or it was removed")
    check_rounds(run)
    check_is_as_written(path, run.manifest)
    config = run.run_config
    source = open_source(config)
    device, absent = device_or_cpu(config.train.device)
    if absent:
        log.warning("%s: measured on the CPU", absent)

    @cache
    def network(name: str) -> StagedModel:
        shape, num_classes = source.image_shape, source.num_classes
        return placed(build_network(config, shape, num_classes, name), device)

    w_g, about_g = read_arrays(path)
    data = {
        "shape": ",".join(map(str, source.image_shape)),
        "classes": "\n".join(source.class_names),
    }
    for key, found in data.items():
        if found != about_g[key]:
            raise ValueError(
                f"{source.name} has changed since the run: {key} = {in_one_line(found, 100)!r}, "
                f"the run's was {in_one_line(about_g[key], 100)!r}: restore its files"
            )
    probe = probe_of(config, source, device, num_samples)
    comparison = Comparison(chosen, probe, network, config.model.model, w_g)
    subjects = list(models) or clients_with_models(run)
    for model in subjects:
        architecture, arrays = saved_model(run, model)
        architecture = architecture or config.model.model
        expected = network(architecture).state_dict()
        expected = {name: array for name, array in expected.items() if name in arrays}
        if wrong := mismatch(arrays, expected, with_values=False):
            raise ValueError(f"{model} does not fit the run's {architecture}: {wrong}")
        comparison.add(model, architecture, arrays)
    numbers = comparison.numbers()
    if not numbers:
        which = f"of {shortened(subjects)}" if subjects else NO_MODELS
        raise ValueError(
            f"--only {names}: none of these can be measured: {which}: cka-clients needs two "
            "models, cka-global and drift need one and a global model"
        )
    if not subjects:
        log.warning("%s: only the global model is measured: %s", run_dir, NO_MODELS)
    about = {
        "run": str(run_dir),
        "models": subjects,
        "probe": {"source": config.data.source, "samples": len(probe)},
        "diagnostics": numbers,
    }
    output.mkdir(parents=True)
    text = json.dumps(finite_or_null(about), indent=2, allow_nan=False)
    title = f"{config.rounds.method}, {config.data.source}, {config.model.model}"
    try:
        write_atomically(output / "numbers.json", text.encode())
        plot_models(numbers, title, output)
    except BaseException:  # a full disk or Ctrl-C: the directory would refuse the next call
        shutil.rmtree(output, ignore_errors=True)
        raise


def clients_with_models(run: RunReader) -> list[str]:
    """The clients of the run that store a model. ValueError if one cannot be read."""
    found = []
    for path in sorted((run.directory / "clients").glob("*")):
        try:
            read_model(run, client=path.name)
        except NoPersonalModel:
            continue
        found.append(path.name)
    return found


def saved_model(run: RunReader, model: str) -> tuple[str, Arrays]:
    """(architecture, arrays) of a client's model or of a file; of a file, "": the run's.

    ValueError if there is no such model.
    """
    folder = run.directory / "clients"
    if (folder / model).is_dir():
        network = read_model(run, client=model).network
        return network.name, network.state_dict()
    path = Path(model).expanduser()
    if not path.is_file():
        raise ValueError(f"{model!r} is neither a client with state in {folder} nor a file")
    if path.name == MODEL_FILE:
        check_is_as_written(path, RunReader(path.parent).manifest)
    elif VERSION_NAME.fullmatch(path.name) and digest(path.read_bytes()) not in path.name:
        raise ValueError(f"{path} is damaged: its content does not have the digest in its name")
    try:
        arrays = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or not a safetensors file: {error}") from error
    # checkpoints and client states hold other arrays too
    of_model = {k.removeprefix("model/"): v for k, v in arrays.items() if k.startswith("model/")}
    return "", of_model or arrays
