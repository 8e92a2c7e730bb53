"""`keel demo`: FedAvg and FedRCL on scikit-learn's digits over three seeds."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from keel.engine import run as run_on_engine
from keel.interrupts import interruptible
from keel.job import EngineOptions
from keel.saved_runs import SavedRun
from keel.tables import print_table
from protocol.config import keel_home
from protocol.files import private_files
from protocol.options import OptionValue
from server_app.history import curve

CLIENTS = 10
SEEDS = (0, 1, 2)
METHODS = ("fedavg", "fedrcl")
SETTING: dict[str, OptionValue] = {
    "source": "digits",
    "image-size": 16,
    "model": "cnn-fedreco",
    "partition": "dirichlet",
    "alpha": 0.1,
    "min-samples": 10,
    "num-rounds": 10,
    "local-epochs": 3,
    "batch-size": 32,
    "lr": 0.02,
    "evaluate-clients": "all",
    "local-test-fraction": 0.2,
}
# curves, with what they are in words; the worst tenth of ten clients is the worst one
SCORES = {
    "global.accuracy": "test set",
    "local_global.worst_decile": "worst client's data",
}
Finals = Mapping[str, Sequence[float]]  # percent after the last round, by method and seed


def demo() -> int:
    """Compare FedAvg with FedRCL on handwritten digits over three seeds, in under a minute."""
    print(
        f"{CLIENTS} clients have different digits (Dir({SETTING['alpha']})). They train a small "
        f"network for {SETTING['num-rounds']} rounds, with FedAvg and with\nFedRCL, which adds a "
        "contrastive loss on the representations of every layer. Each method runs with three "
        "seeds.\n",
        flush=True,
    )
    runs: dict[str, list[SavedRun]] = {method: [] for method in METHODS}
    for seed in SEEDS:
        for method in METHODS:
            runs[method].append(trained(method, seed))
    finals = {of: finals_of(runs, of) for of in SCORES}
    print()
    columns = {"accuracy (%)": [*METHODS, "difference"]}
    columns |= {title: cells_of(finals[of]) for of, title in SCORES.items()}
    print_table(columns, list(columns)[1:])
    print(
        "Mean ± standard deviation over the seeds, after the last round. The setting was chosen to "
        "show a difference;\nin longer runs and other settings it can be smaller or reversed."
    )
    for of, title in SCORES.items():
        print(verdict(finals[of], title))
    print(f"\nplot: {plotted([run for some in runs.values() for run in some])}")
    setting = " ".join(f"{key}={value}" for key, value in SETTING.items())
    print(
        "\nNext:\n"
        "  keel ui          these runs in a browser; tick them for curves with bands\n"
        "  keel methods     all methods\n"
        f"  keel run method=fedntd {setting} --clients {CLIENTS}\n"
        "                   another method in the same setting"
    )
    return 0


def trained(method: str, seed: int) -> SavedRun:
    """A finished run of the demo, announced in one line."""
    start = time.monotonic()
    overrides = {"method": method, "seed": seed, **SETTING}
    with interruptible():
        run = run_on_engine(overrides, EngineOptions(clients=CLIENTS), quiet=True)
    assert run is not None  # only a deployment has none
    accuracy = 100 * (run.accuracy or 0.0)
    seconds = time.monotonic() - start
    print(f"{method}, seed {seed}: {accuracy:.1f} %  {seconds:.0f} s  {run.directory}", flush=True)
    return run


def finals_of(runs: Mapping[str, Sequence[SavedRun]], of: str) -> Finals:
    """One of SCORES after the last round."""
    key, _, name = of.partition(".")
    return {
        method: [100 * curve(run.history, key, name)[-1][1] for run in some]
        for method, some in runs.items()
    }


def differences_of(finals: Finals) -> list[float]:
    """The second method minus the first, by seed."""
    return [ours - theirs for theirs, ours in zip(*finals.values(), strict=True)]


def cells_of(finals: Finals) -> list[str]:
    """Mean and standard deviation over seeds: of both methods, then of their difference."""
    cells = [f"{fmean(each):.1f} ± {stdev(each):.1f}" for each in finals.values()]
    differences = differences_of(finals)
    return [*cells, f"{fmean(differences):+.1f} ± {stdev(differences):.1f}"]


def is_decided(finals: Finals) -> bool:
    """Whether the 95 % t interval of the difference excludes 0."""
    from keel.experiments.claims import interval_of  # imports scipy

    interval = interval_of(differences_of(finals))
    return interval is not None and (interval[0] > 0 or interval[1] < 0)


def verdict(finals: Finals, title: str) -> str:
    """In how many seeds the second method is ahead, and whether that decides anything."""
    num_ahead = sum(each > 0 for each in differences_of(finals))
    decided = "excludes 0" if is_decided(finals) else "contains 0, so this decides nothing"
    return (
        f"On the {title}, {METHODS[1]} is ahead in {num_ahead} of {len(SEEDS)} seeds; the 95 % "
        f"interval {decided}."
    )


def plotted(runs: Sequence[SavedRun]) -> Path:
    """Draw each score over rounds, the mean of each method with its range; returns the picture."""
    from data.plots import save_png  # these import more than the other functions need
    from keel.results import bands
    from server_app.plots import band_figure

    panels = {
        f"accuracy, {title}": list(bands(runs, ["method"], of, "range"))
        for of, title in SCORES.items()
    }
    path = keel_home() / "demo.png"
    with private_files():
        save_png(band_figure(panels), path)
    return path
