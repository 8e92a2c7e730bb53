"""The roster: one entry per client, saved in the run directory, checked before round 1."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client_app.methods import method_of
from client_app.setup import (
    client_indices,
    model_for,
    representation_width,
    split_over_clients,
)
from data.sources import Source
from protocol.catalogue import classes, method_names
from protocol.config import RunConfig
from protocol.files import digest, write_atomically
from protocol.messages import RosterEntry, roster_entry
from protocol.options import ConfigError
from protocol.text import num_of, shortened
from server_app.run_reader import DAMAGE
from server_app.simulated_roster import MAX_LISTED, SimulatedRoster

USUAL_FACTOR = 10  # on the median number of samples, beyond which a site is named


def read_saved_roster(path: Path) -> dict[int, RosterEntry]:
    """Node id to entry, as `save_roster` wrote it; ValueError naming the file if it is damaged."""
    try:
        rows = json.loads(path.read_text())
        return {int(row.pop("node")): roster_entry(row) for row in rows}
    except (OSError, *DAMAGE) as error:
        raise ValueError(f"{path}: missing, damaged or of another version: {error}") from error


def save_roster(path: Path, roster: Mapping[int, RosterEntry]) -> None:
    """Write the clients and their nodes, in the order of names.

    Of very many simulated clients only their number.
    """
    rows: object = {"simulated": len(roster)}
    if isinstance(roster, dict) or len(roster) <= MAX_LISTED:
        ordered = sorted(roster.items(), key=lambda pair: pair[1].client)
        rows = [{"node": node, **vars(entry)} for node, entry in ordered]
    write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Clients:
    """What a run has to know of all its clients together.

    are_simulated: their data are partitions of the run's source. sizes: by name the training
    samples of simulated clients, {} of sites. shown: the clients that files and pictures list, the
    first thousand of very many. split: a digest.
    """

    num: int
    num_train: int
    are_simulated: bool
    sizes: Mapping[str, int]
    shown: Sequence[RosterEntry]
    split: str


def clients_of(config: RunConfig, roster: Mapping[int, RosterEntry]) -> Clients:
    """The clients in a roster."""
    if isinstance(roster, SimulatedRoster):
        shown = roster.shown()
        return Clients(
            num=len(roster),
            num_train=roster.num_train,
            are_simulated=True,
            sizes=dict(zip(roster.node_of, roster.sizes[:, 0].tolist(), strict=True)),
            shown=shown,
            split=split_digest(config, shown),
        )
    entries = list(roster.values())
    are_simulated = any(entry.num_partitions for entry in entries)  # sites of a trial
    return Clients(
        num=len(entries),
        num_train=sum(entry.num_examples for entry in entries),
        are_simulated=are_simulated,
        sizes=partition_sizes(config, entries) if are_simulated else {},
        shown=entries,
        split=split_digest(config, entries),
    )


def split_digest(config: RunConfig, entries: Sequence[RosterEntry]) -> str:
    """A digest of the split: of simulated clients every sample's, of sites their label counts.

    Where label counts are withheld: the numbers of samples.
    """
    if num_clients := entries[0].num_partitions:
        parts = split_over_clients(config, num_clients).digest()
        return digest(f"{parts} {config.data.local_test_fraction}".encode())
    counts = [
        [e.client, e.label_counts or e.num_train, e.test_label_counts or e.num_test]
        for e in sorted(entries, key=lambda entry: entry.client)
    ]
    return digest(json.dumps(counts).encode())


def roster_warnings(config: RunConfig, clients: Clients) -> list[str]:
    """A line for each thing that is unusual about the clients but allowed."""
    entries = clients.shown
    warnings = []
    for what, versions in (
        ("flwr and torch", {e.client: e.versions for e in entries}),
        ("keel", {e.client: e.keel for e in entries}),
    ):
        [(usual, _), *others] = Counter(versions.values()).most_common()
        if others:
            differing = sorted(f"{client} has {v}" for client, v in versions.items() if v != usual)
            warnings.append(
                f"versions of {what} differ: {shortened(differing)}; the others have {usual}. "
                "Results may differ in the last bits"
            )
    warnings += count_warnings(config, entries)
    num_samples = {entry.client: entry.num_examples for entry in entries}
    note = method_of(config).warning(config, num_samples)
    return [*warnings, note] if note else warnings


def partition_sizes(config: RunConfig, entries: Sequence[RosterEntry]) -> dict[str, int]:
    """Training samples of every simulated client, by the partition that the run's config makes."""
    num_clients = max(entry.num_partitions for entry in entries)
    parts = (client_indices(config, i, num_clients)[0] for i in range(num_clients))
    return {f"client-{i:04d}": len(part) for i, part in enumerate(parts)}


def count_warnings(config: RunConfig, entries: Sequence[RosterEntry]) -> list[str]:
    """A line for each site with ten times the median, or `max-weight-share`, of samples."""
    counts = {e.client: e.num_examples for e in entries if not e.num_partitions}
    median = statistics.median_low(counts.values() or [0])
    total = sum(entry.num_examples for entry in entries) or 1
    share = max(config.rounds.max_weight_share, 1 / len(entries))
    warnings = []
    for client, count in sorted(counts.items()):
        is_capped = count > share * total * (1 + 1e-9)
        if not is_capped and count <= USUAL_FACTOR * median:
            continue
        weight = "it weighs as much unless max-weight-share is lowered"
        if is_capped:
            weight = f"it weighs at most max-weight-share = {share:.2g} of a round"
        warnings.append(
            f"client {client} declares {num_of('training sample', count)}, {count / total:.1%} of "
            f"all (the median is {median}); {weight}"
        )
    return warnings


def check_widths(config: RunConfig, widths: Counter[tuple[str, int]], source: Source) -> None:
    """ConfigError with all widths where a client's representation does not fit the run's model.

    widths: the number of clients with each (network, width).
    """
    run_model = config.model.model
    if [model for model, _ in widths] == [run_model]:
        return  # every client has the run's model, and so its width
    own = representation_width(config, model_for(config, source))
    if any(width != own for _, width in widths):
        found = ", ".join(
            f"{model} {width} ({num_of('client', count)})"
            for (model, width), count in sorted(widths.items())
        )
        key = "layer-widths" if config.model.layer_widths else "client-models"
        raise ConfigError(
            key,
            f"representation widths differ: {found}; the run's model {run_model} has {own}: under "
            f"{config.rounds.method} all must be equal: choose networks of one width"
            f"{', other layer-widths' if config.model.layer_widths else ''} or another split",
        )


def check_sizes(
    config: RunConfig,
    source: Source,
    sizes: np.ndarray,
    totals: Sequence[int],
    name: Callable[[int], str],
    are_partitions: bool,
) -> None:
    """ValueError, one line, where a client lacks samples, or a class has none.

    sizes: each client's (training, local test) samples, [N, 2]. totals: training samples of each
    class; [] where clients withhold them. name: of the client of a row.
    """
    if not sizes[:, 0].all():
        raise ValueError(f"client {name(int(np.argmin(sizes[:, 0])))} has no training samples")
    if 0 in totals:
        raise ValueError(
            f"no client has samples of the class {source.class_names[totals.index(0)]!r} of the "
            f"run's source {source.name}, so it cannot be learnt: remove it from the source"
        )
    if config.evaluated_clients != "none" and not sizes[:, 1].all():
        raise config.no_test_part(name(int(np.argmin(sizes[:, 1]))), not are_partitions)


def check_partitions(entries: Iterable[RosterEntry]) -> None:
    """ValueError naming a client that is simulated, or one of another number, unlike the others.

    A client's word alone must not decide how many clients there are, and how large.
    """
    by_name = sorted(entries, key=lambda entry: entry.client)
    numbers = Counter(entry.num_partitions for entry in by_name).most_common()
    if len(numbers) > 1:
        usual = numbers[0][0]
        odd = next(entry for entry in by_name if entry.num_partitions != usual)
        raise ValueError(
            f"client {odd.client}: num-partitions = {odd.num_partitions}, the others have {usual} "
            "(0: data of its own): they have to agree"
        )


def check_roster(config: RunConfig, roster: Mapping[int, RosterEntry], source: Source) -> None:
    """ValueError, one line naming the client, for clients that do not fit together.

    They also have to fit the run's source, on whose test set the global model is evaluated, and the
    method.
    """
    num_clients, entries = config.rounds.num_clients, list(roster.values())
    if num_clients and len(entries) > num_clients:
        raise ValueError(
            f"num-clients = {num_clients}, but {len(entries)} SuperNodes are connected: stop the "
            f"surplus ones, or set num-clients={len(entries)}"
        )
    [(name, count), *_] = Counter(e.client for e in entries).most_common(1)
    if count > 1:
        nodes = [str(node) for node, e in sorted(roster.items()) if e.client == name]
        raise ValueError(
            f"{count} clients are named {name!r} (nodes {shortened(nodes)}): give each SuperNode "
            "a name of its own with --node-config"
        )
    check_partitions(entries)
    by_name = sorted(entries, key=lambda e: e.client)
    are_withheld = config.privacy.withholds_metrics
    for entry in by_name:
        num_classes = len(entry.label_counts)
        if are_withheld and not entry.label_counts:
            num_classes = source.num_classes  # as it cannot be compared
        convert = "set image-size and channels, to which every client converts its images"
        for what, value, expected, advice in (
            ("image shape", entry.image_shape, list(source.image_shape), convert),
            ("number of classes", num_classes, source.num_classes, "they have to agree"),
        ):
            if value != expected:
                raise ValueError(
                    f"client {entry.client} ({entry.model}): {what} {value}, the run's source "
                    f"{source.name} has {expected}: {advice}"
                )
    method = method_of(config)
    others = [e for e in by_name if e.model != config.model.model]
    if others and not method.supports_mixed_architectures:
        able = ", ".join(n for n in method_names() if classes[n].supports_mixed_architectures)
        raise ValueError(
            f"client {others[0].client} trains {others[0].model}, the run {config.model.model}: "
            f"methods that allow several architectures: {able}"
        )
    widths = Counter((entry.model, entry.representation_width) for entry in by_name)
    check_widths(config, widths, source)
    totals = [sum(counts) for counts in zip(*(e.label_counts for e in entries), strict=True)]
    sizes = np.array([[e.num_examples, e.num_test_examples] for e in by_name])
    names = [entry.client for entry in by_name]
    are_partitions = bool(entries[0].num_partitions)
    check_sizes(config, source, sizes, totals, names.__getitem__, are_partitions)


def check_simulated_roster(roster: SimulatedRoster) -> None:
    """Check the roster of a simulation. ValueError, one line naming the client.

    Image shapes and classes, which `check_roster` compares, are the source's for all clients here.
    """
    config, source = roster.config, roster.source
    networks = config.client_models or [config.model.model]
    widths: Counter[tuple[str, int]] = Counter()
    for i, name in enumerate(networks[: roster.num_clients]):
        widths[name, roster.widths[name]] += len(range(i, roster.num_clients, len(networks)))
    check_widths(config, widths, source)
    labels = np.asarray(source.train.labels)[roster.parts.indices]
    totals = np.bincount(labels, minlength=source.num_classes).tolist()
    if config.privacy.withholds_metrics:
        totals = []
    check_sizes(config, source, roster.sizes, totals, roster.name_of, True)
