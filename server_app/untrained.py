"""Evaluation of simulated clients that have not trained yet (`Method.starts_alike`).

All such clients with the same network have the same personal model, so the server evaluates it on
all their test parts in large batches, instead of sending each client a message.
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
            found = _accuracies(request, received, alike, num_clients)
            accuracies |= zip(map(name_of, alike.tolist()), found.tolist(), strict=True)
    return accuracies


def _accuracies(
    request: EvaluateRequest, received: Arrays, clients: np.ndarray, num_clients: int
) -> np.ndarray:
    """As `untrained_accuracies`, [n], of clients with one network."""
    # the object that this process's clients have: caches compare configs by identity
    config = config_from_json(request.config.to_json())
    method, source = method_of(config), open_source(config)
    parts, pixels = local_test_parts(config, num_clients), pixels_of(config, source)
    places = np.concatenate([parts[client] for client in clients])
    num_threads = torch.get_num_threads()
    is_correct = []
    with turn():
        node_config = {"partition-id": int(clients[0]), "num-partitions": num_clients}
        request = replace(request, config=config)
        ctx = process_caches.of(config).begin_round(request, node_config, received, {}, {})
        torch.set_num_threads(num_threads)  # begin_round has set a worker's number
        model = method.personal_model(ctx, {})
        assert model is not None
        for start in range(0, len(places), evaluation_batch):
            batch = places[start : start + evaluation_batch]
            images, labels = source.train.images[batch], source.train.labels[batch]
            samples = Samples(images, np.asarray(labels), pixels, ctx.device)
            for logits, y in predictions(model, samples, config.train.precision):
                is_correct.append((logits.argmax(1) == y).cpu().numpy())
    sizes = parts.sizes[clients]
    owners = np.repeat(np.arange(len(clients)), sizes)
    num_correct = np.bincount(owners, np.concatenate(is_correct), len(clients))
    accuracies: np.ndarray = num_correct / sizes
    return accuracies
