"""Local training alone, on one core: each method against FedAvg or its plain form.

Measures processor seconds, which other work on the machine disturbs least: the minimum of
interleaved repetitions. One client, random images, and a previous local model that differs
from the global one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from keel.benchmarks.report import BenchOptions, Keys, Row, random_source, workload_source
from models import StagedModel
from protocol.config import RunConfig, resolve_config
from protocol.messages import TrainRequest
from protocol.options import OptionValue

Run = Callable[[], object]


def weights(config: RunConfig, seed: int) -> dict[str, Tensor]:
    """Weights of the run's model, drawn from a seed."""
    return model_for(config, open_source(config), seed=seed).state_dict()


def client_round(keys: Keys, cache: ProcessCache) -> RoundContext:
    """Round 2 of a client that has the whole source."""
    return round_of(resolve_config({"partition": "iid", "device": "cpu", **keys}), cache)


def round_of(
    config: RunConfig, cache: ProcessCache, client: int = 0, num_clients: int = 1
) -> RoundContext:
    """Round 2 of one of the clients that share the source."""
    w = weights(config, 1)
    names = {n for n, _ in model_for(config, open_source(config)).named_parameters()}
    sent = w
    if config.rounds.method == "fedreco":
        sent = {n: a for n, a in w.items() if not n.startswith("classifier")}
    zeros, one = {n: torch.zeros_like(w[n]) for n in names}, torch.tensor(1)
    control = {"control": zeros, "control-before": zeros, "control-made": {"round": one}}
    return cache.begin_round(
        TrainRequest(config, dataset_spec_of(config, open_source(config)), 2, [1], False, ""),
        {"partition-id": client, "num-partitions": num_clients},
        received=sent,
        extra={f"c.{n}": array for n, array in zeros.items()},
        state={"previous": weights(config, 2)} | control,
        last_accepted_round=1,
    )


def local_training(keys: Keys) -> Run:
    """Local training of one round; every call starts from the same weights."""
    ctx = client_round(keys, ProcessCache())
    return lambda: method_of(ctx.config).train(ctx)


def plain_fedintr(keys: Keys) -> Run:
    """FedIntR as in its authors' code: three whole forward passes in every step."""
    config = resolve_config({"partition": "iid", "device": "cpu", **keys})
    ctx = client_round(keys, ProcessCache())
    source = open_source(config)
    x_all = torch.stack([x for b, _ in ctx.train_samples.in_order() for x in b]).contiguous()

    def run() -> None:
        nets = []
        for seed in (1, 1, 2):  # local, global, previous
            net = model_for(config, source).to(memory_format=torch.contiguous_format)
            net.load_state_dict(weights(config, seed))
            nets.append(net)
        local, *frozen = nets
        sgd = torch.optim.SGD(local.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        names = local.regularised_stages

        def z_of(net: StagedModel, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            logits, reps = net.run(x, names)
            assert logits is not None
            named = zip(names, reps, strict=True)
            return logits, [net.projection_heads[n](z.flatten(1)) for n, z in named]

        for epoch in range(config.train.local_epochs):
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(len(x_all), generator=generator)
            for index in torch.split(order, config.train.batch_size):
                x, y = x_all[index], ctx.train_samples.labels[index]
                logits, z = z_of(local, x)
                with torch.no_grad():
                    z_g, z_p = (z_of(net, x)[1] for net in frozen)
                s_g, s_p = cosines(z, z_g).mean(1), cosines(z, z_p).mean(1)
                losses = representation_losses(s_g, s_p, 0.5) * similarity_weights(s_g, 0.5)
                sgd.zero_grad()
                (F.cross_entropy(logits, y) + losses.sum()).backward()  # type: ignore[no-untyped-call]
                sgd.step()

    return run


def w1_epoch(options: BenchOptions) -> dict[str, Run]:
    """One epoch over 100 batches of W1: the bare loop's and Keel's."""
    source = workload_source(options)
    data = bare.Data(source)
    num = min(6400, len(data.y))
    data.parts = [torch.arange(num)]
    start = bare.PlainCNN().state_dict()
    keys: Keys = {**W1, "source": source, "data-fraction": num / len(data.y)}
    return {
        "bare loop": lambda: bare.train(data, 0, start, None, is_moon=False),
        "fedavg": local_training(keys),
    }


def min_cpu_seconds(runs: dict[str, Run], repetitions: int) -> dict[str, float]:
    """Processor seconds by name: the minimum of interleaved repetitions, after one warm-up each."""
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
    folder: Path, model: str, num: int, names: Sequence[str], **more: OptionValue
) -> dict[str, Run]:
    """Local trainings of these methods by name, on the same `num` images and model."""
    keys: Keys = {"source": random_source(folder, num), "model": model, **more}
    return {n: local_training({**keys, "method": n}) for n in names}


def ratios(what: str, runs: dict[str, Run], repetitions: int) -> Iterator[Row]:
    """Processor seconds of every run but the first, over those of the first."""
    seconds = min_cpu_seconds(runs, repetitions)
    base, *others = seconds
    for name in others:
        yield {
            "what": f"{what}: {name} / {base}",
            "ratio": round(seconds[name] / seconds[base], 3),
            "cpu_seconds": [round(seconds[name], 4), round(seconds[base], 4)],
        }


COMPARED = ("fedavg", "fedcka", "moon", "fedprox", "scaffold")


def overheads(options: BenchOptions) -> Iterator[Row]:
    """Local training by method and model."""
    torch.set_num_threads(1)
    folder, is_quick = options.home, options.is_quick
    epochs = 1 if is_quick else 10

    def images(num: int) -> int:
        return min(num, 128) if is_quick else num

    def times(count: int) -> int:
        return 1 if is_quick else count

    keys: Keys = {"batch-size": 128, "local-epochs": epochs}
    small = methods_of(folder, "cnn-fedcka", images(1280), COMPARED, **keys)
    yield from ratios(f"cnn-fedcka, batch 128, {epochs} epochs", small, times(4))
    yield from ratios("W1, 100 steps", w1_epoch(options), times(5))
    fedintr: Keys = {
        "source": random_source(folder, images(2048)),
        "model": "cnn-fedintr",
        "batch-size": 512,
        "local-epochs": epochs,
        "method": "fedintr",
    }
    forms = {"plain three-forward form": plain_fedintr(fedintr), "fedintr": local_training(fedintr)}
    yield from ratios(f"cnn-fedintr, batch 512, {epochs} epochs", forms, times(2))
    for count, num in ((1, 5120), (epochs, 2048)):
        keys = {
            "batch-size": 512,
            "fedreco.k-v": f"{count} epochs",
            "fedreco.k-u": f"{count} epochs",
            "fedrep.head-epochs": count,
            "fedrep.extractor-epochs": count,
        }
        personal = methods_of(folder, "cnn-fedintr", images(num), ("fedrep", "fedreco"), **keys)
        what = f"cnn-fedintr, batch 512, {count} + {count} epochs"
        yield from ratios(what, personal, times(4 if count == 1 else 2))
    if not is_quick:
        names, keys = ("fedavg", "fedrcl"), {"local-epochs": 2}
        rcl = methods_of(folder, "resnet18", 128, names, **keys)
        yield from ratios("resnet18, batch 64, 2 epochs", rcl, 2)


def resnet50_overheads(options: BenchOptions) -> Iterator[Row]:
    """The same on FedCKA's largest model (its Table 4); a step takes more than a second."""
    torch.set_num_threads(1)
    num, epochs, repetitions = (2, 1, 1) if options.is_quick else (32, 10, 3)
    names = COMPARED[:2] if options.is_quick else COMPARED
    keys: Keys = {"batch-size": num, "local-epochs": epochs}
    large = methods_of(options.home, "resnet50", num, names, **keys)
    yield from ratios(f"resnet50, batch {num}, {epochs} epochs", large, repetitions)


PRECISIONS = (  # network, batch size
    ("resnet18", 50),
    ("resnet50", 8),
    ("vgg9", 64),
    ("mobilenet-v2", 32),
    ("shufflenet", 32),
    ("squeezenet", 32),
    ("cnn-fedcka", 64),
    ("cnn-fedintr", 64),
)


def precisions(options: BenchOptions) -> Iterator[Row]:
    """One step of local training by network, fp32 over bf16: where bf16 pays on this CPU."""
    torch.set_num_threads(1)
    for model, size in PRECISIONS:
        batch = 2 if options.is_quick else size
        keys: Keys = {
            "source": random_source(options.home, batch),
            "model": model,
            "batch-size": batch,
            "local-epochs": 1,
        }
        runs = {name: local_training({**keys, "precision": name}) for name in ("bf16", "fp32")}
        what = f"{model}, batch {batch}, one step"
        yield from ratios(what, runs, 1 if options.is_quick else 3)
