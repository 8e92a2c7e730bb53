"""`keel demo`: FedAvg and FedIntR on scikit-learn's digits, in one table and one plot."""

from keel.cli.run import EngineOptions, execute
from keel.cli.runs import compare
from keel.runs import SavedRun
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
    "alpha": 0.05,
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
        "FedIntR, which adds a contrastive loss on the\nrepresentations of every layer.",
        flush=True,
    )
    runs = []
    for method, options in METHODS.items():
        print()
        run = execute({"method": method, **SETTING, **options}, EngineOptions(clients=CLIENTS))
        assert run is not None  # only a deployment has none
        runs.append(run)
    print()
    compare([str(run.directory) for run in runs], plot=keel_home() / "demo.png")
    print()
    print(verdict(runs))
    print(
        "\nNext:\n"
        "  keel run method=fedintr alpha=0.5   another split; other keys at their defaults\n"
        "  keel methods                        all methods\n"
        "  keel list                           these runs and all others"
    )
    return 0


def verdict(runs: list[SavedRun]) -> str:
    """Which run has the higher accuracy after the last round, and a caveat."""
    accuracy = {run.config["method"]: 100 * (run.accuracy or 0.0) for run in runs}
    ahead, behind = sorted(accuracy, key=lambda method: -accuracy[method])
    return (
        f"After the last round {ahead} is {accuracy[ahead] - accuracy[behind]:.1f} points ahead of "
        f"{behind} ({accuracy[ahead]:.1f} % against {accuracy[behind]:.1f} %).\n"
        "This is one seed on a small data set; another seed (seed=1) may reverse the order."
    )
