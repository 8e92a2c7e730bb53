"""A client's answers to query, train and evaluate.

Runs in the process of the ClientApp in simulation, and in the resident worker
(`client_app.worker_server`) where there is one.
"""

import copy
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict

from client_app.errors import error_reply, is_about_machine
from client_app.evaluation import Score, evaluate
from client_app.machine import machine, report_of
from client_app.method import Method, Update
from client_app.methods import method_of
from client_app.networks import products
from client_app.node_config import (
    NodeConfig,
    check_own_code,
    client_name,
    is_deployed,
    own_architecture,
    own_labels_in_run,
    own_roster_entry,
    own_splits,
    run_path,
    site_source,
    state_folder,
)
from client_app.process_cache import ProcessCache
from client_app.round import RoundContext
from client_app.scores import score_functions
from client_app.setup import (
    dataset_spec_of,
    device_for,
    forget_sources,
    open_site,
    representation_width,
    simulated_node,
)
from client_app.site_privacy import charge_release, check_limits, is_site
from client_app.state import StateFolder
from flower_adapter import GPU_LOST
from protocol.array_records import tensors
from protocol.arrays import Arrays, all_finite, mismatch
from protocol.config import config_from_json
from protocol.files import private_files
from protocol.messages import (
    DatasetSpec,
    EvaluateRequest,
    PreflightRequest,
    RosterRequest,
    RoundRequest,
    TrainReply,
    TrainRequest,
    find_record,
    get_record,
    last_accepted_round_of,
    machine_content,
    read_request,
    reply_content,
    roster_content,
)
from protocol.simulated import joined_reply, split_content
from protocol.text import labels_text

log = logging.getLogger("keel.client")
process_cache = ProcessCache()


def forget_data() -> None:
    """Drop cached data before another run in this process: the files may have changed."""
    process_cache.clear()
    forget_sources()


@private_files()
def answer(message: Message, context: Context) -> RecordDict | Error:
    """The content of the reply to a message, or an error of one line.

    A message for several simulated clients is answered for one after the other. A GPU_LOST error of
    one client is returned for the whole message.
    """
    if "simulated" not in message.content:
        return answer_as(message, context)
    try:
        check_is_simulated(context.node_config, "a message for several simulated clients")
    except ValueError as error:
        return error_reply(error, message, context)
    replies = []
    for client, num_clients, content in split_content(message.content):
        own = copy.copy(message)
        own.content = content
        node_config = node_config_in(content, client, num_clients)
        node = Context(context.run_id, context.node_id, node_config, RecordDict(), {})
        reply = answer_as(own, node)
        if isinstance(reply, Error) and reply.code == GPU_LOST:
            return reply  # the others would fail too
        replies.append(reply)
    return joined_reply(replies)


def node_config_in(content: RecordDict, client: int, num_clients: int) -> dict[str, Any]:
    """The node config of a simulated client that a message is for, by its number."""
    try:
        text = str(get_record(content, "round", ConfigRecord)["config"])
        return simulated_node(config_from_json(text), client, num_clients)
    except Exception:  # `answer_as` says why the message cannot be read
        return {"partition-id": client, "num-partitions": num_clients}


def answer_as(message: Message, context: Context) -> RecordDict | Error:
    """`answer` for one client."""
    try:
        return handlers[message.metadata.message_type](message, context)
    except Exception as error:
        return error_reply(error, message, context)


def check_is_simulated(node_config: NodeConfig, what: str) -> None:
    """ValueError for a site: it would compute without its limits, or send a digest of its data."""
    if is_site(node_config):
        raise ValueError(f"{what}: only a simulation's worker answers that")


def query(message: Message, context: Context) -> RecordDict:
    """What the server asks before round 1: of a client, or of a simulation's worker."""
    if is_about_machine(message):
        check_is_simulated(context.node_config, "a query about the machine")
        return machine_content(report_of(read_request(message, PreflightRequest)))
    request, node = read_request(message, RosterRequest), context.node_config
    config, data = request.config, request.data
    check_own_code(config, node)
    check_limits(config, node)
    if is_deployed(node):
        forget_data()
    has_source = bool(node.get("source"))
    asks_for_classes = has_source and not data.class_names
    if asks_for_classes:
        data = own_classes(request, node)
    train, test = own_splits(config, data, node, with_images=False)
    own_labels: list[str] = []
    if has_source:
        source, names = site_source(config, data, node), list(data.class_names)
        own_labels = names if asks_for_classes else own_labels_in_run(source, names)
        counts = np.bincount(train.labels, minlength=len(names)).tolist()
        meaning = labels_text(own_labels, names, counts)
        log.info("client %s: labels and training samples: %s", client_name(node), meaning)
        for note in source.notes:
            log.warning("client %s: %s", client_name(node), note)
    networks = process_cache.networks(config, data, node, device_for("cpu"))
    width = representation_width(config, networks.network(own_architecture(config, node), "local"))
    device = str(node.get("device", config.train.device))
    entry = own_roster_entry(
        config,
        node,
        train.images.shape[1:],
        width,
        [train.labels, test.labels],
        data.num_classes,
        device=machine(device_for(device)) if "source" in node else "",
        own_labels=own_labels,
    )
    return roster_content(entry)


def own_classes(request: RosterRequest, node: NodeConfig) -> DatasetSpec:
    """The classes and shape of a site's own data, for a run that has no others to compare with.

    ValueError where they must not be sent.
    """
    if request.config.privacy.withholds_metrics:
        raise ValueError(
            "the server asks for this site's classes, which privacy.metrics = 'withheld' keeps "
            "here: set classes in the run's config"
        )
    source = open_site(
        request.config,
        str(node["source"]),
        str(node.get("classes", "")),
        request.data.window or None,
    )
    return dataset_spec_of(request.config, source)


def begin_round(
    request: RoundRequest, message: Message, context: Context
) -> tuple[RoundContext, StateFolder | None]:
    """The client's round, and where its state is stored if the method has any.

    A release is charged before data is read: every answer that may depend on it is counted, a
    failure too.
    """
    config, node = request.config, context.node_config
    check_own_code(config, node)
    check_limits(config, node)
    if is_site(node):  # its ledger records the run's name
        run_path(request, node)
    last_accepted_round = last_accepted_round_of(message)
    is_training = isinstance(request, TrainRequest)
    before_round = request.round if is_training else request.round + 1
    folder = state_folder(request, node) if method_of(config).is_stateful else None
    state = folder.load(before_round, last_accepted_round) if folder else {}
    received = tensors(get_record(message.content, "arrays", ArrayRecord))
    extra = tensors(find_record(message.content, "extra", ArrayRecord))
    if is_training:
        charge_release(config, node, client_name(node), Path(request.run_dir).name, request.round)
    ctx = process_cache.begin_round(request, node, received, extra, state, last_accepted_round)
    check_received(ctx)
    return ctx, folder


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


def train(message: Message, context: Context) -> RecordDict:
    """Train, save the client state, and answer with the update and its metrics."""
    started, cpu_started = time.perf_counter(), time.process_time()
    request = read_request(message, TrainRequest)
    ctx, folder = begin_round(request, message, context)
    method = method_of(request.config)
    with products(ctx.precision):
        update = method.train(ctx)
        if not isinstance(update, Update):
            found = f"{type(method).__name__}.train returned a {type(update).__name__}"
            raise TypeError(f"{found}: expected a keel.Update")
    check_released(method, update, ctx)
    own_copy(update, ctx)
    metrics: dict[str, float] = {
        "num-examples": len(ctx.train_samples),
        "num-steps": update.num_steps,
    }
    if not request.config.privacy.withholds_metrics:
        metrics |= {f"loss.{name}": float(value) for name, value in update.terms.items()}
        metrics["seconds"] = time.perf_counter() - started
        metrics["cpu-seconds"] = time.process_time() - cpu_started
    refuse_unless_finite(method, update, ctx)
    if request.evaluate:
        metrics |= personal_metrics(method, ctx, update.state)
    if folder:
        folder.save(request.round, update.state)
        folder.prune(request.checkpoint_rounds)
    reply = TrainReply(ctx.client, request.round, update.arrays, update.extra, metrics)
    return reply_content(reply)


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


def own_copy(update: Update, ctx: RoundContext) -> None:
    """Move the update's arrays to the CPU, in memory that nothing changes later.

    The networks train other clients, and the server may change what it has sent.
    """
    networks = [network.state_dict() for network in ctx.networks.built.values()]
    shared = {
        array.untyped_storage().data_ptr()
        for arrays in (*networks, ctx.received, ctx.extra)
        for array in arrays.values()
    }

    def copied(arrays: Arrays) -> Arrays:
        own = {}
        for name, array in arrays.items():
            is_shared = array.is_inference() or array.untyped_storage().data_ptr() in shared
            own[name] = (array.detach().clone() if is_shared else array.detach()).cpu()
        return own

    update.arrays, update.extra = copied(update.arrays), copied(update.extra)
    update.state = {group: copied(arrays) for group, arrays in update.state.items()}


def refuse_unless_finite(method: Method, update: Update, ctx: RoundContext) -> None:
    """ValueError if training diverged: a client could never recover from such a state.

    If metrics are withheld, client state that is not finite is replaced by the state before this
    round instead: an error would reveal something about the data, and so would a missing version in
    the next round. What is sent is finite then (`client_app.privacy`).
    """
    groups = [("update", update.arrays), ("extra", update.extra), *update.state.items()]
    diverged = [name for name, arrays in groups if not all_finite(arrays)]
    if not diverged:
        return
    advice = (
        f"Lower {' or '.join(method.rate_keys)}, set clip-norm above 0, or look in the loss for a "
        "gradient that is not finite, such as that of sqrt at 0"
    )
    problem = f"local training left values that are not finite in {diverged[0]!r}"
    if ctx.config.privacy.withholds_metrics and diverged[0] in update.state:
        log.warning("round %d: client %s: %s. %s", ctx.round, ctx.client, problem, advice)
        update.state = ctx.state
        return
    cause = f"The loss term {ctx.faults[0]}" if ctx.faults else advice
    raise ValueError(f"{problem}; the client state is unchanged. {cause}")


def evaluate_models(message: Message, context: Context) -> RecordDict:
    """Accuracy and loss of the global and the personal model on the local test part."""
    request = read_request(message, EvaluateRequest)
    ctx, _ = begin_round(request, message, context)
    method = method_of(request.config)
    metrics: dict[str, float] = {"num-examples": len(ctx.train_samples)}
    if method.has_global_model and not request.config.privacy.withholds_metrics:
        score = evaluate(
            ctx.frozen("global", ctx.initial_weights() | ctx.received),
            ctx.test_samples,
            request.config.train.precision,
            score_functions(request.config),
        )
        metrics |= score_metrics("global", score, ctx)
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
        functions = score_functions(ctx.config)
        score = evaluate(model, ctx.test_samples, ctx.config.train.precision, functions)
        metrics |= score_metrics("personal", score, ctx)
    return metrics


def score_metrics(whose: str, score: Score, ctx: RoundContext) -> dict[str, float]:
    """The metrics of a model's score. whose: global or personal.

    The log says why a score has no number; the server names it in a warning.
    """
    for name, fault in score.faults.items():
        log.info("round %d: client %s: metric %s %s", ctx.round, ctx.client, name, fault)
    others = {f"{whose}-score.{name}": value for name, value in score.others.items()}
    return {f"{whose}-accuracy": score.accuracy, f"{whose}-loss": score.loss, **others}


handlers: dict[str, Callable[[Message, Context], RecordDict]] = {
    MessageType.QUERY: query,
    MessageType.TRAIN: train,
    MessageType.EVALUATE: evaluate_models,
}
