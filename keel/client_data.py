"""A client's part of the data of a simulation, as training saw it."""

from typing import NamedTuple

import numpy as np

from keel.saved_runs import SavedRun
from protocol.options import did_you_mean
from protocol.text import num_of, shortened

WHITE = np.float32(255)  # times the user's floats


class Part(NamedTuple):
    """Images uint8 or float32 [N, C, H, W] and labels int64 [N], indices of the classes."""

    images: np.ndarray
    labels: np.ndarray

    def __repr__(self) -> str:
        """The number of images, their type and shape."""
        shape = " x ".join(map(str, self.images.shape[1:]))
        return f"Part({num_of('image', len(self.labels))}, {self.images.dtype} {shape})"


class ClientData(NamedTuple):
    """A client's training samples and its local test part, which may be empty."""

    train: Part
    test: Part


def client_data(run: SavedRun, client: str) -> ClientData:
    """The samples of a client. ValueError for an unknown client, and for one of a deployment."""
    from client_app.node_config import own_splits
    from client_app.setup import dataset_spec_of, open_source, simulated_node

    config = run.run_config
    if run.has_sites:
        raise ValueError(f"client = {client!r}: the data of a deployment's client is at its site")
    num = int(run.config["num-clients"])
    nodes = (simulated_node(config, number, num) for number in range(num))
    by_name = {node.get("name", f"client-{node['partition-id']:04d}"): node for node in nodes}
    if client not in by_name:
        expected = f"expected one of {shortened(list(by_name))}{did_you_mean(client, by_name)}"
        raise ValueError(f"client = {client!r}: {expected}")
    spec = dataset_spec_of(config, open_source(config))
    train, test = own_splits(config, spec, by_name[client])
    train_part, test_part = (
        Part(each.images / WHITE if each.images.dtype == np.float32 else each.images, each.labels)
        for each in (train, test)
    )
    return ClientData(train_part, test_part)
