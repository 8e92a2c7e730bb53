"""`keel new-method`: the files of a new method, a complete example to change.

The templates below are the files as they are written; FedNew, fednew and fed-new stand for the
class, the file and the method's name.
"""

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from protocol.catalogue import method_names, method_stem
from protocol.config import app_folder, default_config

CLIENT_HALF = '''"""FedNew: keep the features close to the global model's (client side).

Source: <authors>, "<title>", <venue>, <arXiv number>. Equation numbers refer to it.
Aggregation: weighted average. Client state: none.
Symbols: z, z_g [B, d] features (the classifier's input) of the local and of the global model.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from client_app.objective import Batch, LocalObjective
from models import StagedModel
from protocol.options import at_least, option


def feature_distance(z: Tensor, z_g: Tensor) -> Tensor:
    """||z - z_g||^2, eq. (1): a scalar, the mean over the batch of the sum over features.

    z, z_g: [B, d], features of the same samples. Gradients flow through `z` only.
    """
    return (z - z_g.detach()).square().sum(1).mean()


@dataclass(frozen=True)
class FedNew(LocalObjective):
    """Features pulled towards the global model's."""

    uses_global: ClassVar[bool] = True
    paper: ClassVar[str] = "<authors and year>"
    regularises: ClassVar[str] = "classifier's input, to the global model's"
    extra_forwards: ClassVar[str] = "1"

    mu: float = option(at_least(0), "weight of the distance", source="eq. (2)")

    def layers(self, model: StagedModel) -> list[str]:
        """The classifier's input."""
        return ["features"]

    def penalty(self, batch: Batch) -> Tensor:
        """(mu / 2) ||z - z_g||^2, the second term of eq. (2)."""
        (z,), (z_g,) = batch.reps, batch.reps_global
        return self.mu / 2 * feature_distance(z, z_g)
'''

SERVER_FLAG = "    has_own_server_half: ClassVar[bool] = True\n"
SERVER_OPTION = """    eta: float = option(
        between(0, 1, open_low=True), "server step towards the average", source="eq. (3)"
    )
"""

SERVER_HALF = '''"""FedNew: a damped step towards the clients' average (server side).

w <- w + eta (sum_i p_i w_i - w), eq. (3) of the source; eta = 1 is the weighted average.
"""

import torch

from protocol.messages import Arrays, TrainReply
from strategies.average import Average


class FedNewServer(Average):
    """The weighted average, damped by the option `eta`."""

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """w + eta (average - w) for floating arrays; counters are averaged."""
        average = super().next_arrays(current, replies)
        return {
            name: torch.lerp(current[name], array, self.options.eta)
            if array.is_floating_point()
            else array
            for name, array in average.items()
        }
'''

TEST = '''"""FedNew against its printed equations."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from client_app.methods.fednew import FedNew, feature_distance
from server_app.inline import run_inline


def random_features(seed):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(5, 3, generator=generator, dtype=torch.float64) + seed % 2


def distance_as_printed(z, z_g):
    """Eq. (1) entry by entry."""
    total = 0.0
    for row, row_g in zip(z.tolist(), z_g.tolist(), strict=True):
        for entry, entry_g in zip(row, row_g, strict=True):
            total += (entry - entry_g) ** 2
    return total / len(z)


def final_model(tmp_path, **options):
    keys = {"source": "digits", "model": "cnn-fedreco", "lr": 0.05, "num-rounds": 2}
    keys |= {"device": "cpu", "output-dir": str(tmp_path)} | options
    return load_file(run_inline(keys, 2) / "model.safetensors")


def test_distance_is_the_printed_equation():
    z, z_g = random_features(1), random_features(2)
    assert feature_distance(z, z_g).item() == pytest.approx(distance_as_printed(z, z_g), rel=1e-12)


def test_distance_has_the_gradient_of_its_value():
    z, z_g = random_features(1).requires_grad_(), random_features(2)
    assert torch.autograd.gradcheck(lambda z: feature_distance(z, z_g), z)


def test_no_gradient_reaches_the_global_model():
    z, z_g = random_features(1).requires_grad_(), random_features(2).requires_grad_()
    feature_distance(z, z_g).backward()
    assert z.grad.abs().sum() > 0
    assert z_g.grad is None


def test_penalty_is_weighted_by_half_mu():
    z, z_g = random_features(1), random_features(2)
    penalty = FedNew(mu=0.6ETA).penalty(SimpleNamespace(reps=[z], reps_global=[z_g]))
    assert penalty.item() == pytest.approx(0.3 * distance_as_printed(z, z_g), rel=1e-12)


def test_mu_zero_is_fedavg_bit_for_bit(tmp_path):
    fedavg = final_model(tmp_path, method="fedavg")
    without = final_model(tmp_path, method="fed-new", **{"fed-new.mu": 0.0})
    assert all(torch.equal(without[name], array) for name, array in fedavg.items())
    weighted = final_model(tmp_path, method="fed-new", **{"fed-new.mu": 0.5})
    assert any(not torch.equal(weighted[name], array) for name, array in fedavg.items())
'''

SERVER_TEST = """

def test_server_moves_by_eta_towards_the_average(tmp_path):
    keys = {"method": "fed-new", "num-rounds": 1}
    start = final_model(tmp_path, **keys, lr=0.0)
    average = final_model(tmp_path, **keys)
    damped = final_model(tmp_path, **keys, **{"fed-new.eta": 0.25})
    for name, array in damped.items():
        expected = start[name] + 0.25 * (average[name] - start[name])
        torch.testing.assert_close(array, expected)
"""

TABLE = """
[tool.flwr.app.config.fed-new]
mu = 0.1                       # weight of the distance
"""
SERVER_DEFAULT = "eta = 1.0                      # server step towards the average\n"


def new_method(
    name: Annotated[
        str, typer.Argument(help="Lower case, as in `method=NAME`: fedprox, fedavg-ft.")
    ],
    server_half: Annotated[
        bool, typer.Option("--server-half", help="Write the server half in strategies/ too.")
    ] = False,
) -> None:
    """Write the files of a new method: client half, test, config table.

    They are a complete example, the squared distance of the features to the global model's: change
    it into your method. `make check` passes as they are; `keel check-method NAME` tests any method.
    """
    files = method_files(name, server_half)
    pyproject = app_folder / "pyproject.toml"
    config = with_table(pyproject.read_text(), named(TABLE, name) + SERVER_DEFAULT * server_half)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pyproject.write_text(config)
    for path in (*files, pyproject):
        print(path.relative_to(app_folder))


def method_files(name: str, server_half: bool) -> dict[Path, str]:
    """Path to content. ValueError if the name is taken or not allowed, or this is no checkout."""
    stem = method_stem(name)
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(stem):
        raise ValueError(f"{name!r}: expected lower-case letters, digits and hyphens, as fedavg-ft")
    tables = {key.partition(".")[0] for key in default_config()} | set(method_names())
    if name in tables:
        raise ValueError(f"{name!r} exists: methods, server optimizers and config keys share names")
    if not (app_folder / "tests").is_dir():
        raise ValueError(f"{app_folder} is not a checkout of Keel: methods are written in one")
    client, test = CLIENT_HALF, TEST.replace("ETA", ", eta=1.0" if server_half else "")
    files = {}
    if server_half:
        client = client.replace("    uses_global", SERVER_FLAG + "    uses_global", 1)
        client = client.replace('source="eq. (2)")\n', f'source="eq. (2)")\n{SERVER_OPTION}', 1)
        client = client.replace("import at_least,", "import at_least, between,", 1)
        client = client.replace("Aggregation: weighted average.", "Aggregation: see strategies/.")
        files[app_folder / "strategies" / f"{stem}.py"] = SERVER_HALF
        test += SERVER_TEST
    files[app_folder / "client_app" / "methods" / f"{stem}.py"] = client
    files[app_folder / "tests" / "methods" / f"test_{stem}.py"] = test
    if existing := [path for path in files if path.exists()]:
        raise ValueError(f"{existing[0]} exists and is not overwritten")
    return {path: named(text, name) for path, text in files.items()}


def named(template: str, name: str) -> str:
    """The template with this method's names: fed-pull, fed_pull.py, FedPull; fedpull is FedPull."""
    words = re.sub(r"^fed(?=[a-z])", "fed-", name).split("-")
    class_name = "".join(word.capitalize() for word in words)
    stem = method_stem(name)
    for old, new in (("FedNew", class_name), ("fed-new", name), ("fednew", stem)):
        template = template.replace(old, new)
    return template


def with_table(pyproject: str, table: str) -> str:
    """pyproject.toml with one more table after the last [tool.flwr.app.config.*]."""
    last = pyproject.rindex("\n[tool.flwr.app.config.")
    end = pyproject.index("\n\n", last) + 1
    return pyproject[:end] + table + pyproject[end:]
