"""The checks of `keel check-method`: what any method has to fulfil, on random images."""

import contextlib
import dataclasses
import inspect
import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import get_total_norm as total_norm

from client_app.handlers import check_released
from client_app.method import Method, Update
from client_app.methods import method_class, method_of
from client_app.objective import LocalObjective, ObjectiveLoss
from client_app.process_cache import ProcessCache
from client_app.round import RoundContext
from client_app.samples import Pixels, Step
from client_app.setup import dataset_spec_of, model_for, open_source
from client_app.state import StateFolder
from keel.class_checks import class_problems, function_problems
from keel.cli.new_method import placeholders
from models import StagedModel
from protocol.catalogue import app_folder, method_stem
from protocol.code import line_in_method
from protocol.config import RunConfig, default_config, resolve_config
from protocol.messages import Arrays, TrainRequest
from protocol.models import MODELS
from protocol.options import ConfigError, OptionValue, keys_of, parse_options
from protocol.packing import DTYPES
from server_app.inline import run_inline
from server_app.load_model import stored_model
from strategies import Average, server_half, strategy_for
from strategies.sampling import name_of

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


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report. outcome: pass, FAIL or skip."""

    outcome: str
    check: str
    reason: str = ""


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
        client: int = 0,
    ) -> RoundContext:
        """Round `number` of this client, with what this method's server half sends in round 1.

        From round 2 on the received weights differ from those of round 1.
        """
        source = open_source(config)
        seed = None if number == 1 else number
        strategy = strategy_for(config, model_for(config, source, seed=seed))
        received = strategy.initial_arrays(model_for(config, source, seed=seed))
        return ProcessCache().begin_round(
            TrainRequest(config, dataset_spec_of(config, source), number, [number - 1], False, ""),
            {"partition-id": client, "num-partitions": num_clients},
            received=received,
            extra=strategy.extra() | strategy.own_extra.get(name_of(client), {}),
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


def class_is_as_expected(subject: Subject) -> None:
    """Both halves declare options and flags and have functions that Keel reads and calls."""
    cls, half = method_class(subject.name), server_half(subject.name)
    problems = [*class_problems(cls), *(function_problems(half) if half is not Average else ())]
    require(not problems, "; ".join(problems[:1]))
    file = app_folder / "strategies" / f"{method_stem(subject.name)}.py"
    require(
        file.exists() == cls.has_own_server_half,
        f"has_own_server_half = {cls.has_own_server_half}, and strategies/{file.name} "
        f"{'exists' if file.exists() else 'does not exist'}",
    )


def options_documented(subject: Subject) -> None:
    """Every option has a constraint, a description and a default, and every default an option."""
    name, cls = subject.name, method_class(subject.name)
    defaults = {key for key in default_config() if key.startswith(f"{name}.")}
    options = {f"{name}.{key}" for key in keys_of(cls)}
    missing, unknown = sorted(options - defaults), sorted(defaults - options)
    require(not missing, f"{', '.join(missing)}: no default in pyproject.toml")
    require(not unknown, f"{', '.join(unknown)} in pyproject.toml: no such option")
    parse_options(cls, default_config(), prefix=f"{name}.")
    for field in dataclasses.fields(cls):
        require(bool(field.metadata.get("description")), f"{field.name} has no description")


def source_is_named(subject: Subject) -> None:
    """The file's docstring and `paper` hold none of the placeholders of `keel new-method`."""
    cls = method_class(subject.name)
    text = f"{inspect.getdoc(inspect.getmodule(cls))} {cls.paper}"
    left = [each for each in placeholders() if each in text]
    require(not left, f"{', '.join(left)} in {inspect.getfile(cls)}: name the source there")


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Networks built meanwhile have float64 weights."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


class Float64Pixels(Pixels):
    """Normalised images in float64."""

    def normalise(self, images: Tensor) -> Tensor:
        """[B, C, H, W] of pixels 0..255 as float64."""
        return super().normalise(images).double()


class Loss:
    """The loss of a local objective on one batch in round 2, in float64, as a function of w."""

    def __init__(self, subject: Subject) -> None:
        config = subject.config()
        objective = method_of(config)
        if not isinstance(objective, LocalObjective):
            raise NotApplicable("a local procedure is not one loss on one model")
        trained = subject.trained(config).state if objective.is_stateful else {}
        state = {
            group: {n: a.double() if a.is_floating_point() else a for n, a in arrays.items()}
            for group, arrays in trained.items()
        }
        with in_float64():
            ctx = subject.round(config, 2, state)
            pixels = ctx.train_samples.pixels
            ctx.train_samples.pixels = Float64Pixels(pixels.mean, pixels.std)
            self.constants = [
                array.requires_grad_()
                for arrays in (ctx.received, *ctx.state.values())
                for array in arrays.values()
                if array.is_floating_point()
            ]
            self.model = ctx.model
            self.model.load_state_dict(model_for(config, open_source(config), seed=3).state_dict())
            self.model.train().requires_grad_(True)
            self.loss = ObjectiveLoss(objective, ctx, self.model)
            self.step = next(ctx.steps("check", 1))

    def value(self, step: Step | None = None) -> Tensor:
        """Sum of the loss terms, with the same dropout masks at every call."""
        torch.manual_seed(0)
        with in_float64():
            terms = self.loss(*self.loss.inputs(step or self.step)).values()
        self.is_float64 = all(term.dtype is torch.float64 for term in terms)
        return torch.stack([term.double() for term in terms]).sum()


def loss_terms_are_scalars(subject: Subject) -> None:
    """Layers have names of the network's, loss terms are scalars, and one has a gradient."""
    config = subject.config()
    objective = method_of(config)
    if not isinstance(objective, LocalObjective):
        raise NotApplicable("a local procedure is not one loss on one model")
    state = subject.trained(config).state if objective.is_stateful else {}
    ctx = subject.round(config, 2, state)
    name, model = type(objective).__name__, ctx.model.train().requires_grad_(True)
    model.load_state_dict(ctx.initial_weights() | ctx.received)
    layers = objective.layers(model)
    require(
        isinstance(layers, list | tuple) and set(layers) <= set(model.layer_names),
        f"{name}.layers returned {layers!r}: expected a list of {', '.join(model.layer_names)}",
    )
    loss = ObjectiveLoss(objective, ctx, model)
    terms: dict[str, Any] = dict(loss(*loss.inputs(next(ctx.steps("check", 1)))))
    for function, term in terms.items():
        found = list(term.shape) if isinstance(term, Tensor) else type(term).__name__
        require(
            isinstance(term, Tensor) and term.dim() == 0,
            f"{name}.{function} returned {found}: expected a scalar Tensor; for no penalty, "
            "batch.logits.new_zeros(())",
        )
    require(
        any(term.requires_grad for term in terms.values()),
        f"the loss ({' + '.join(terms)}) depends on no weight that is trained: compute it from the "
        "model's outputs, without detach",
    )


def gradient_is_correct(subject: Subject) -> None:
    """The gradient is finite and equals central differences along three directions."""
    loss = Loss(subject)
    parameters = list(loss.model.parameters())
    loss.value().backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    require(all(bool(g.isfinite().all()) for g in found), "the gradient is not finite")
    start = [p.detach().clone() for p in parameters]
    # a method may compute in float32 whatever it is given
    step, tolerance = (1e-6, 1e-4) if loss.is_float64 else (1e-3, 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        random = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
        direction = [
            g / total_norm(found).clamp_min(1e-12) + r / total_norm(random)
            for g, r in zip(found, random, strict=True)
        ]
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, p_0, d in zip(parameters, start, direction, strict=True):
                    p.copy_(p_0 + sign * step * d)
            values.append(loss.value().item())
        expected = (values[0] - values[1]) / (2 * step)
        along = sum((g * d).sum().item() for g, d in zip(found, direction, strict=True))
        require(
            abs(along - expected) <= tolerance * max(abs(expected), 1e-3),
            f"autograd gives {along:.6g} along a direction, finite differences {expected:.6g}; "
            "an intended detach shows here too",
        )


def trains_on_what_it_receives(subject: Subject) -> None:
    """Two rounds of one client give updates, and change nothing that was received or stored."""
    config = subject.config()
    ctx = subject.round(config, 2, subject.trained(config).state)
    given = {"received": ctx.received, "extra": ctx.extra, **ctx.state}
    before = {g: {n: a.clone() for n, a in arrays.items()} for g, arrays in given.items()}
    method = method_of(config)
    check_update(method, method.train(ctx))
    for group, arrays in given.items():
        changed = difference(before[group], arrays)
        require(
            not changed,
            f"training changes {changed!r} of {group} in place, or a frozen model that shares its "
            "memory: clone it first",
        )


def frozen_models_get_no_gradient(subject: Subject) -> None:
    """Received arrays and client state get no gradient."""
    loss = Loss(subject)
    loss.value().backward()  # type: ignore[no-untyped-call]
    touched = [array for array in loss.constants if array.grad is not None]
    require(not touched, "a gradient reaches the received arrays or the client state: detach them")


def batch_order_is_irrelevant(subject: Subject) -> None:
    """The loss of a permuted batch is the same, up to rounding."""
    loss = Loss(subject)
    step = loss.step
    before = torch.get_rng_state()
    with torch.no_grad():
        loss.model(step.x)
    if not torch.equal(before, torch.get_rng_state()):
        raise NotApplicable("the network draws random numbers for each sample, as dropout does")
    order = torch.randperm(len(step.y), generator=torch.Generator().manual_seed(0))
    permuted = Step(step.x[order], step.y[order], step.index[order], step.variant[order])
    first, second = loss.value().item(), loss.value(permuted).item()
    require(
        abs(first - second) <= (1e-9 if loss.is_float64 else 1e-5) * abs(first),
        f"the loss is {first:.10g}, and {second:.10g} after permuting the batch",
    )


def batch_of_one(subject: Subject) -> None:
    """A round with batches of one sample gives finite weights and losses."""
    require_finite(subject.trained(subject.config(batch_size=1)))


def client_without_some_classes(subject: Subject) -> None:
    """A round of a client that holds one of the classes gives finite weights and losses."""
    config = subject.config(partition="classes", classes_per_client=1)
    require_finite(subject.trained(config, num_clients=num_classes))


def require_finite(update: Update) -> None:
    """CheckFailed naming what is not finite in the update."""
    for group in (update.arrays, update.extra, *update.state.values()):
        for name, array in group.items():
            is_finite = not array.is_floating_point() or bool(array.isfinite().all())
            require(is_finite, f"{name} is not finite")
    for name, value in update.terms.items():
        require(bool(np.isfinite(value)), f"the mean {name} loss is {value}")


def state_round_trip(subject: Subject) -> None:
    """State is returned exactly if declared, and a state file gives back the same bits."""
    state = subject.trained(subject.config()).state
    if not state:
        raise NotApplicable("stateless")
    empty = [group for group, arrays in state.items() if not arrays]
    require(
        not empty,
        f"client state {', '.join(map(repr, empty))} has no arrays: what has none is not stored "
        f"(with model = {subject.model!r}; a method for networks with BatchNorm: --model resnet20)",
    )
    folder = StateFolder(subject.directory / "state")
    folder.save(1, state)
    loaded = folder.load(2)
    require(loaded.keys() == state.keys(), f"the file holds {sorted(loaded)}")
    require(
        not any(difference(state[g], loaded[g]) for g in state), "a loaded array has other bits"
    )


def result_of(run: Path) -> Arrays:
    """Every array of the final global model and of each client's newest state."""
    arrays: Arrays = {}
    files = [run / "model.safetensors"]
    files += [max(c.glob("round-*.safetensors")) for c in sorted((run / "clients").glob("*"))]
    for file in files:
        if file.exists():
            where = f"{file.parent.name}/" if file.parent != run else ""
            arrays |= {f"{where}{name}": array for name, array in load_file(file).items()}
    return arrays


def resume_is_exact(subject: Subject) -> None:
    """Three rounds give the same bits as two rounds and one after resuming in another process."""
    if method_of(subject.config()).depends_on_num_rounds():
        raise NotApplicable("depends on num-rounds")
    whole = subject.run(num_rounds=3)
    part = subject.run(num_rounds=2)
    resume_elsewhere(part, num_rounds=3)
    differing = difference(result_of(whole), result_of(part))
    require(
        not differing,
        f"{differing} differs after resuming in another process, in which sets of names have "
        "another order: store all that a round needs, and sum in a fixed order",
    )


def resume_elsewhere(run: Path, num_rounds: int) -> None:
    """Resume a run of two clients in a process in which strings have other hashes."""
    code = "import sys; from server_app.inline import run_inline; "
    code += f"run_inline({{'resume': sys.argv[1], 'num-rounds': {num_rounds}}}, 2)"
    own_seed = os.environ.get("PYTHONHASHSEED", "")
    variables = {"PYTHONHASHSEED": "1" if own_seed == "0" else "0"}
    variables["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)],
        cwd=app_folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    require(not done.returncode, f"resuming failed: {''.join(done.stderr.splitlines()[-1:])}")


def repeats_exactly(subject: Subject) -> None:
    """The same run twice gives the same bits."""
    first, second = (result_of(subject.run(num_rounds=2)) for _ in range(2))
    differing = difference(first, second)
    require(not differing, f"{differing} differs between two runs with one seed")


def difference(a: Arrays, b: Arrays) -> str:
    """The first name under which two results are not the same bits, or ""."""
    names = [n for n in a | b if n not in a or n not in b or not torch.equal(a[n], b[n])]
    return names[0] if names else ""


def first_round_is_fedavg(subject: Subject) -> None:
    """With `uses_previous`, the first round is FedAvg's: there is no previous model yet."""
    method = method_of(subject.config())
    if not (isinstance(method, LocalObjective) and method.uses_previous):
        raise NotApplicable("uses no previous model")
    common: dict[str, OptionValue] = {"num_rounds": 1, "weighting": "examples"}
    own = result_of(subject.run(2, **common))
    fedavg = result_of(subject.run(2, **common, method="fedavg"))
    names = [n for n, array in fedavg.items() if n in own and not torch.equal(own[n], array)]
    require(not names, f"{', '.join(names[:1])} differs from FedAvg's after round 1")


def flags_are_consistent(subject: Subject) -> None:
    """What the capability flags allow works, and what they rule out is refused."""
    config = subject.config()
    method = method_of(config)
    update, ctx = subject.trained(config), subject.round(config, 2, {})
    personal = method.personal_model(ctx, update.state)
    require(
        method.is_personal == (personal is not None),
        f"is_personal = {method.is_personal}, and personal_model "
        f"{'returns None' if personal is None else 'returns a model'}",
    )
    stored = stored_model(update.state, ctx.received)
    if personal is not None and update.state and not method.is_tuned_for_evaluation():
        require(
            bool(stored),
            "`keel predict --client` reads a personal model from client state, of the group "
            "'model', 'personal' or 'head', and there is none: client state has "
            f"{', '.join(map(repr, update.state))}: store what personal_model returns in 'model'",
        )
    if stored and isinstance(personal, StagedModel) and not method.is_tuned_for_evaluation():
        require(
            not difference(stored, dict(personal.state_dict())),
            "personal_model returns another model than `keel predict --client` reads from client "
            f"state, of the groups {', '.join(map(repr, update.state))}: store the same in 'model'",
        )
    has_batch_norm = MODELS[subject.model].norm_layer("") == "batch"
    for flag, keys in (
        ("supports_privacy", {"privacy.epsilon": 0.5}),
        ("supports_server_optimizer", {"server-optimizer": "fedavgm"}),
        ("supports_mixed_architectures", {"client-models": f"{subject.model},{subject.model}"}),
    ):
        if flag == "supports_privacy" and has_batch_norm:
            continue  # refused with every method
        altered, is_refused = resolve_config(subject.keys() | keys), False
        try:
            method_of(altered)
        except ConfigError:
            is_refused = True
        is_supported = getattr(method, flag)
        require(
            is_refused != is_supported,
            f"{flag} = {is_supported}, and {keys} is {'refused' if is_refused else 'accepted'}",
        )
        if is_supported and flag == "supports_privacy":
            require(
                bool(difference(update.arrays, subject.trained(altered).arrays)),
                "supports_privacy = True, and privacy.epsilon changes nothing in the update",
            )
        elif is_supported:
            run_inline(subject.keys(num_rounds=2, output_dir=str(subject.directory)) | keys, 2)


CHECKS: dict[str, Callable[[Subject], None]] = {
    "both halves are declared as Keel reads them": class_is_as_expected,
    "options are documented and have defaults": options_documented,
    "source is named": source_is_named,
    "loss terms are scalars": loss_terms_are_scalars,
    "a client trains, and received arrays stay as they are": trains_on_what_it_receives,
    "gradient is finite and equals finite differences": gradient_is_correct,
    "frozen models get no gradient": frozen_models_get_no_gradient,
    "order of the batch does not matter": batch_order_is_irrelevant,
    "batch of one": batch_of_one,
    "client without some classes": client_without_some_classes,
    "client state is declared and survives a round trip": state_round_trip,
    "same seed, same bits": repeats_exactly,
    "resumed run equals uninterrupted run": resume_is_exact,
    "first round equals FedAvg": first_round_is_fedavg,
    "capability flags are consistent": flags_are_consistent,
}


def check_method(name: str, directory: Path, model: str = "cnn-fedreco") -> Iterator[Result]:
    """The results of all checks, one after the other; runs and caches go below `directory`."""
    subject = Subject(name, directory, model)
    home, os.environ["KEEL_HOME"] = os.environ.get("KEEL_HOME"), str(directory)
    logging.disable(logging.WARNING)
    try:
        for text, check in CHECKS.items():
            outcome, reason = "pass", ""
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    check(subject)
            except NotApplicable as error:
                outcome, reason = "skip", str(error)
            except CheckFailed as error:
                outcome, reason = "FAIL", str(error)
            except Exception as error:  # of the method's own code
                outcome, reason = "FAIL", f"{type(error).__name__}{line_in_method(error)}: {error}"
            yield Result(outcome, text, " ".join(reason.split()))
            needed = (options_documented, trains_on_what_it_receives, loss_terms_are_scalars)
            if outcome == "FAIL" and check in needed:
                return  # no other check could read the config, train or compute the loss
    finally:
        logging.disable(logging.NOTSET)
        if home is None:
            del os.environ["KEEL_HOME"]
        else:
            os.environ["KEEL_HOME"] = home
