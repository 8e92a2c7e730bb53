"""What a client's node config determines: its name, data, network and state folder."""

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import flwr
import numpy as np
import torch

from client_app.setup import client_indices, open_site, open_source
from client_app.state import StateFolder, max_rounds_ahead, state_file
from client_app.worker_client import worker_variable
from data.sources import ImageSplit, Source
from protocol.config import RunConfig, keel_home
from protocol.config_keys import names_in
from protocol.messages import DatasetSpec, RosterEntry, RoundRequest
from protocol.options import did_you_mean
from protocol.text import check_client_name

# accepts every valid `run-name`, and longer names
RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
NODE_KEYS = (
    "name", "source", "classes", "device", "model", "state-dir", "partition-id", "num-partitions",
)  # fmt: skip
OWN_CODE = "KEEL_OWN_CODE"  # a site's packages for own code, separated by commas
NodeConfig = Mapping[str, bool | int | float | str]


def client_name(node_config: NodeConfig) -> str:
    """The client's stable name: `name` of its node config, else from its partition's number.

    ValueError for a name that the server would reject, or where there is neither.
    """
    if "name" in node_config:
        return check_client_name(node_config["name"])
    if "partition-id" in node_config:
        return f"client-{whole_number(node_config, 'partition-id'):04d}"
    raise ValueError(
        "this SuperNode's node config has neither 'name' nor 'partition-id': start it with "
        '--node-config \'name="site-a" source="folder:/data"\''
    )


def whole_number(node_config: NodeConfig, key: str) -> int:
    """The value of a key of a partition. ValueError unless it is there and a whole number."""
    value = node_config.get(key)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{key} = {value!r} in its node config: expected a whole number, as in "
            "'partition-id=0 num-partitions=10'"
        ) from None


def is_deployed(node_config: NodeConfig) -> bool:
    """Whether this is a client of a deployment: with data of its own, or in a resident worker."""
    return "source" in node_config or bool(os.environ.get(worker_variable))


def own_splits(
    config: RunConfig, data: DatasetSpec, node_config: NodeConfig, with_images: bool = True
) -> tuple[ImageSplit, ImageSplit]:
    """(training, local test) images and labels of this client; labels alone without `with_images`.

    From its own data if its node config names a `source`; otherwise its partition of the run's data
    set. Labels are the run's (`data`); where metrics are withheld, images are converted to the
    run's shape too. ValueError, naming what differs, if the two disagree.
    """
    client_name(node_config)  # raises without one, before data is read
    if node_config.get("source"):
        source = site_source(config, data, node_config)
        labels = labels_in_run(source, data.class_names)
        train, test = (
            ImageSplit(split.images, labels[split.labels]) for split in (source.train, source.test)
        )
        return train, test
    if "partition-id" not in node_config or "source" in node_config:  # an empty one is no data
        raise ValueError(
            'its node config names no data: add source="folder:PATH" or source="npz:PATH"'
        )
    partition, num = (whole_number(node_config, k) for k in ("partition-id", "num-partitions"))
    if not 0 <= partition < num:
        raise ValueError(
            f"partition-id = {partition}, num-partitions = {num} in its node config: expected the "
            "first to be at least 0 and below the second"
        )
    source = open_source(config)
    for what, mine, runs in (
        ("the image shape", source.image_shape, data.image_shape),
        ("the classes", source.class_names, data.class_names),
    ):
        if mine != runs:  # another copy of the data set, on another machine
            raise ValueError(
                f"the run's source {source.name} has {what} {mine} here, and {runs} on the server: "
                "expected the same on both"
            )
    train = source.train
    parts = client_indices(config, partition, num)
    own, test = (
        ImageSplit(train.images[part if with_images else part[:0]], train.labels[part])
        for part in parts
    )
    return own, test


def site_source(config: RunConfig, data: DatasetSpec, node_config: NodeConfig) -> Source:
    """This client's own data, which its node config names."""
    spec, classes = str(node_config["source"]), str(node_config.get("classes", ""))
    shape = data.image_shape if config.privacy.withholds_metrics else None
    return open_site(config, spec, classes, data.window, shape)


def labels_in_run(own: Source, class_names: Sequence[str]) -> np.ndarray:
    """The run's label of each class of a client's own data, found by the class's name alone.

    class_names: the run's. -1 for a class that has neither a sample nor a name in the run.
    ValueError naming a class that the run does not have.
    """
    label_of: dict[str, int] = {}
    for find in (str, _composed):  # of names that differ in Unicode form alone, the same form first
        for label, name in enumerate(class_names):
            label_of.setdefault(find(name), label)
    labels = np.array([label_of.get(n, label_of.get(_composed(n), -1)) for n in own.class_names])
    used = np.union1d(own.train.labels, own.test.labels)
    if len(unknown := used[labels[used] < 0]):
        name = own.class_names[unknown[0]]
        raise ValueError(
            f"its own data has the class {name!r}, the run has {', '.join(class_names)}"
            f"{did_you_mean(name, class_names)}{how_to_name(own)}"
        )
    return labels


def how_to_name(own: Source) -> str:
    """The way out for an npz file whose labels have no names; "" for other data."""
    if not own.name.startswith("npz:") or own.own_labels != own.class_names:
        return ""
    return (
        "; the labels of its npz file have no names: name them in the file's array `classes`, or "
        'with classes="1=cat,2=dog" in the node config'
    )


def own_labels_in_run(own: Source, class_names: Sequence[str]) -> list[str]:
    """What this client's data calls each class of the run; "" for one that it lacks."""
    own_of = {label: own.own_labels[k] for k, label in enumerate(labels_in_run(own, class_names))}
    return [own_of.get(label, "") for label in range(len(class_names))]


def _composed(name: str) -> str:
    """The name with each accented letter as one character: file names of macOS have them as two."""
    return unicodedata.normalize("NFC", name)


def own_architecture(config: RunConfig, node_config: NodeConfig) -> str:
    """The name of this client's network, from its node config, `client-models`, or the run's."""
    if "model" in node_config:
        name = str(node_config["model"])
        config.refuse_unknown_model("model", name)
        return name
    names = config.client_models
    if names and "partition-id" in node_config:
        return names[whole_number(node_config, "partition-id") % len(names)]
    return config.model.model


def own_roster_entry(
    config: RunConfig,
    node_config: NodeConfig,
    image_shape: Sequence[int],
    width: int,
    labels: Sequence[np.ndarray],
    num_classes: int,
    device: str = "",
    own_labels: Sequence[str] = (),
) -> RosterEntry:
    """How this client describes itself. labels: of its training samples, of its local test part."""
    hides = config.privacy.withholds_metrics
    counts = [np.bincount(part, minlength=num_classes).tolist() for part in labels]
    return RosterEntry(
        client=client_name(node_config),
        image_shape=list(image_shape),
        model=own_architecture(config, node_config),
        representation_width=width,
        versions=f"flwr {flwr.__version__}, torch {torch.__version__}",
        num_partitions=0 if "source" in node_config else int(node_config["num-partitions"]),
        label_counts=[] if hides else counts[0],
        test_label_counts=[] if hides else counts[1],
        num_train=len(labels[0]) if hides else 0,
        num_test=len(labels[1]) if hides else 0,
        device=device,
        own_labels=[] if hides else list(own_labels),
    )


def check_own_code(config: RunConfig, node_config: NodeConfig) -> None:
    """ValueError, one line, unless this client has the run's own code, of the server's digest.

    A site names in $KEEL_OWN_CODE the packages from which its server may choose: without this, it
    could have any function of the machine called.
    """
    offered = names_in(os.environ.get(OWN_CODE, ""))
    for own in config.own.values():
        package = own.place.partition(".")[0]
        if is_deployed(node_config) and package not in offered:
            found = f"{OWN_CODE}={','.join(offered)}" if offered else f"{OWN_CODE} is not set"
            raise ValueError(
                f"{own.spec}: this site does not offer {package} ({found}): install it at the "
                "site, and add it to this variable there"
            )
        _ = own.value  # raises


def clients_folder() -> Path:
    """The state of deployed clients, one folder per run; usually on a volume of its own."""
    return keel_home() / "clients"


def run_path(request: RoundRequest, node_config: NodeConfig) -> Path:
    """The run directory's name or, in a simulation, its path. ValueError for any other."""
    sent = request.run_dir
    path = Path(sent)
    is_allowed = not is_deployed(node_config) if path.is_absolute() else sent == path.name
    if not is_allowed or ".." in path.parts or not RUN_NAME.fullmatch(path.name):
        raise ValueError(
            f"run-dir = {sent[:200]!r}: expected the name of a run (letters, digits, '.', '_', "
            "'-') or, in a simulation, the path of its directory: this client writes nowhere else"
        )
    return path


def state_folder(request: RoundRequest, node_config: NodeConfig) -> StateFolder:
    """Where this client's state of this run is stored.

    In deployment, under `state-dir` of its node config or in $KEEL_HOME/clients, by the name of the
    run directory, which does not change on a resume (Flower's run id does). In simulation, in the
    run directory, if that is on this machine. ValueError for a `run-dir` outside of these, and in a
    resident worker for a `state-dir` outside of $KEEL_HOME/clients. In deployment also for a folder
    named like a file of client state: it would count as that file in another run's folder.
    """
    client, path = client_name(node_config), run_path(request, node_config)
    run = path.name
    max_ahead = max_rounds_ahead(request.config.rounds.checkpoint_every)
    base = Path(os.path.expanduser(str(node_config.get("state-dir", ""))))
    names = (*base.parts, run, client) if is_deployed(node_config) else ()
    if taken := [name for name in names if state_file.fullmatch(name)]:
        raise ValueError(
            f"{taken[0][:200]!r}: expected another name: no run, client or folder of state-dir may "
            "be named like a file of client state"
        )
    if "state-dir" in node_config:
        clients, own = clients_folder().resolve(), base.resolve()
        if os.environ.get(worker_variable) and not own.is_relative_to(clients):
            # the node config passes through the run's code
            raise ValueError(
                f"state-dir = {str(base)[:200]!r}: expected a folder below {clients}: move the "
                "state there; a resident worker writes nowhere else"
            )
        return StateFolder(base / run / client, max_ahead, request.run_id)
    if path.is_absolute() and path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"run-dir = {request.run_dir[:200]!r}: is not a run directory (no config.json)"
            )
        return StateFolder(path / "clients" / client, max_ahead)
    return StateFolder(clients_folder() / run / client, max_ahead, request.run_id)
