"""Evaluation of a simulation's clients that have not trained, where personal models start alike.

All clients with the same network then have the same model, so the server evaluates it on all their
test parts in large batches. A message to each client would take five times the processor time.
"""

from dataclasses import replace

import numpy as np
import torch

from client_app.evaluation import predictions
from client_app.handlers import process_caches, turn
from client_app.methods import method_of
from client_app.samples import Samples, evaluation_batch
from client_app.setup import local_test_parts, open_source, pixels_of
from protocol.config import config_from_json
from protocol.messages import Arrays, EvaluateRequest
from strategies.sampling import name_of


def untrained_accuracies(
    request: EvaluateRequest, received: Arrays, clients: np.ndarray, num_clients: int
) -> dict[str, float]:
    """Each client's accuracy on its local test part before it has trained, by name.

    clients: their numbers, [n], from 0 to `num_clients` - 1. Their personal models start alike.
    """
    num_networks = max(1, len(request.config.client_models))  # client k has network k mod this
    accuracies: dict[str, float] = {}
    for number in range(num_networks):
        alike = clients[clients % num_networks == number]
        if len(alike):
            shares = _accuracies(request, received, alike, num_clients)
            accuracies |= zip(map(name_of, alike.tolist()), shares.tolist(), strict=True)
    return accuracies


def _accuracies(
    request: EvaluateRequest, received: Arrays, clients: np.ndarray, num_clients: int
) -> np.ndarray:
    """As `untrained_accuracies`, [n], of clients with one network."""
    config = config_from_json(request.config.to_json())  # by which this process caches networks
    method, source = method_of(config), open_source(config)
    parts, pixels = local_test_parts(config, num_clients), pixels_of(config, source)
    places = np.concatenate([parts[client] for client in clients])
    num_threads = torch.get_num_threads()
    is_right = []
    with turn():
        node_config = {"partition-id": int(clients[0]), "num-partitions": num_clients}
        request = replace(request, config=config)
        ctx = process_caches.of(config).begin_round(request, node_config, received, {}, {})
        torch.set_num_threads(num_threads)  # not those of a worker
        model = method.personal_model(ctx, {})
        assert model is not None
        for start in range(0, len(places), evaluation_batch):
            batch = places[start : start + evaluation_batch]
            images, labels = source.train.images[batch], source.train.labels[batch]
            samples = Samples(images, np.asarray(labels), pixels, ctx.device)
            for logits, y in predictions(model, samples, config.train.precision):
                is_right.append((logits.argmax(1) == y).cpu().numpy())
    sizes = parts.sizes[clients]
    owners = np.repeat(np.arange(len(clients)), sizes)
    shares: np.ndarray = np.bincount(owners, np.concatenate(is_right), len(clients)) / sizes
    return shares
