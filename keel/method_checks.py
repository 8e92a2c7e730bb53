"""The checks of `keel check-method`: what any method has to fulfil, on random images."""

import contextlib
import dataclasses
import inspect
import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from client_app.class_checks import class_problems, function_problems
from client_app.method import Update
from client_app.methods import method_of
from client_app.objective import LocalObjective
from client_app.state import StateFolder
from keel.cli.new_method import placeholders
from keel.loss_checks import (
    batch_order_is_irrelevant,
    frozen_models_get_no_gradient,
    gradient_is_correct,
    loss_terms_are_scalars,
)
from keel.method_subject import (
    CheckFailed,
    NotApplicable,
    Subject,
    check_update,
    num_classes,
    require,
)
from models import StagedModel
from protocol.arrays import Arrays
from protocol.catalogue import app_folder, method_stem
from protocol.code import line_in_method
from protocol.config import default_config, resolve_config
from protocol.models import MODELS
from protocol.options import ConfigError, OptionValue, defaults_of
from protocol.own_code import is_spec
from server_app.inline import run_inline
from server_app.load_model import stored_model
from strategies import Average, server_half


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the report. outcome: pass, FAIL or skip."""

    outcome: str
    check: str
    reason: str = ""


def class_is_as_expected(subject: Subject) -> None:
    """Both halves declare options and flags and have functions that Keel reads and calls."""
    cls = subject.method_class
    half = server_half(cls)
    problems = [*class_problems(cls), *(function_problems(half) if half is not Average else ())]
    require(not problems, "; ".join(problems[:1]))
    if is_spec(subject.name):
        return
    file = app_folder / "strategies" / f"{method_stem(subject.name)}.py"
    require(
        file.exists() == cls.has_own_server_half,
        f"has_own_server_half = {cls.has_own_server_half}, and strategies/{file.name} "
        f"{'exists' if file.exists() else 'does not exist'}",
    )


def options_documented(subject: Subject) -> None:
    """Every option has a constraint, a description and a default, and every default an option."""
    name, cls = subject.name, subject.method_class
    if not is_spec(name):
        found = {
            key: value for key, value in default_config().items() if key.startswith(f"{name}.")
        }
        declared = {f"{name}.{key}": value for key, value in defaults_of(cls).items()}
        other = [key for key in found | declared if found.get(key) != declared.get(key)]
        require(
            not other,
            f"{', '.join(other)}: pyproject.toml has another default: run `python -m "
            "tools.config_table`",
        )
    subject.config()  # raises for a default that the option does not accept
    for field in dataclasses.fields(cls):
        require(bool(field.metadata.get("description")), f"{field.name} has no description")


def source_is_named(subject: Subject) -> None:
    """The file's docstring and `paper` hold none of the placeholders of `keel new-method`."""
    cls = subject.method_class
    text = f"{inspect.getdoc(inspect.getmodule(cls))} {cls.paper}"
    left = [each for each in placeholders() if each in text]
    require(not left, f"{', '.join(left)} in {inspect.getfile(cls)}: name the source there")


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
            needed = [options_documented, trains_on_what_it_receives, loss_terms_are_scalars]
            if is_spec(name):
                needed.append(class_is_as_expected)  # without which there is no config
            if outcome == "FAIL" and check in needed:
                return  # no other check could read the config, train or compute the loss
    finally:
        logging.disable(logging.NOTSET)
        if home is None:
            del os.environ["KEEL_HOME"]
        else:
            os.environ["KEEL_HOME"] = home
