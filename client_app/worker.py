"""What one process keeps warm for all the clients that it plays: networks on their device.

Nothing here belongs to a client: a run gives the same result whichever process plays whom.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from client_app.memory import keep_freed_memory
from client_app.methods import method_of
from client_app.methods.fedreco import FedReCo
from client_app.round import RoundContext
from client_app.samples import Pixels, Samples
from client_app.setup import build_network, client_indices, device_for, open_source
from client_app.state import StateFolder
from client_app.worker_socket import worker_variable
from data.sources import ImageSplit, Source
from models import StagedModel
from protocol.config import RunConfig, keel_home
from protocol.messages import Arrays, DatasetSpec, RoundRequest

# As this process found it: OMP_NUM_THREADS, which Ray sets to a client's share, or all cores.
threads_given = torch.get_num_threads()

samples_kept_bytes = 256 * 2**20  # in each worker, of clients played before

NodeConfig = Mapping[str, bool | int | float | str]


def client_name(node_config: NodeConfig) -> str:
    """The client's stable name: `name` of its node config, else from its partition's number."""
    if "name" in node_config:
        return str(node_config["name"])
    if "partition-id" in node_config:
        return f"client-{int(node_config['partition-id']):04d}"
    raise ValueError(
        "this SuperNode's node config has neither 'name' nor 'partition-id': start it with "
        '--node-config \'name="site-a" source="folder:/data"\''
    )


def own_splits(
    config: RunConfig, data: DatasetSpec, node_config: NodeConfig, with_images: bool = True
) -> tuple[ImageSplit, ImageSplit]:
    """(training, local test) images of this client; none of them, but all labels, if not asked for.

    Its own where its node config names a `source`; else its partition of the run's source. Labels
    are the run's (`data`). ValueError naming what does not fit with it.
    """
    if "source" in node_config:
        source = open_source(config, str(node_config["source"]))
        labels = labels_in_run(client_name(node_config), source, data)
        train, test = (
            ImageSplit(split.images, labels[split.labels]) for split in (source.train, source.test)
        )
        return train, test
    if "partition-id" not in node_config:
        raise ValueError(
            f"{client_name(node_config)}: its node config names no data: give it "
            'source="folder:PATH" or source="npz:PATH"'
        )
    source = open_source(config)
    for what, mine, runs in (
        ("the image shape", source.image_shape, data.image_shape),
        ("the classes", source.class_names, data.class_names),
    ):
        if mine != runs:  # another copy of it, on another machine
            raise ValueError(
                f"{client_name(node_config)}: the run's source {source.name} has {what} {mine} "
                f"here, and {runs} on the server: both have to be the same"
            )
    train = source.train
    parts = client_indices(
        config, int(node_config["partition-id"]), int(node_config["num-partitions"])
    )
    own, test = (
        ImageSplit(train.images[part if with_images else part[:0]], train.labels[part])
        for part in parts
    )
    return own, test


def labels_in_run(client: str, own: Source, run: DatasetSpec) -> np.ndarray:
    """The label in the run of each class of a client's own data, found by the class's name.

    Where the names are the labels themselves (as of an npz file), those count.
    ValueError naming a class that the run does not have.
    """
    numbers = tuple(str(n) for n in range(own.num_classes))
    names = numbers[: run.num_classes] if own.class_names == numbers else run.class_names
    strange = [name for name in own.class_names if name not in names]
    if strange:
        raise ValueError(
            f"{client}: its own data has the class {strange[0]!r}, the run has {', '.join(names)}"
        )
    return np.array([names.index(name) for name in own.class_names])


def own_architecture(config: RunConfig, node_config: NodeConfig) -> str:
    """The name of this client's network: of its node config, of `client-models`, or the run's."""
    if "model" in node_config:
        return str(node_config["model"])
    names = config.client_models
    if names and "partition-id" in node_config:
        return names[int(node_config["partition-id"]) % len(names)]
    return config.model.model


def compile_passes(model: StagedModel, device: torch.device) -> None:
    """From now on the model's passes, to the logits or to taps, are compiled at first use.

    ValueError where the compiler that torch calls for this device is missing, so that it is said
    before round 1: $CXX or g++ for its C++ on a CPU, $CC, gcc or clang for Triton's C on a GPU.
    """
    kind, variable, names = "C++", "CXX", ["g++"]
    if device.type == "cuda":
        kind, variable, names = "C", "CC", ["gcc", "clang"]
    if given := os.environ.get(variable):
        names = shlex.split(given)[:1]  # of "ccache g++" too
    if not any(shutil.which(name) for name in names):
        raise ValueError(
            f"compile = true: torch needs a {kind} compiler on {device.type}, and there is no "
            f"{' or '.join(names)} here: install one, set {variable}, or leave the key out"
        )
    for name in ("forward", "run"):
        setattr(model, name, torch.compile(getattr(model, name)))


class Worker:
    """Builds each network once a process and lends it to one client after the other."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._key: tuple[object, ...] = ()
        self._networks: dict[tuple[str, str], StagedModel] = {}
        self._initial: dict[str, Arrays] = {}
        self._samples: dict[frozenset[tuple[str, object]], tuple[Samples, Samples]] = {}
        self.has_said_no_room = False  # in a cache of frozen outputs, in this run

    def _forget_other_runs(
        self, config: RunConfig, data: DatasetSpec, device: torch.device
    ) -> None:
        if (config, data, device) != self._key:
            self._key = (config, data, device)
            self._networks, self._initial, self._samples = {}, {}, {}
            self.has_said_no_room = False

    def samples(
        self, config: RunConfig, data: DatasetSpec, node_config: NodeConfig, device: torch.device
    ) -> tuple[Samples, Samples]:
        """(training, local test) samples of this client, kept for its next round.

        Of all clients, the last ones played are kept, within `samples_kept_bytes`.
        """
        self._forget_other_runs(config, data, device)
        client = frozenset(node_config.items())
        own = self._samples.pop(client, None)
        if own is None:
            pixels = Pixels(data.mean, data.std)
            splits = own_splits(config, data, node_config)
            train, test = (Samples(s.images, s.labels, pixels, device) for s in splits)
            own = (train, test)
        self._samples[client] = own  # the newest is the last
        forms = 2 if config.data.flip else 1  # with flips: plain and mirrored
        sizes = {c: sum(forms * s.images.nbytes for s in kept) for c, kept in self._samples.items()}
        for other in list(self._samples)[:-1]:
            if sum(sizes.values()) > samples_kept_bytes:
                del self._samples[other], sizes[other]
        return own

    def network(
        self, config: RunConfig, data: DatasetSpec, name: str, slot: str, device: torch.device
    ) -> StagedModel:
        """The network `name` of this run; one instance a slot ("local", "global", ...)."""
        self._forget_other_runs(config, data, device)
        if (name, slot) not in self._networks:
            model = build_network(config, data.image_shape, data.num_classes, name)
            self._initial[name] = {k: v.clone() for k, v in model.state_dict().items()}
            self._networks[name, slot] = model.to(device)
            if config.train.compile:
                compile_passes(model, device)
        return self._networks[name, slot]

    def initial_weights(self, name: str) -> Arrays:
        """The weights that the run's seed gives the network `name`, once it was built."""
        return self._initial[name]

    def random_weights(self, config: RunConfig, data: DatasetSpec, name: str, seed: int) -> Arrays:
        """Weights for the network `name` that no other seed gives."""
        return build_network(config, data.image_shape, data.num_classes, name, seed).state_dict()

    def begin_round(
        self,
        request: RoundRequest,
        node_config: NodeConfig,
        received: Arrays,
        extra: Arrays,
        state: dict[str, Arrays],
        last_accepted_round: int = 0,
    ) -> RoundContext:
        """Everything that a method reads of this client in this round."""
        config, data = request.config, request.data
        torch.set_num_threads(config.train.threads or threads_given)
        device = device_for(str(node_config.get("device", config.train.device)))
        train, test = self.samples(config, data, node_config, device)
        return RoundContext(
            config=config,
            data=data,
            client=client_name(node_config),
            round=request.round,
            device=device,
            train_samples=train,
            test_samples=test,
            received=_on(device, received),
            extra=_on(device, extra),
            state=state,
            last_accepted_round=last_accepted_round,
            model=self.network(
                config, data, own_architecture(config, node_config), "local", device
            ),
            is_simulated="source" not in node_config,
            worker=self,
        )


def _on(device: torch.device, arrays: Arrays) -> Arrays:
    return {name: array.to(device) for name, array in arrays.items()}


def clients_folder() -> Path:
    """What deployed clients keep, one folder a run: a volume of their own, if they have one."""
    return keel_home() / "clients"


def state_folder(request: RoundRequest, node_config: NodeConfig) -> StateFolder:
    """Where this client keeps its state of this run.

    In deployment under `state-dir` of its node config or in $KEEL_HOME/clients, by the name of the
    run's folder, which a resumed run keeps (Flower's run id is another one then); in simulation in
    the run's folder, which is on this machine.
    """
    name, run_dir = client_name(node_config), Path(request.run_dir)
    if "state-dir" in node_config:
        return StateFolder(Path(str(node_config["state-dir"])) / run_dir.name / name)
    if os.environ.get(worker_variable) or not run_dir.is_dir():
        return StateFolder(clients_folder() / run_dir.name / name)
    return StateFolder(run_dir / "clients" / name)


@lru_cache(maxsize=4)  # the roster asks once a client, of networks that are the same
def representation_width(config: RunConfig, model: StagedModel) -> int:
    """How many entries the representation of one image has, at the method's split."""
    method = method_of(config)
    split = method.split_of(model) if isinstance(method, FedReCo) else model.stage_names[-1]
    image = torch.zeros(1, *model.input_shape, device=model.classifier.weight.device)
    with torch.no_grad():
        return model.eval().extract(image, split).numel()
