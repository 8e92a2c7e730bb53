"""The Python API: start runs and read their results.

import keel
run = keel.run({"fedcka.mu": 5}, method="fedcka", num_rounds=5, clients=10)
run.history          # a pandas DataFrame if pandas is installed, else a list of dicts
run.model().predict(images)
"""

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.saved_runs import SavedRun, find_run
from protocol.code import is_installed
from protocol.config import default_config, keel_version
from protocol.options import CommandOptionError, ConfigError, OptionValue

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from keel.client_data import ClientData
    from server_app.load_model import TrainedModel

__version__ = keel_version()


class Run:
    """A run directory: its config, its history, its model. Returned by `run` and `load_run`.

    Each file is read once: to see new rounds of a run in progress, load it again.
    """

    def __init__(self, directory: str | Path) -> None:
        self._saved = SavedRun(Path(directory))

    def __repr__(self) -> str:
        return (
            f"<keel.Run {self.directory.name}: {self.state} after round {self._saved.last_round}>"
        )

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._saved.directory

    @property
    def state(self) -> str:
        """finished, stopped, running, interrupted, or why the run failed or cannot be read."""
        return self._saved.state

    @property
    def config(self) -> dict[str, OptionValue]:
        """Every config key with its value."""
        return dict(self._saved.config)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: state, accuracies, seconds, bytes."""
        return dict(self._saved.summary)

    @property
    def history(self) -> Any:
        """One row per round, as flat columns such as `accuracy/global.accuracy`.

        A pandas DataFrame with the round as its index if pandas is installed, else a list of dicts.
        """
        rows = self._saved.rows()
        if not is_installed("pandas"):
            return rows
        import pandas  # type: ignore[import-untyped,unused-ignore]

        return pandas.DataFrame(rows).set_index("round") if rows else pandas.DataFrame()

    def model(self, client: str = "") -> "TrainedModel":
        """The final global model, or the personal model of a client, as `load_model` has it."""
        return load_model(self.directory, client)

    def confusion(self, which: str = "last") -> Any:
        """The global model's confusion matrix on the test set, of the "last" or the "best" round.

        A pandas DataFrame: a row for each label, a column for each predicted class.
        """
        import pandas

        found = self._saved.confusion(which) if which in ("last", "best") else None
        if found is None:
            raise ValueError(
                f"which = {which!r}: expected last or best, of a run with a global model on a "
                "test set"
            )
        _, classes, matrix = found
        return pandas.DataFrame(matrix, index=classes, columns=classes)

    def client_data(self, client: str) -> "ClientData":
        """The samples of a simulated client, `.train` and `.test`, each with `.images`, `.labels`.

        `test` is its local test part, on which its personal model is evaluated.
        """
        from keel.client_data import client_data

        return client_data(self._saved, client)

    def plot(self) -> "Figure":
        """Accuracy over rounds as a matplotlib figure, which a notebook shows."""
        import matplotlib.pyplot  # noqa: F401  # tells a notebook how to show a figure

        from server_app.history import CURVES, curve
        from server_app.plots import accuracy_figure, scores_of

        history, config = self._saved.history, self._saved.config
        curves = [(text, curve(history, key, name)) for key, name, text in CURVES]
        title = f"{config['method']}, {self._saved.source}, {config['model']}"
        return accuracy_figure(curves, title, scores=scores_of(history))


def run(
    config: Mapping[str, Any] | None = None,
    *,
    clients: int | None = None,
    engine: str = "inline",
    cpus_per_client: float | None = None,
    gpus_per_client: float | None = None,
    ray: str | None = None,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Train, and return the finished run.

    Parameters
    ----------
    config
        Config keys and values, such as ``{"method": "fedcka", "fedcka.mu": 5}``. Method, model,
        source and partition may be your own: an object, such as ``method=FedPull(mu=0.3)``, or
        where to find it, ``"mine.py:FedPull"`` or ``"my_package.pull:FedPull"``.
    clients
        Number of simulated clients. Default: num-clients of the config, else 10.
    engine
        "inline": in this process; runs in several threads take turns. "flower": Flower's
        simulation, with several workers.
    cpus_per_client, gpus_per_client
        CPUs and GPUs per worker of the flower engine.
    ray
        "HOST:PORT" of a Ray cluster that this machine is part of, for the flower engine.
    quiet
        Print nothing.
    keys
        More config keys, with underscores for hyphens: ``num_rounds=5``.

    Raises
    ------
    ValueError
        One line, before anything is trained, if the config is not valid or does not fit the data.
    FileNotFoundError
        One line, before anything is trained, if files of the data set are missing.
    RuntimeError
        If the run failed; its directory remains.
    KeyboardInterrupt
        If the run was interrupted; it can be resumed with ``resume="<run directory>"``.
    """
    from keel.engine import run as run_on_engine
    from keel.job import Engine, EngineOptions
    from keel.own_objects import with_specs

    overrides, own = with_specs(_merged(config, keys))
    if engine not in ("inline", "flower"):
        raise ValueError(
            f"engine = {engine!r}: expected inline or flower; `keel run` offers deployment"
        )
    try:
        options = EngineOptions(
            Engine(engine), _plain(clients), _plain(cpus_per_client), _plain(gpus_per_client),
            ray=ray,
        )  # fmt: skip
        saved = run_on_engine(overrides, options, quiet, own=own)
    except CommandOptionError as error:
        raise ValueError(f"{error.name} {error.fault}") from None
    assert saved is not None
    return Run(saved.directory)


def load_run(run: str | Path | Run = "") -> Run:
    """Read a run directory.

    Parameters
    ----------
    run
        Path, name, or beginning of a name; a Run, which is read again; "": the run that changed
        last.

    Raises
    ------
    ValueError
        One line, if there is no such run.
    """
    return Run(find_run(run.directory if isinstance(run, Run) else run).directory)


def load_model(run: "str | Path | Run", client: str = "") -> "TrainedModel":
    """A run's final global model, or the personal model of one of its clients.

    Parameters
    ----------
    run
        As for `load_run`.
    client
        Name of a client, such as ``"client-0000"``, for its personal model. "": the global model.

    Returns
    -------
    TrainedModel
        ``model.predict(images)`` takes uint8 images [N, H, W], [N, H, W, C] or [N, C, H, W] of any
        size and returns class names.

    Raises
    ------
    ValueError
        One line, if the run has no such model or no finished round.
    """
    from server_app.load_model import load_model as load

    if isinstance(run, Run):
        run = run.directory
    return load(find_run(run).directory, client)


def _merged(config: Mapping[str, Any] | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; ConfigError for one that is set twice."""
    merged, known = dict(config or {}), default_config().keys()
    for name, value in keys.items():
        key = name.replace("_", "-")
        key = key if key in known else name  # as it was written, for the error
        if key in merged:
            raise ConfigError(key, f"{key} is set twice")
        merged[key] = value
    return {key: _plain(value) for key, value in merged.items()}


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as Python's; a path, or a Run's, as text; anything else as it is."""
    if isinstance(value, Run):
        return str(value.directory)
    if isinstance(value, PathLike):
        return fspath(value)
    return value.item() if getattr(value, "ndim", None) == 0 else value
