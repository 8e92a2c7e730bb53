"""A method under test: small runs and rounds of it, and the form of what its training returns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from client_app.handlers import check_released
from client_app.method import Method, Update
from client_app.methods import method_class, method_of
from client_app.process_cache import ProcessCache
from client_app.round import RoundContext
from client_app.setup import dataset_spec_of, model_for, open_source
from protocol.arrays import DTYPES, Arrays
from protocol.config import RunConfig, resolve_config
from protocol.messages import TrainRequest
from protocol.options import OptionValue
from protocol.own_code import is_spec
from server_app.inline import run_inline
from strategies import strategy_for
from strategies.cohort import name_of

num_images, num_classes, image_size = 60, 3, 28
Keys = dict[str, OptionValue]


class CheckFailed(Exception):
    """A check found something wrong; its text is the reason."""


class NotApplicable(Exception):
    """A check does not concern this method; its text says why."""


def require(condition: bool, reason: str) -> None:
    """CheckFailed with this reason unless the condition holds."""
    if not condition:
        raise CheckFailed(reason)


class Subject:
    """The method under test, and small runs and rounds of it in a directory of its own."""

    def __init__(self, name: str, directory: Path, model: str = "cnn-fedreco") -> None:
        self.name, self.directory, self.model = name, directory, model
        self.images = directory / "random.npz"
        if self.images.exists():
            return
        rng = np.random.default_rng(0)
        arrays: dict[str, np.ndarray] = {}
        for split, num in (("train", num_images), ("test", 18)):
            arrays[f"x_{split}"] = rng.integers(
                0, 256, (num, image_size, image_size), dtype=np.uint8
            )
            arrays[f"y_{split}"] = np.arange(num) % num_classes
        np.savez(self.images, **arrays)  # type: ignore[arg-type]  # numpy's stub

    def keys(self, **keys: OptionValue) -> Keys:
        """Overrides of a small run; underscores in the names stand for hyphens."""
        fixed: Keys = {
            "method": self.name,
            "source": f"npz:{self.images}",
            "model": self.model,
            "partition": "iid",
            "min-samples": 1,
            "local-test-fraction": 0.2,
            "batch-size": 8,
            "lr": 0.05,
            "device": "cpu",
        }
        return fixed | {name.replace("_", "-"): value for name, value in keys.items()}

    @property
    def method_class(self) -> type[Method]:
        """The method's class. ValueError, one line, if there is none."""
        return method_class(self.name) if not is_spec(self.name) else self.config().method_class

    def config(self, **keys: OptionValue) -> RunConfig:
        """The config of a small run."""
        return resolve_config(self.keys(**keys))

    def run(self, num_clients: int = 2, **keys: OptionValue) -> Path:
        """The directory of a finished run on the inline engine."""
        overrides = self.keys(output_dir=str(self.directory), keep_state=True, **keys)
        return run_inline(overrides, num_clients)

    def round(
        self,
        config: RunConfig,
        number: int,
        state: dict[str, Arrays],
        num_clients: int = 2,
    ) -> RoundContext:
        """Round `number` of the first client, with what the method's server half sends in round 1.

        From round 2 on the received weights differ from those of round 1.
        """
        source = open_source(config)
        seed = None if number == 1 else number
        strategy = strategy_for(config, model_for(config, source, seed=seed))
        received = strategy.initial_arrays(model_for(config, source, seed=seed))
        return ProcessCache().begin_round(
            TrainRequest(config, dataset_spec_of(config, source), number, [number - 1], False, ""),
            {"partition-id": 0, "num-partitions": num_clients},
            received=received,
            extra=strategy.extra() | strategy.own_extra.get(name_of(0), {}),
            state=state,
            last_accepted_round=number - 1 if state else 0,
        )

    def trained(self, config: RunConfig, num_clients: int = 2) -> Update:
        """The update of round 1."""
        method = method_of(config)
        ctx = self.round(config, 1, {}, num_clients)
        update = method.train(ctx)
        check_update(method, update)
        check_released(method, update, ctx)
        return update


def check_update(method: Method, update: Any) -> None:
    """CheckFailed unless local training returned an `Update` with fields of the right types."""
    name = f"{type(method).__name__}.train"
    require(
        isinstance(update, Update), f"{name} returned {type(update).__name__}: expected an Update"
    )
    require(isinstance(update.state, Mapping), f"{name}: Update.state: expected a dict of dicts")
    fields = {"arrays": update.arrays, "extra": update.extra}
    fields |= {f"state[{group!r}]": arrays for group, arrays in update.state.items()}
    for field, arrays in fields.items():
        is_named = isinstance(arrays, Mapping) and all(isinstance(n, str) for n in arrays)
        require(
            is_named and all(isinstance(a, Tensor) and a.dtype in DTYPES for a in arrays.values()),
            f"{name}: Update.{field}: expected a dict of tensors by name, as in "
            '{"weight": tensor}, of types that client state and messages can have',
        )
    groups = [*update.state]
    require(
        all(isinstance(group, str) and "/" not in group for group in groups),
        f"{name}: the groups of Update.state are {groups}: expected strings without '/'",
    )
    require(
        isinstance(update.num_steps, int),
        f"{name}: Update.num_steps is {update.num_steps!r}: expected an int",
    )
    require(
        isinstance(update.terms, Mapping)
        and all(isinstance(value, float) for value in update.terms.values()),
        f"{name}: Update.terms is {update.terms!r}: expected a dict of floats",
    )
    require(
        method.is_stateful == bool(update.state),
        f"is_stateful = {method.is_stateful}, and {name} returns state {groups or 'none'}",
    )
