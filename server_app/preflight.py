"""What is checked of the machines of a simulation before round 1.

Flower's simulation may have workers on several machines of a Ray cluster. Each says which code,
packages, processor and data it has, and whether it shares the directory that the run directory is
in. What would give another model is refused; what changes the last bits is a warning.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.app import RecordDict
from flwr.serverapp import Grid

from client_app.machine import data_digest
from client_app.methods import method_of
from client_app.setup import split_over_clients
from data.sources import Source
from flower_adapter.simulation import (
    LogLine,
    WorkerReply,
    has_own_backend,
    is_cluster,
    started,
)
from protocol.config import RunConfig
from protocol.files import naming
from protocol.messages import (
    DatasetSpec,
    MachineReport,
    PreflightRequest,
    machine_report,
    request_record,
)
from protocol.ray_nodes import devices_by_node
from server_app.logical_clients import LogicalGrid

START_TIMEOUT_S = 600.0  # for Ray and its workers to start


@dataclass(frozen=True)
class WorkerOnNode:
    """A worker of the simulation: the address of its machine, and its report."""

    node: str
    report: MachineReport
    log_lines: Sequence[LogLine] = ()  # on all workers


def checked_workers(
    grid: Grid,
    config: RunConfig,
    data: DatasetSpec,
    source: Source,
    directory: Path,
    num_clients: int,
) -> list[WorkerOnNode]:
    """The workers of Flower's simulation; none of another grid.

    directory: that of the run directory. num_clients: that are simulated. ValueError, one line,
    naming the node, for a worker that does not answer, has other code or data, splits the data in
    another way, or where it needs the directory and has not got it.
    RuntimeError if the workers could not be started.
    """
    below = grid.grid if isinstance(grid, LogicalGrid) else grid
    if not has_own_backend(below):
        return []
    with token_in(directory) as (path, token):

        def content(number: int) -> RecordDict:
            reads_data = is_cluster() and number == 0  # once on each machine
            request = PreflightRequest(config, data, str(path), token, reads_data, num_clients)
            return RecordDict({"round": request_record(request)})

        try:
            ask = started.result(START_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(
                f"Ray and its workers did not start in {START_TIMEOUT_S:g} s: see the log of "
                "flwr-simulation"
            ) from None
        replies = ask(content)
    is_stateful = method_of(config).is_stateful
    split = split_over_clients(config, num_clients).digest()
    folder = directory if is_stateful else None
    return workers_in(replies, lambda: data_digest(source), folder, split, config.data.partition)


@contextmanager
def token_in(directory: Path) -> Iterator[tuple[Path, str]]:
    """A file with a random word in this directory, for as long as workers look for it."""
    directory.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    path = directory / f".preflight-{token}"
    try:
        with naming(path):
            path.write_text(token)
        yield path, token
    finally:
        path.unlink(missing_ok=True)


def workers_in(
    replies: Sequence[WorkerReply],
    server_data: Callable[[], str],
    shared: Path | None,
    split: str = "",
    partition: str = "",
) -> list[WorkerOnNode]:
    """The workers that these replies describe.

    server_data: the digest of the server's data. shared: the directory that client state is stored
    in, None if there is none. split: the digest of the server's split. partition: the key that
    chose it. ValueError, one line, as `checked_workers`.
    """
    workers = []
    for reply in replies:
        if reply.content is None:
            raise ValueError(f"worker on {reply.node}: {reply.error}")
        report = machine_report(reply.content)
        if report.data and report.data != server_data():
            raise ValueError(
                f"worker on {reply.node}: its copy of the run's data has the digest {report.data}, "
                f"the server's {server_data()}: copy the server's to that machine"
            )
        if report.split != split:
            raise ValueError(
                f"worker on {reply.node}: partition = {partition!r} splits the data in another way "
                f"there (digest {report.split}, the server's {split}): its function may depend on "
                "nothing but its arguments, and may draw only from `seed`"
            )
        if shared and not report.has_directory:
            raise ValueError(
                f"worker on {reply.node} does not see {shared}: the method stores client state "
                "there, and a client may be trained on any machine: set output-dir to a directory "
                "that all machines share"
            )
        workers.append(WorkerOnNode(reply.node, report, reply.log_lines))
    return workers


def log_lines(workers: Sequence[WorkerOnNode]) -> list[LogLine]:
    """For the run's log: each machine's workers with their devices, and what Ray's start showed."""
    found = devices_by_node((each.node, each.report.device) for each in workers)
    own = [(logging.INFO, f"workers on {node}: {devices}") for node, devices in found.items()]
    return [*own, *(workers[0].log_lines if workers else ())]


def worker_warnings(workers: Sequence[WorkerOnNode], server: MachineReport) -> list[str]:
    """A line for each thing that differs between the machines and changes the bits of a result."""
    warnings = []
    device = server.device.partition(":")[0]
    kinds = {each.report.device.partition(":")[0] for each in workers}
    if kinds - {device}:
        remedy = "give workers a GPU (client-resources-num-gpus)"
        if device == "cpu":
            remedy = "start the run on a machine with a GPU"
        warnings.append(
            f"the server computes on {device}, workers on {' and '.join(sorted(kinds))}: "
            f"set device to cpu, or {remedy}"
        )
    reports = [each.report for each in workers]
    precisions = [f"precision {report.precision}" for report in reports]
    compared = (
        ([report.versions for report in reports], server.versions, ""),
        ([processor(report) for report in reports], processor(server), ""),
        (precisions, "", ": set precision to fp32 or bf16"),
    )
    for found, own, advice in compared:
        [(usual, _), *others] = Counter(found).most_common() or [("", 0)]
        if others:
            differing = {
                worker.node: has for worker, has in zip(workers, found, strict=True) if has != usual
            }
            listed = [f"{node} has {has}" for node, has in differing.items()][:5]
            warnings.append(
                f"workers differ: {'; '.join(listed)}; the others have {usual}. The bits of the "
                f"result depend on which worker trains whom{advice}"
            )
        if own and usual and own not in found and not (kinds - {device}):
            warnings.append(
                f"the server has {own}, which no worker has; most have {usual}. The bits of the "
                "result are not those of a run on one machine, and manifest.json has the server's "
                "versions"
            )
    return warnings


def processor(report: MachineReport) -> str:
    """The processor on which bits depend."""
    return f"{report.machine} ({report.capability})"
