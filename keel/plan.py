"""The plan of a run, which is shown before it starts."""

import shlex

from data.readers import PublishedSizes
from keel.deployment.superlink import flower_keys, run_config
from keel.job import Job
from keel.run_checks import data_size
from keel.saved_runs import PARTITION_KEYS
from protocol.config import RunConfig
from protocol.options import typed
from protocol.text import num_of, size_of_data

SHOWN = {  # in rows of their own
    *("method", "server-optimizer", "source", "data-fraction", "partition", "alpha"),
    *("classes-per-client", "shards-per-client", "model", "client-models", "num-clients"),
    *("train-fraction", "num-rounds", "local-epochs", "batch-size", "batches-per-epoch", "lr"),
    *("output-dir", "run-name", "resume", "method-options"),
}


def plan_rows(job: Job) -> list[tuple[str, str]]:
    """(label, text) of method, data, model, clients, rounds and the equivalent `flwr run` line.

    That line is left out where there is none; of a run to resume on a deployment, whose config is
    on the server, there is only the line.
    """
    config, is_remote = job.config, job.options.is_remote
    if is_remote and (name := str(job.overrides.get("resume", ""))):
        return [("resume", name), *flwr_rows(job)]
    data = f"{config.data.source} of the server; each client has its own"
    if not is_remote:
        data = data_text(config, data_size(config))
    rows = [
        ("method", method_text(config)),
        ("data", data),
        ("model", "; ".join(config.client_models or [config.model.model])),
        ("clients", clients_text(config)),
        ("rounds", rounds_text(config, job.resumed.last_round if job.resumed else 0)),
    ]
    if others := others_text(job):
        rows.append(("also set", others))
    return [*rows, *flwr_rows(job)]


def method_text(config: RunConfig) -> str:
    """The method with its options, and the server optimizer with its own."""
    rounds = config.rounds
    text = rounds.method + options_text(config, config.method_table)
    if rounds.server_optimizer != "fedavg":
        optimizer = rounds.server_optimizer
        text += f"; server optimizer {optimizer}{options_text(config, optimizer)}"
    return text


def options_text(config: RunConfig, table: str) -> str:
    """The keys of a table, as ` (mu 3.0, num-layers 2)`."""
    prefix = f"{table}."
    options = {k.removeprefix(prefix): v for k, v in config.flat.items() if k.startswith(prefix)}
    shown = [f"{key} {typed(value)}" for key, value in options.items() if value != ""]
    return f" ({', '.join(shown)})" if shown else ""


def data_text(config: RunConfig, size: PublishedSizes | None) -> str:
    """The source, its size and shape if they are known, and the partition."""
    data = config.data
    if size:
        numbers = size.num_train, size.num_test, size.image_shape, size.num_classes
        text = f"{data.source}: {size_of_data(*numbers)}"
    else:
        text = f"{data.source}: sizes are shown once it is read"
    if data.data_fraction < 1:
        text += f"; data-fraction {data.data_fraction:g}"
        if size:
            num = max(size.num_classes, round(data.data_fraction * size.num_train))
            text += f", about {num:,} of the training images"
    key = PARTITION_KEYS.get(data.partition)
    option = f", {key} {config.flat[key]}" if key else ""
    return f"{text}; partition {data.partition}{option}"


def clients_text(config: RunConfig) -> str:
    """How many clients there are (0: as many as are connected), and how many train in a round."""
    num_clients, fraction = config.rounds.num_clients, config.rounds.train_fraction
    if not num_clients:
        share = "all" if fraction == 1 else f"{100 * fraction:g} % of the"
        return f"{share} connected clients, every round"
    if fraction == 1:
        return f"{num_clients}, all of them in every round"
    return f"{num_clients}, {max(1, round(fraction * num_clients))} in a round"


def rounds_text(config: RunConfig, done: int) -> str:
    """The rounds, and what a client does in one."""
    from server_app.checks import unused_keys  # imports torch, as the checks before have

    train, unused = config.train, unused_keys(config)
    texts = {
        "local-epochs": num_of("local epoch", train.local_epochs),
        "batch-size": f"batch size {train.batch_size}",
        "lr": f"lr {train.lr:g}",
    }
    if train.batches_per_epoch:
        texts["batches-per-epoch"] = f"{train.batches_per_epoch} batches per epoch"
    used = ", ".join(text for key, text in texts.items() if key not in unused)
    past = f" ({done} of them done)" if done else ""
    return f"{config.rounds.num_rounds}{past}" + (f"; {used}" if used else "")


def others_text(job: Job) -> str:
    """The keys that were set and that no other row of the plan has."""
    tables = (f"{job.config.method_table}.", f"{job.config.rounds.server_optimizer}.")
    others = {k: v for k, v in job.overrides.items() if k not in SHOWN and not k.startswith(tables)}
    return ", ".join(f"{key} {typed(value)}" for key, value in sorted(others.items()))


def flwr_rows(job: Job) -> list[tuple[str, str]]:
    """The row of `flwr_line`, if there is one.

    flwr takes a connection's name, not a SuperLink's address, and own code from modules alone.
    """
    is_address = ":" in job.options.federation
    has_it = not is_address and all(own.is_module for own in job.config.own.values())
    return [("same as", flwr_line(job))] if has_it else []


def flwr_line(job: Job) -> str:
    """The equivalent command of Flower's, to be run in the directory of the app."""
    federation = job.options.federation
    command = [f"RAY_ADDRESS={job.ray}"] if job.ray else []
    command += ["flwr", "run", ".", *([federation] if federation else []), "--stream"]
    if job.overrides:
        command += ["--run-config", run_config(flower_keys(job.overrides))]
    if not federation:
        command += ["--federation-config", federation_config(job)]
    return shlex.join(command)


def federation_config(job: Job) -> str:
    """The simulation's size as `flwr run --federation-config` takes it."""
    settings = {
        "num-supernodes": job.num_workers,
        "client-resources-num-cpus": f"{job.options.cpus:g}",
        "client-resources-num-gpus": job.options.gpus_per_client,
    }
    return " ".join(f"{key}={value}" for key, value in settings.items() if value)
