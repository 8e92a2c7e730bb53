"""Local training alone, in one process on one core: each method against FedAvg, or its plain form.

Processor seconds, because other work on the machine does not count there; the least of interleaved
repetitions. One client, random images, a previous model that is not the global one.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.methods import method_of
from client_app.methods.fedintr import cosines, representation_losses, similarity_weights
from client_app.process_cache import ProcessCache
from client_app.round import RoundContext
from client_app.setup import dataset_spec_of, model_for, open_source
from keel.benchmarks import bare
from keel.benchmarks.engine import W1
from keel.benchmarks.report import Row
from models import StagedModel
from protocol.config import RunConfig, keel_home, resolve_config
from protocol.messages import TrainRequest
from protocol.options import OptionValue

Keys = dict[str, OptionValue]
Run = Callable[[], object]


def random_source(folder: Path, num: int) -> str:
    """The `source` key of so many random 32 x 32 colour images in 10 classes."""
    path = folder / f"random-{num}.npz"
    if not path.exists():
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(num) % 10
        np.savez(path, x_train=images, y_train=labels, x_test=images[:50], y_test=labels[:50])
    return f"npz:{path}"


def weights(config: RunConfig, seed: int) -> dict[str, Tensor]:
    """Of the run's network, drawn from a seed."""
    return model_for(config, open_source(config), seed=seed).state_dict()


def client_round(keys: Keys, cache: ProcessCache) -> RoundContext:
    """Round 2 of a client that holds the whole source."""
    config = resolve_config({"partition": "iid", "device": "cpu", **keys})
    w = weights(config, 1)
    names = {n for n, _ in model_for(config, open_source(config)).named_parameters()}
    sent = w
    if config.rounds.method == "fedreco":
        sent = {n: a for n, a in w.items() if not n.startswith("classifier")}
    zeros, one = {n: torch.zeros_like(w[n]) for n in names}, torch.tensor(1)
    control = {"control": zeros, "control-before": zeros, "control-made": {"round": one}}
    return cache.begin_round(
        TrainRequest(config, dataset_spec_of(config, open_source(config)), 2, 1, False, ""),
        {"partition-id": 0, "num-partitions": 1},
        received=sent,
        extra={f"c.{n}": array for n, array in zeros.items()},
        state={"previous": weights(config, 2)} | control,
        last_accepted_round=1,
    )


def local_training(keys: Keys) -> Run:
    """Local training of one round, from the same weights each time."""
    now = client_round(keys, ProcessCache())
    return lambda: method_of(now.config).train(now)


def plain_fedintr(keys: Keys) -> Run:
    """FedIntR as its authors' code runs it: three whole forward passes in every step."""
    config = resolve_config({"partition": "iid", "device": "cpu", **keys})
    now = client_round(keys, ProcessCache())
    source = open_source(config)
    x_all = torch.stack([x for b, _ in now.train_samples.in_order() for x in b]).contiguous()

    def run() -> None:
        nets = [model_for(config, source).to(memory_format=torch.contiguous_format) for _ in "lgp"]
        for net, seed in zip(nets, (1, 1, 2), strict=True):
            net.load_state_dict(weights(config, seed))
        local, *frozen = nets
        sgd = torch.optim.SGD(local.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        names = local.regularised_stages

        def z_of(net: StagedModel, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            logits, taps = net.run(x, names)
            assert logits is not None
            named = zip(names, taps, strict=True)
            return logits, [net.projection_heads[n](tap.flatten(1)) for n, tap in named]

        for epoch in range(config.train.local_epochs):
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(len(x_all), generator=generator)
            for index in torch.split(order, config.train.batch_size):
                x, y = x_all[index], now.train_samples.labels[index]
                logits, z = z_of(local, x)
                with torch.no_grad():
                    z_g, z_p = (z_of(net, x)[1] for net in frozen)
                s_g, s_p = cosines(z, z_g).mean(1), cosines(z, z_p).mean(1)
                losses = representation_losses(s_g, s_p, 0.5) * similarity_weights(s_g, 0.5)
                sgd.zero_grad()
                (F.cross_entropy(logits, y) + losses.sum()).backward()  # type: ignore[no-untyped-call]
                sgd.step()

    return run


def w1_epoch(num: int) -> dict[str, Run]:
    """An epoch over so many images of W1: the bare loop's, and ours."""
    data = bare.Data()
    data.parts = [torch.arange(num)]
    start = bare.PlainCNN().state_dict()
    fraction = num / len(data.y)
    return {
        "bare loop": lambda: bare.train(data, 0, start, None, is_moon=False),
        "fedavg": local_training({**W1, "data-fraction": fraction}),
    }


def least_cpu_seconds(runs: dict[str, Run], repetitions: int) -> dict[str, float]:
    """By name; one after the other, again and again, after one run of each that does not count."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    return {name: min(values) for name, values in seconds.items()}


def methods_of(
    folder: Path, model: str, num: int, names: list[str], **more: OptionValue
) -> dict[str, Run]:
    """Local trainings of these methods by name, on the same data and network."""
    keys: Keys = {"source": random_source(folder, num), "model": model, **more}
    return {n: local_training({**keys, "method": n}) for n in names}


def frozen_passes(model: str, batch_size: int, device: str) -> tuple[Run, Run]:
    """Features of a batch in two frozen networks: one after the other, and as one vmapped pass."""
    keys: Keys = {"source": random_source(keel_home(), 256), "model": model}
    config = resolve_config(keys)
    nets = [model_for(config, open_source(config), seed=seed).to(device) for seed in (1, 2)]
    for net in nets:
        net.eval().requires_grad_(False)
    x = torch.randn(batch_size, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    stacked, buffers = torch.func.stack_module_state(nets)

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(nets[0], (parameters, buffers), (x,))
        return out

    batched = torch.func.vmap(one)

    @torch.no_grad()
    def one_by_one() -> None:
        for net in nets:
            net(x)

    @torch.no_grad()
    def together() -> None:
        batched(stacked, buffers)

    return one_by_one, together


def ratios(
    what: str, runs: dict[str, Run], to_reach: dict[str, float], repetitions: int
) -> Iterator[Row]:
    """Processor seconds of each run that has a bound (none: 0), over those of the first run."""
    seconds = least_cpu_seconds(runs, repetitions)
    base = next(iter(seconds))
    for name, bound in to_reach.items():
        yield {
            "what": f"{what}: {name} / {base}",
            "ratio": round(seconds[name] / seconds[base], 3),
            "to_reach": round(bound, 3) or None,
            "cpu_seconds": [round(seconds[name], 4), round(seconds[base], 4)],
        }


def overheads(folder: Path, quick: bool) -> Iterator[Row]:
    """Local training by method and network, and both ways to run two frozen models."""
    torch.set_num_threads(1)
    bounds = {"fedcka": 1.35, "moon": 1.15, "fedprox": 1.05, "scaffold": 1.05}
    small = methods_of(
        folder, "cnn-fedcka", 1280, ["fedavg", *bounds], **{"batch-size": 128, "local-epochs": 10}
    )
    yield from ratios("cnn-fedcka, batch 128, 10 epochs", small, bounds, 4)
    yield from ratios("W1, 100 steps", w1_epoch(6400), {"fedavg": 0.0}, 5)
    fedintr: Keys = {
        "source": random_source(folder, 2048),
        "model": "cnn-fedintr",
        "batch-size": 512,
        "local-epochs": 10,
        "method": "fedintr",
    }
    forms = {"plain three-forward form": plain_fedintr(fedintr), "fedintr": local_training(fedintr)}
    yield from ratios("cnn-fedintr, batch 512, 10 epochs", forms, {"fedintr": 1 / 1.6}, 2)
    for epochs, num, bound in ((1, 5120, 0.0), (10, 2048, 1.25)):
        keys: Keys = {
            "batch-size": 512,
            "fedreco.k-v": f"{epochs} epochs",
            "fedreco.k-u": f"{epochs} epochs",
            "fedrep.head-epochs": epochs,
            "fedrep.extractor-epochs": epochs,
        }
        personal = methods_of(folder, "cnn-fedintr", num, ["fedrep", "fedreco"], **keys)
        what = f"cnn-fedintr, batch 512, {epochs} + {epochs} epochs"
        yield from ratios(what, personal, {"fedreco": bound}, 4 if epochs == 1 else 2)
    for model, batch in (("cnn-fedintr", 512), ("cnn-fedcka", 128), ("resnet18", 64)):
        forms = dict(zip(("apart", "batched"), frozen_passes(model, batch, "cpu"), strict=True))
        what = f"{model}, batch {batch}, both frozen models"
        yield from ratios(what, forms, {"batched": 0.0}, 2)
    if quick:
        return
    rcl = methods_of(folder, "resnet18", 128, ["fedavg", "fedrcl"], **{"local-epochs": 2})
    yield from ratios("resnet18, batch 64, 2 epochs", rcl, {"fedrcl": 1.10}, 2)


def resnet50_overheads(folder: Path) -> Iterator[Row]:
    """FedCKA's Table 4 has this network; a step takes more than a second."""
    torch.set_num_threads(1)
    bounds = {"fedcka": 1.12, "moon": 1.15, "fedprox": 1.05, "scaffold": 1.05}
    large = methods_of(
        folder, "resnet50", 32, ["fedavg", *bounds], **{"batch-size": 32, "local-epochs": 10}
    )
    yield from ratios("resnet50, batch 32, 10 epochs", large, bounds, 3)
