"""`keel demo`: FedAvg and FedIntR on scikit-learn's digits, in one table and one plot."""

from keel.cli.compare import compare
from keel.engine import run as run_on_engine
from keel.interrupts import interruptible
from keel.job import EngineOptions
from keel.saved_runs import SavedRun
from protocol.config import keel_home
from protocol.options import OptionValue

CLIENTS = 5
METHODS: dict[str, dict[str, OptionValue]] = {
    "fedavg": {},
    "fedintr": {"fedintr.projection-width": 32},  # enough for digits; a fifth of the traffic
}
SETTING: dict[str, OptionValue] = {
    "source": "digits",
    "image-size": 28,
    "model": "cnn-fedreco",
    "partition": "dirichlet",
    "alpha": 0.3,
    "num-rounds": 10,
    "local-epochs": 3,
    "batch-size": 32,
    "lr": 0.05,
}


def demo() -> int:
    """Compare FedAvg with FedIntR on handwritten digits, in about a minute."""
    print(
        f"{CLIENTS} clients have different digits (Dirichlet split, alpha = {SETTING['alpha']}). "
        f"They train a model for\n{SETTING['num-rounds']} rounds, first with FedAvg, then with "
        "FedIntR, which adds a contrastive loss on the\nrepresentations of every layer. "
        "The setting is small enough to finish in about a minute, and each method runs\n"
        "with one seed: this shows how Keel works, not which method is better.",
        flush=True,
    )
    runs: list[SavedRun] = []
    for method, options in METHODS.items():
        print()
        hidden = {"same as", *(("data", "clients", "rounds") if runs else ())}  # the same for both
        overrides = {"method": method, **SETTING, **options}
        with interruptible():
            run = run_on_engine(overrides, EngineOptions(clients=CLIENTS), hidden=hidden)
        assert run is not None  # only a deployment has none
        runs.append(run)
    print()
    compare([str(run.directory) for run in runs], plot=keel_home() / "demo.png")
    print()
    print(verdict(runs))
    setting = " ".join(f"{key}={value}" for key, value in SETTING.items())
    setting += f" fedintr.projection-width=32 --clients {CLIENTS}"
    print(
        "\nNext:\n"
        f"  keel run method=fedintr seed=1 {setting}\n"
        "                   FedIntR on the same data and model with another seed\n"
        "  keel methods     all methods\n"
        "  keel list        these runs and all others"
    )
    return 0


def verdict(runs: list[SavedRun]) -> str:
    """The accuracies after the last round, and what they do not show."""
    final = [f"{run.config['method']} {100 * (run.accuracy or 0.0):.1f} %" for run in runs]
    return (
        f"After the last round: {', '.join(final)}. "
        "This is one seed; other seeds can change the order.\n"
        "Comparisons over several seeds, with the papers' data and models: keel experiments list"
    )
