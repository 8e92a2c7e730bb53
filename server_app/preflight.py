"""What is checked of the workers of Flower's simulation before round 1.

They may be on several machines of a Ray cluster. Each says which code, packages, processor and data
it has, and whether it shares the directory that the run directory is in. What would give another
model is refused; what changes the last bits is a warning.
"""

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Error, MessageType, RecordDict

from client_app.machine import data_digest, host_name
from client_app.setup import split_over_clients
from protocol.files import naming
from protocol.messages import (
    MachineReport,
    PreflightRequest,
    error_reason,
    machine_report,
    request_record,
)
from server_app.experiment import Experiment
from server_app.pool import Workers

START_TIMEOUT_S = 600.0  # for Ray and its workers to start, and to read the data


def checked_machines(
    workers: Workers, experiment: Experiment, num_clients: int, directory: Path
) -> list[MachineReport]:
    """How the workers describe themselves, each once.

    directory: that of the run directory. ValueError, one line, naming the machine, for a worker
    that has other code or data, splits the data in another way, or does not see the directory
    although client state is stored there.
    """
    with token_in(directory) as (path, token):
        request = PreflightRequest(
            experiment.config, experiment.data, str(path), token, num_clients, host_name()
        )
        content = RecordDict({"round": request_record(request)})
        contents = [content] * workers.num  # an idle worker takes the next
        answers = dict(workers.answers(contents, MessageType.QUERY, START_TIMEOUT_S))
    if not answers:
        raise RuntimeError(f"no worker of the simulation answered within {START_TIMEOUT_S:g} s")
    machines: dict[str, MachineReport] = {}
    for answer in answers.values():
        if isinstance(answer, Error):
            raise ValueError(f"a worker of the simulation: {error_reason(answer)}")
        report = machine_report(answer)
        check_machine(report, experiment, num_clients, directory)
        machines[f"{report.host} {report.process}"] = report
    return [machines[name] for name in sorted(machines)]


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


def check_machine(
    report: MachineReport, experiment: Experiment, num_clients: int, directory: Path
) -> None:
    """Check one machine's report. ValueError, one line naming the machine."""
    config = experiment.config
    if report.data and report.data != (own := data_digest(experiment.source)):
        raise ValueError(
            f"worker on {report.host}: its copy of the run's data has the digest {report.data}, "
            f"the server's {own}: copy the server's to that machine"
        )
    if report.split != (split := split_over_clients(config, num_clients).digest()):
        raise ValueError(
            f"worker on {report.host}: partition = {config.data.partition!r} splits the data in "
            f"another way there (digest {report.split}, the server's {split}): its function may "
            "depend on nothing but its arguments, and may draw only from `seed`"
        )
    if experiment.method.is_stateful and not report.has_directory:
        raise ValueError(
            f"worker on {report.host} does not see {directory}: the method stores client state "
            "there, and a client may be trained on any machine: set output-dir to a directory that "
            "all machines share"
        )


def machine_warnings(machines: Sequence[MachineReport], server: MachineReport) -> list[str]:
    """A line if what the bits of a result depend on differs between the machines."""
    kinds = [
        f"{each.versions}; {each.machine} ({each.capability}); {each.precision}"
        for each in (*machines, server)
    ]
    (usual, _), *others = Counter(kinds).most_common()
    if not others:
        return []
    found = f"{others[0][0]}, and {usual}"
    return [f"machines differ: {found}. The bits of the result depend on which one trains whom"]
