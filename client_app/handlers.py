"""A client's answers to query, train and evaluate; an error becomes one line, naming its cause.

Runs in the process of the ClientApp in simulation, and in the resident worker
(`client_app.worker_server`) where there is one.
"""

import copy
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)

from client_app.evaluation import evaluate
from client_app.gpu_errors import is_gpu_lost, is_out_of_memory
from client_app.machine import machine, report_of
from client_app.method import Method, Update
from client_app.methods import method_of
from client_app.node_config import (
    checked_run_path,
    client_name,
    is_deployed,
    own_architecture,
    own_splits,
    state_folder,
)
from client_app.precision import products
from client_app.process_cache import ProcessCaches
from client_app.round import RoundContext, on_device
from client_app.setup import device_for, forget_sources, representation_width
from client_app.site_privacy import (
    PrivacyRefused,
    charge_release,
    check_limits,
    is_site,
    names_limit,
)
from client_app.state import ResetNeeded
from client_app.worker_client import run_and_round
from data.decoding import ImageFileError
from flower_adapter import CLIENT_FAILED, GPU_LOST
from models.fixed import give_back, is_borrowed, is_overwritten
from protocol.code import line_in_method, place_of
from protocol.config import config_from_json, keel_home
from protocol.files import private_files
from protocol.messages import (
    RESET_NEEDED,
    Arrays,
    EvaluateRequest,
    PreflightRequest,
    RosterEntry,
    RosterRequest,
    RoundRequest,
    TrainReply,
    TrainRequest,
    all_finite,
    contents_to_simulate,
    find_record,
    get_record,
    last_accepted_round_of,
    machine_content,
    mismatch,
    read_request,
    reply_content,
    roster_content,
    simulated_reply,
    tensors,
)
from protocol.packing import DTYPES
from protocol.text import in_one_line

log = logging.getLogger("keel.client")
MAX_REASON = 2000  # characters of an error


class Turn:
    """Lends this process's networks and device to one thread at a time.

    waiting: the context in which a thread waits for its turn.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    def __call__(self) -> Iterator[float]:
        """Wait for the turn and hold it; the seconds waited."""
        started = time.perf_counter()
        with self.waiting():
            self._lock.acquire()
        try:
            yield time.perf_counter() - started
        finally:
            self._lock.release()


# errors whose text says all, so they are sent without their type
REFUSALS = (ValueError, PrivacyRefused, ResetNeeded, ImageFileError)
process_caches, turn = ProcessCaches(), Turn()
cpu = torch.device("cpu")


def advice(rate_keys: Sequence[str]) -> str:
    """What to change where local training diverges. rate_keys: of the method."""
    return (
        f"Lower {' or '.join(rate_keys)}, set clip-norm above 0, or look in the loss for a "
        "gradient that is not finite, such as that of sqrt at 0"
    )


def forget_data() -> None:
    """Drop cached data before another run in this process: the files may have changed."""
    with turn():
        process_caches.clear()
        forget_sources()


@private_files()
def answer(message: Message, context: Context) -> RecordDict | Error:
    """The content of the reply to a message, or an error of one line.

    A message for several logical clients is answered for one after the other. A GPU_LOST error of
    one client is returned for the whole message.
    """
    if "simulated" not in message.content:
        return answer_as(message, context)
    is_real, is_limited = is_deployed(context.node_config), names_limit(context.node_config)
    if is_real or is_limited:  # it would train on any data, without the site's limits
        what = "is deployed" if is_real else "has privacy limits"
        reason = f"a message for simulated clients: this client {what} and simulates none"
        return error_reply(ValueError(reason), message, context)
    replies = []
    for client, num_clients, content in contents_to_simulate(message.content):
        own = copy.copy(message)
        own.content = content
        node_config: dict[str, bool | float | int | str] = {
            "partition-id": client,
            "num-partitions": num_clients,
        }
        node = Context(context.run_id, context.node_id, node_config, RecordDict(), {})
        reply = answer_as(own, node)
        if isinstance(reply, Error) and reply.code == GPU_LOST:
            return reply  # the others would fail too
        replies.append(reply)
    return simulated_reply(replies)


def answer_as(message: Message, context: Context) -> RecordDict | Error:
    """`answer` for one client."""
    try:
        return handlers[message.metadata.message_type](message, context)
    except Exception as error:
        return error_reply(error, message, context)


def error_reply(error: Exception, message: Message, context: Context) -> Error:
    """What the server is told of an error; the log has it too."""
    reason = reason_of(error)
    is_withheld = not isinstance(error, PrivacyRefused) and withholds_metrics(message)
    try:
        client = client_name(context.node_config)
    except ValueError:
        client = "without a name"
    what = run_and_round(message)
    # the trace has the sanitised reason: the exception's own text may come from the server
    is_bug = not is_for_user(error)
    trace = (type(error), RuntimeError(reason), error.__traceback__) if is_bug else None
    extra = {"is_withheld": is_withheld}
    log.error("%s: client %s: %s", what, client, reason, exc_info=trace, extra=extra)
    if is_deployed(context.node_config):
        reason = without_file_names(reason, error, str(context.node_config.get("source", "")))
    if is_withheld:
        reason = "failed; privacy.metrics = 'withheld': the reason is in this client's log"
    is_query = message.metadata.message_type == MessageType.QUERY
    if is_query and not is_about_machine(message):  # the server does not know its name yet
        reason = f"client {client}: {reason}"
    if is_gpu_lost(error):
        return Error(GPU_LOST, reason)
    return Error(RESET_NEEDED if isinstance(error, ResetNeeded) else CLIENT_FAILED, reason)


def reason_of(error: Exception) -> str:
    """The error in one line: its type, the line in a method's file, its text, what to do."""
    place = line_in_method(error)
    is_refusal = type(error) in REFUSALS and not place and bool(str(error))
    reason = str(error) if is_refusal else f"{type(error).__name__}{place}: {error}"
    if is_out_of_memory(error):
        sentence, *_ = reason.splitlines()[0].partition(". ")
        reason = f"{sentence}: lower batch-size or cache-mb, or set precision=bf16"
    return in_one_line(reason, MAX_REASON)


def is_for_user(error: Exception) -> bool:
    """Whether the user can fix it, a full disk included, so that a traceback would not help."""
    if isinstance(error, OSError) or is_out_of_memory(error):
        return True
    return isinstance(error, ValueError) and not line_in_method(error)  # else a bug in a method


def without_file_names(reason: str, error: Exception, source: str) -> str:
    """The reason as the server gets it: paths and files of a site may name people.

    source: of the client's node config; its path is left out too, as are $KEEL_HOME and the user's
    folder.
    """
    log_has_it = "this client's log names the file"
    if isinstance(error, ImageFileError):
        return f"{error.nameless} ({log_has_it})"
    if isinstance(error, ResetNeeded):
        return error.nameless
    if isinstance(error, PrivacyRefused) and error.nameless:
        return f"{error.nameless} ({log_has_it})"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{type(error).__name__}: {error.strerror} ({log_has_it})"
    # data-dir, cache and state lie there
    hidden = [(str(keel_home()), "…"), (os.path.expanduser("~"), "…")]
    kind, _, location = source.partition(":")
    if location:
        path = str(Path(os.path.expanduser(location)).absolute())  # with "..", as errors have it
        hidden = [(path, "…"), (source, f"{kind}:…"), *hidden]
    for name, shown in hidden:
        if name == os.sep:  # the root is in every path
            continue
        for spelt in (name, repr(name)[1:-1]):  # as text, and as an error quotes it
            reason = reason.replace(in_one_line(spelt, MAX_REASON), shown)
    return reason


def withholds_metrics(message: Message) -> bool:
    """Whether nothing measured on the data, an error's text included, may leave this client."""
    try:
        record = get_record(message.content, "round", ConfigRecord)
        return config_from_json(str(record["config"])).privacy.withholds_metrics
    except (KeyError, ValueError):
        return False


def is_about_machine(message: Message) -> bool:
    """Whether a query asks a simulation's worker about its machine."""
    record = find_record(message.content, "round", ConfigRecord)
    return record is not None and "token" in record


def query(message: Message, context: Context) -> RecordDict:
    """What the server asks before round 1: of a client, or of a simulation's worker."""
    if is_about_machine(message):
        node = context.node_config
        if is_deployed(node) or names_limit(node):  # a digest of the data would be exact
            raise ValueError("a query about the machine: only a simulation's worker answers that")
        return machine_content(report_of(read_request(message, PreflightRequest)))
    return roster(message, context)


def roster(message: Message, context: Context) -> RecordDict:
    """This client's data and network, before round 1."""
    request, node = read_request(message, RosterRequest), context.node_config
    config, data = request.config, request.data
    check_limits(config, node)
    if is_deployed(node):
        forget_data()
    train, test = own_splits(config, data, node, with_images=False)
    hides = config.privacy.withholds_metrics
    counts, test_counts = (
        [] if hides else np.bincount(split.labels, minlength=data.num_classes).tolist()
        for split in (train, test)
    )
    name = own_architecture(config, node)
    with turn():
        model = process_caches.of(config).network(config, data, name, "local", device_for("cpu"))
        width = representation_width(config, model)
    is_site = "source" in node
    entry = RosterEntry(
        client=client_name(node),
        image_shape=list(train.images.shape[1:]),
        model=name,
        representation_width=width,
        versions=f"flwr {flwr.__version__}, torch {torch.__version__}",
        num_partitions=0 if is_site else int(node["num-partitions"]),
        label_counts=counts,
        test_label_counts=test_counts,
        num_train=len(train.labels) if hides else 0,
        num_test=len(test.labels) if hides else 0,
        device=machine(device_for(str(node.get("device", config.train.device)))) if is_site else "",
    )
    return roster_content(entry)


def prepare(
    request: RoundRequest, message: Message, context: Context, before_round: int
) -> tuple[Callable[[], RoundContext], int]:
    """Read what was sent and this client's newest state of a round < before_round.

    Returns a function that begins the round, which needs `turn`, and `StateFolder.old_round`.
    """
    check_limits(request.config, context.node_config)
    if is_site(context.node_config):  # its ledger records the run's name
        checked_run_path(request, context.node_config)
    last_accepted_round = last_accepted_round_of(message)
    is_stateful, state, old_round = method_of(request.config).is_stateful, {}, 0
    if is_stateful:
        folder = state_folder(request, context.node_config)
        state = folder.load(before_round, last_accepted_round)
        old_round = folder.old_round
    received = tensors(get_record(message.content, "arrays", ArrayRecord))
    extra = tensors(find_record(message.content, "extra", ArrayRecord))

    def begin() -> RoundContext:
        ctx = process_caches.of(request.config).begin_round(
            request, context.node_config, received, extra, state, last_accepted_round
        )
        check_received(ctx)
        return ctx

    return begin, old_round


def check_received(ctx: RoundContext) -> None:
    """ValueError unless the server sent the part of its network that the method shares.

    Without this check, an array that is missing could be replaced by its initial weights.
    """
    method, name = method_of(ctx.config), ctx.config.model.model
    shares_nothing = method.shared_part == "nothing"  # each client's network is its own
    network = ctx.model if shares_nothing or ctx.model.name == name else ctx.network("global", name)
    expected: Arrays = {}
    if method.shared_part == "model":
        expected = network.tensors
    elif method.shared_part == "extractor":
        # only a method's own server half may send an extractor without the last stages
        is_split = method.has_own_server_half
        last_stage = method.split_stage(network) if is_split else network.stage_names[-1]
        expected = {key: network.tensors[key] for key in network.extractor_keys(last_stage)}
    found = ctx.received
    if method.has_own_server_half:  # it may send others beside them
        found = {key: array for key, array in found.items() if key in expected}
    if reason := mismatch(found, expected, with_values=False):
        raise ValueError(f"the model that the server sent does not fit {network.name}: {reason}")


@dataclass(frozen=True)
class Training:
    """One client's round between the message and the reply; the seconds are those until now."""

    request: TrainRequest
    context: Context
    ctx: RoundContext
    method: Method
    seconds: float
    cpu_seconds: float
    versions: dict[tuple[str, str], int]  # of `input_arrays`: torch counts changes in place
    old_round: int  # of the client state, as `prepare`


def begin_training(message: Message, context: Context, turns: ExitStack) -> Training:
    """Read the message and the client state, take the turn, then charge the release.

    Charged before data is read: every answer that may depend on it is counted, a failure too.
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    request = read_request(message, TrainRequest)
    begin, old_round = prepare(request, message, context, before_round=request.round)
    node, run = context.node_config, Path(request.run_dir).name
    started += turns.enter_context(turn())
    charge_release(request.config, node, client_name(node), run, request.round)
    ctx, method = begin(), method_of(request.config)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    versions = {name: array._version for name, array in input_arrays(ctx).items()}
    return Training(request, context, ctx, method, seconds, cpu_seconds, versions, old_round)


def train_one_round(message: Message, context: Context) -> RecordDict:
    """Train, save the client state, and answer with the update and its metrics.

    Other clients of this process train while this one reads and writes.
    """
    with ExitStack() as turns:
        training = begin_training(message, context, turns)
        started, cpu_started = time.perf_counter(), time.process_time()
        with products(training.ctx.precision):
            update = training.method.train(training.ctx)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        metrics = measure_training(training, update, seconds, cpu_seconds)
    return finish_training(training, update, metrics)


def measure_training(
    training: Training, update: Update, seconds: float, cpu_seconds: float
) -> dict[str, float]:
    """Check the update and copy it to the CPU; returns its metrics.

    The caller holds `turn`: otherwise the copies would wait for the steps of the next client.
    seconds, cpu_seconds: of training.

    If metrics are withheld, it returns only the number of samples, the number of steps, which
    follows from it, and the round of client state from an old backup. Client state that is not
    finite is then replaced by the state before this round: an error would reveal something about
    the data, and so would a missing version in the next round.
    """
    request, ctx, method = training.request, training.ctx, training.method
    check_unchanged(training)
    check_update(method, update)
    check_state(method, update)
    check_released(method, update, ctx)
    copy_shared(update, ctx)
    metrics: dict[str, float] = {
        "num-examples": len(ctx.train_samples),
        "num-steps": update.num_steps,
    }
    if training.old_round:
        metrics["old-state"] = training.old_round
    if not request.config.privacy.withholds_metrics:
        metrics |= {f"loss.{name}": value for name, value in update.terms.items()}
        metrics["seconds"] = training.seconds + seconds
        metrics["cpu-seconds"] = training.cpu_seconds + cpu_seconds
    elif not all(map(all_finite, update.state.values())):
        log.warning(
            "round %d: client %s: local training left values that are not finite; the client state "
            "is unchanged. %s",
            request.round,
            ctx.client,
            advice(method.rate_keys),
        )
        update.state = ctx.state
    sent = [("update", update.arrays), ("extra", update.extra)]
    refuse_unless_finite([*sent, *update.state.items()], ctx.faults, method.rate_keys)
    if request.evaluate:
        metrics |= personal_metrics(method, ctx, update.state)
    update.arrays, update.extra = (on_device(a, cpu) for a in (update.arrays, update.extra))
    update.state = {group: on_device(arrays, cpu) for group, arrays in update.state.items()}
    return metrics


def finish_training(training: Training, update: Update, metrics: dict[str, float]) -> RecordDict:
    """Save the client state; the reply."""
    request, client = training.request, training.ctx.client
    if training.method.is_stateful:
        folder = state_folder(request, training.context.node_config)
        folder.save(request.round, update.state)
        folder.prune(request.checkpoint_rounds)
    return reply_content(TrainReply(client, request.round, update.arrays, update.extra, metrics))


def input_arrays(ctx: RoundContext) -> dict[tuple[str, str], torch.Tensor]:
    """The received arrays and the client state, by where `ctx` has them and their name."""
    found = {"received": ctx.received, "extra": ctx.extra}
    found |= {f"state[{group!r}]": arrays for group, arrays in ctx.state.items()}
    return {(where, name): a for where, arrays in found.items() for name, a in arrays.items()}


def check_unchanged(training: Training) -> None:
    """TypeError if training has changed these in place.

    Other clients may read what was received, and the state has to be that of the round before if
    this round is repeated or the client fails.
    """
    ctx = training.ctx
    now = {name: array._version for name, array in input_arrays(ctx).items()}
    changed = [
        f"ctx.{where}[{name!r}]"
        for (where, name), version in training.versions.items()
        if now.get((where, name)) != version
    ]
    for network in ctx.networks.all():
        # its weights are received arrays or client state, without a copy
        overwritten = {n: tensor for n, tensor in network.tensors.items() if is_overwritten(tensor)}
        give_back(overwritten.values())  # the network is also the next client's
        changed += [f"{name} of a frozen model" for name in overwritten]
    if changed:
        raise TypeError(
            f"{type(training.method).__name__} changes {changed[0]} in place: received arrays are "
            "not the client's own, and a repeated round needs its old state; clone them first"
        )


def copy_shared(update: Update, ctx: RoundContext) -> None:
    """Copy the update's arrays that lie in memory which changes later.

    That is the memory of a network, in which other clients train, and, for client state, also that
    of the received arrays, which the server may change. Inference tensors, which have no version
    counter, are copied too. Afterwards no array requires a gradient.
    """
    shared = {
        tensor.untyped_storage().data_ptr()
        for network in ctx.networks.all()
        for tensor in network.tensors.values()
        if not is_borrowed(tensor)
    }

    def copied(arrays: Arrays) -> Arrays:
        return {name: copied_if_shared(array) for name, array in arrays.items()}

    def copied_if_shared(array: torch.Tensor) -> torch.Tensor:
        if array.is_inference() or array.untyped_storage().data_ptr() in shared:
            return array.detach().clone()
        return array.detach() if array.requires_grad else array

    update.arrays, update.extra = copied(update.arrays), copied(update.extra)
    received = (*ctx.received.values(), *ctx.extra.values())
    shared |= {array.untyped_storage().data_ptr() for array in received}
    update.state = {group: copied(arrays) for group, arrays in update.state.items()}


def check_update(method: Method, update: Any) -> None:
    """TypeError unless local training returned an `Update` with fields of the right types.

    Converts its numbers to `int` and `float`.
    """
    source = method.train
    if not isinstance(update, Update):
        raise TypeError(f"{place_of(source)} returned {type(update).__name__}: expected an Update")
    for name, kind in (
        ("arrays", "tensors"),
        ("extra", "tensors"),
        ("terms", "numbers"),
        ("state", "dicts of tensors"),
    ):
        found = getattr(update, name)
        if kind == "tensors":
            what = other_than_tensors(found)
        else:
            what = "" if isinstance(found, Mapping) else type(found).__name__
        if what:
            raise TypeError(
                f"{place_of(source)}: Update.{name} is {what}: expected a dict of {kind}"
            )
    check_groups(method, update.state)
    update.num_steps = converted(method, "num_steps", update.num_steps, operator.index)
    update.terms = {
        term: converted(method, f"terms[{term!r}]", value, float)
        for term, value in update.terms.items()
    }


def other_than_tensors(arrays: Any) -> str:
    """Why it is no dict of tensors, as "list" or "float in 'weight'"; "" if it is one."""
    if not isinstance(arrays, Mapping):
        return type(arrays).__name__
    for name, array in arrays.items():
        if not isinstance(array, torch.Tensor):
            return f"{type(array).__name__} in {name!r}"
    return ""


def converted(method: Method, name: str, value: Any, to: Callable[[Any], Any]) -> Any:
    """A number of an update as `int` or `float`; TypeError if it is not a number.

    to: `operator.index` or `float`. A tensor of one value is a number, too.
    """
    try:
        return to(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last: of a tensor
        expected = "a number" if to is float else "an int"
        raise TypeError(
            f"{type(method).__name__}: Update.{name} is {value!r}: expected {expected}"
        ) from error


def check_groups(method: Method, state: Mapping[str, Any]) -> None:
    """TypeError naming the group and the array, unless client state consists of named tensors."""
    for group, arrays in state.items():
        named = f"{type(method).__name__}: Update.state[{group!r}]"
        if what := other_than_tensors(arrays):
            raise TypeError(
                f"{named} is {what}: expected a dict of tensors, as in "
                'state={"model": {"weight": tensor}}'
            )
        if not all(isinstance(name, str) for name in (group, *arrays)) or "/" in group:
            raise TypeError(
                f"{named} has {[*arrays]}: expected strings as names, and no '/' in a group's"
            )
        if odd := [name for name, array in arrays.items() if array.dtype not in DTYPES]:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(
                f"{named}[{odd[0]!r}] is {arrays[odd[0]].dtype}: expected one of {allowed}"
            )


def check_released(method: Method, update: Update, ctx: RoundContext) -> None:
    """TypeError if with `privacy.epsilon` more is sent than the one release that is charged."""
    sent = sum(array.numel() for array in (*update.arrays.values(), *update.extra.values()))
    if ctx.config.privacy.epsilon and ctx.releases != [sent]:
        calls = " and ".join(map(str, ctx.releases)) or "none"
        raise TypeError(
            f"{type(method).__name__}: one call of `privatise` has to cover all that is sent with "
            f"privacy.epsilon, the {sent} values of Update.arrays and Update.extra: it was called "
            f"with {calls}; or set supports_privacy = False"
        )


def check_state(method: Method, update: Update) -> None:
    """TypeError where a method returns client state that its flag denies, or none that it promises.

    State of a method that is not stateful could be lost without anyone noticing.
    """
    if bool(update.state) != method.is_stateful:
        name, has = type(method).__name__, "returned" if update.state else "returned no"
        raise TypeError(
            f"{name}.train {has} client state in Update.state, and {name}.is_stateful is "
            f"{method.is_stateful}: set the flag to {not method.is_stateful}, or change the state"
        )


def refuse_unless_finite(
    groups: Sequence[tuple[str, Arrays]], faults: list[str], rate_keys: Sequence[str]
) -> None:
    """ValueError if training diverged: a client could never recover from such a state.

    faults: loss terms that were not finite although the weights were. rate_keys: of the method.
    """
    for name, arrays in groups:
        if not all_finite(arrays):
            raise ValueError(
                f"local training left values that are not finite in {name!r}; the client state is "
                "unchanged. " + (f"The loss term {faults[0]}" if faults else advice(rate_keys))
            )


def evaluate_models(message: Message, context: Context) -> RecordDict:
    """Accuracy and loss of the global and the personal model on the local test part."""
    request = read_request(message, EvaluateRequest)
    begin, _ = prepare(request, message, context, before_round=request.round + 1)
    method = method_of(request.config)
    with turn():
        ctx = begin()
        metrics: dict[str, float] = {"num-examples": len(ctx.train_samples)}
        if method.has_global_model and not request.config.privacy.withholds_metrics:
            score = evaluate(
                ctx.frozen("global", ctx.initial_weights() | ctx.received),
                ctx.test_samples,
                request.config.train.precision,
            )
            metrics |= {"global-accuracy": score.accuracy, "global-loss": score.loss}
        metrics |= personal_metrics(method, ctx, ctx.state)
    return reply_content(TrainReply(ctx.client, request.round, {}, {}, metrics))


def personal_metrics(
    method: Method, ctx: RoundContext, state: dict[str, Arrays]
) -> dict[str, float]:
    """The personal model's metrics, unless withheld, with the size of the local test part."""
    metrics: dict[str, float] = {"num-test": len(ctx.test_samples)}
    if ctx.config.privacy.withholds_metrics:
        return metrics
    model = method.personal_model(ctx, state)
    if model is not None:
        score = evaluate(model, ctx.test_samples, ctx.config.train.precision)
        metrics |= {"personal-accuracy": score.accuracy, "personal-loss": score.loss}
    return metrics


handlers: dict[str, Callable[[Message, Context], RecordDict]] = {
    MessageType.QUERY: query,
    MessageType.TRAIN: train_one_round,
    MessageType.EVALUATE: evaluate_models,
}
