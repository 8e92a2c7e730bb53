"""A small source, and one client's round on it, for the tests of the client side.

60 training and 18 test images of 28 x 28 grey pixels in 3 classes, from a fixed seed.
"""

import os
import tempfile
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message
from grid_fixtures import InlineGrid

from client_app.methods import method_of
from client_app.objective import Batch
from client_app.process_cache import ProcessCache
from client_app.setup import build_network, dataset_spec_of, open_source
from keel.method_checks import Subject
from models.cnn import _plain_cnn
from models.registry import BUILDERS
from protocol.array_records import array_record
from protocol.config import resolve_config
from protocol.messages import TrainRequest, message_content, request_record
from protocol.models import MODELS, ModelSpec

SHAPE, NUM_CLASSES = (1, 28, 28), 3


def pictures(num, seed):
    """Images uint8 [N, 28, 28], brighter in one third of the rows, and labels that say which."""
    generator = np.random.default_rng(seed)
    labels = np.arange(num) % NUM_CLASSES
    images = generator.integers(0, 160, (num, 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[9 * label : 9 * label + 9] += 95
    return images.astype(np.uint8), labels


@lru_cache(maxsize=1)
def folder():
    """Where the source is; gone when the tests end."""
    made = tempfile.TemporaryDirectory(prefix="keel-tests-")
    x_train, y_train = pictures(60, seed=1)
    x_test, y_test = pictures(18, seed=2)
    path = Path(made.name) / "small.npz"
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return made


def add_model(monkeypatch, name, build, **spec):
    """Another model under this name, for one test: `build` takes the input shape."""
    monkeypatch.setitem(MODELS, name, ModelSpec(**spec))
    monkeypatch.setitem(BUILDERS, name, build)


def add_small_cnn(monkeypatch):
    """The model small-cnn, whose features are as wide as cnn-fedreco's."""
    build = partial(_plain_cnn, kernel=3, conv_widths=(4,), fc_widths=(84,))
    add_model(monkeypatch, "small-cnn", build)


def small_source():
    """The `source` key of the small source."""
    return f"npz:{Path(folder().name) / 'small.npz'}"


def subject_of(method):
    """The method under test, on images that all subjects share."""
    return Subject(method, Path(folder().name))


def make_config(**keys):
    """A config on the small source; `fedreco__eta_u=1` is the key fedreco.eta-u."""
    given = {k.replace("__", ".").replace("_", "-"): v for k, v in keys.items()}
    base = {
        "source": small_source(),
        "model": "cnn-fedreco",
        "partition": "iid",
        "min-samples": 1,
        "batch-size": 8,
        "lr": 0.05,
        "device": "cpu",
    }
    return resolve_config(base | given)


def facts(config):
    """What the clients are told of the run's source."""
    return dataset_spec_of(config, open_source(config))


def initial(config, seed=None):
    """The weights that the run starts from; with a seed, others of the same shapes."""
    return build_network(config, SHAPE, NUM_CLASSES, seed=seed).state_dict()


def make_round(
    config, number=1, received=None, state=None, partition=0, of=2, cache=None, extra=None
):
    """Client `partition`'s round `number`, with 60 / `of` training samples."""
    request = TrainRequest(config, facts(config), number, [number - 1], False, "")
    return (cache or ProcessCache()).begin_round(
        request,
        {"partition-id": partition, "num-partitions": of},
        received=initial(config) if received is None else received,
        extra=extra or {},
        state=state or {},
    )


def train(config, **about):
    """What the run's method makes of one round; see `make_round`."""
    return method_of(config).train(make_round(config, **about))


def assert_same_bits(arrays, others, names=None):
    """The arrays have equal values under the same names (or under `names`)."""
    if names is None:
        assert arrays.keys() == others.keys()
    for name in arrays if names is None else names:
        assert torch.equal(arrays[name], others[name]), name


def differ(arrays, others):
    """Names under which the arrays are not the same."""
    return [name for name in arrays if not torch.equal(arrays[name], others[name])]


def assert_close(arrays, others, **tolerance):
    """The arrays agree under the names of the first, compared in float64."""
    for name, array in arrays.items():
        x, y = array.double().cpu(), others[name].double().cpu()
        if x.shape != y.shape or not torch.allclose(x, y, **{"rtol": 0, "atol": 0} | tolerance):
            # slower, and says where and by how much
            torch.testing.assert_close(x, y, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def batch_of(
    reps=(),
    reps_global=(),
    reps_previous=(),
    *,
    y=None,
    logits=None,
    ctx=None,
    global_model=None,
    prepared=None,
):
    """A Batch with what one test needs of it."""
    none = torch.empty(0)
    return Batch(
        ctx=ctx,
        x=none,
        y=none if y is None else y,
        logits=none if logits is None else logits,
        reps=list(reps),
        reps_global=list(reps_global),
        reps_previous=list(reps_previous),
        global_model=global_model,
        prepared=prepared,
    )


class Client:
    """One SuperNode, asked directly: the ClientApp behind Flower's own messages."""

    def __init__(self, config, run_dir, node_config=None):
        node = {"partition-id": 0, "num-partitions": 2} if node_config is None else node_config
        self.grid = InlineGrid([node])
        self.config, self.run_dir, self.facts = config, Path(run_dir), facts(config)
        self.is_site = "source" in node
        if run_dir and self.run_dir.is_dir():  # without one, nothing is written here
            (self.run_dir / "config.json").touch()  # as the server does

    def ask(self, kind, number=0, arrays=None, evaluate=False, checkpoint=0, counted=0, extra=None):
        """The reply to a message of this kind (query, train, evaluate)."""
        run_dir = self.run_dir  # a simulation's path, or a deployment's name
        if not run_dir.is_dir() or self.is_site or os.environ.get("KEEL_WORKER"):
            run_dir = run_dir.name
        about = number, [checkpoint], evaluate, str(run_dir)
        request = TrainRequest(self.config, self.facts, *about)
        content = message_content(
            request_record(request), array_record(arrays or {}), array_record(extra or {}), counted
        )
        return self.send(content, kind)

    def send(self, content, kind):
        """The reply to a message with this content."""
        (node,) = self.grid.get_node_ids()
        message = Message(content, dst_node_id=node, message_type=kind)
        (reply,) = self.grid.pull_messages(self.grid.push_messages([message]))
        return reply
