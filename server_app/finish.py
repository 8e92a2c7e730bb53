"""The end of a run: its final model, summary, manifest and pictures."""

import logging
from collections.abc import Sequence
from typing import Any

from client_app.setup import pixels_of
from protocol.arrays import Arrays
from protocol.code import line_in_method
from protocol.privacy import privacy_statement
from protocol.ray_nodes import devices_by_node
from server_app.diagnostics.plots import plot_rounds
from server_app.history import Line
from server_app.observers import RunInfo
from server_app.report import Reporter, plot_split
from server_app.run_directory import save_arrays
from server_app.run_reader import RunReader
from server_app.start import Run
from strategies.average import TooFewRepliesError

log = logging.getLogger("keel.server")


class DivergedError(RuntimeError):
    """The global arrays are no longer finite."""


def status_after(error: BaseException) -> str:
    """The status of a run that this error ends."""
    if isinstance(error, TooFewRepliesError | DivergedError):
        return f"failed: {error}"
    if isinstance(error, Exception):
        place = line_in_method(error)
        return " ".join(f"failed: {type(error).__name__}: {error}{place}".split())
    return "stopped"


def finish_run(run: Run, reporter: Reporter, final: Arrays, status: str) -> None:
    """Complete the run directory, then tell the observers. final: the last round's arrays."""
    try:
        complete_directory(run, reporter, final, status)
    except OSError as error:  # such as a full disk, which may be what ended the run
        if status == "finished":
            raise
        log.warning("the end of the run is incomplete: %s", error)
    finally:  # last: an observer may raise
        reporter.tell_end()


def complete_directory(run: Run, reporter: Reporter, final: Arrays, status: str) -> None:
    """Write the final model, summary, manifest and pictures; remove the state of a finished run."""
    method, path = run.experiment.method, run.directory.path
    try:
        if method.has_global_model:  # arrays that are never sent keep their initial values
            final = run.experiment.initial_weights | final
        save_arrays(path / "model.safetensors", final, model_metadata(run))
        plot_split(run.clients.shown, run.experiment.source, path / "labels.png")
    except BaseException as error:
        if status == "finished":
            status = status_after(error)
        raise
    finally:
        reporter.finish(status)
        run.audit.note("ended", status=status)
    removes_state = status == "finished" and not run.config.rounds.keep_state
    last_round = max(run.start.round, len(reporter.history))
    run.directory.finish(last_round, removes_state, method.is_personal)
    if run.monitor:
        plot_rounds(reporter.history, reporter.info.title, path / "diagnostics")


def info_of(run: Run, history: Sequence[Line]) -> RunInfo:
    """What the observers are told at the start."""
    config, experiment = run.config, run.experiment
    source = experiment.source
    return RunInfo(
        directory=run.directory.path,
        method=config.rounds.method,
        server_optimizer=config.rounds.server_optimizer,
        source=config.data.source,
        num_train=run.clients.num_train,
        num_test=len(source.test.labels),
        image_shape=source.image_shape,
        num_classes=source.num_classes,
        model=config.model.model,
        num_parameters=sum(parameter.numel() for parameter in experiment.model.parameters()),
        num_clients=run.clients.num,
        clients_per_round=len(experiment.strategy.cohort.sample(1)),
        num_rounds=config.rounds.num_rounds,
        history=tuple(history),
        config=RunReader(run.directory.path).config,  # in which num-clients is set
        workers=tuple(
            f"{host}: {devices}"
            for host, devices in devices_by_node(
                (machine.host, machine.device) for machine in run.pool.machines
            ).items()
        ),
        device=str(next(experiment.model.parameters()).device),
    )


def model_metadata(run: Run) -> dict[str, str]:
    """Metadata of model.safetensors: enough to build and use the model without the data."""
    source, config, clients = run.experiment.source, run.config, run.clients
    pixels = pixels_of(config, source)
    if len(clients.shown) < clients.num:
        others = {"client-models": ",".join(config.client_models)}
    else:
        pairs = sorted((e.client, e.model) for e in clients.shown if e.model != config.model.model)
        others = {f"model of {client}": model for client, model in pairs}
    return others | {
        "shape": ",".join(map(str, source.image_shape)),
        "classes": "\n".join(source.class_names),
        "mean": ",".join(map(str, pixels.mean)),
        "std": ",".join(map(str, pixels.std)),
    }


def privacy_spent(run: Run) -> dict[str, Any] | None:
    """The privacy statement for the client with the most releases; None without privacy."""
    privacy = run.config.privacy
    if not privacy.epsilon:
        return None
    num_entries = sum(array.numel() for array in run.start.arrays.values())
    releases = max(run.audit.releases.values(), default=0)
    reads_state = run.monitor is not None and run.experiment.method.is_stateful
    return privacy_statement(privacy, num_entries, releases, reads_state)
