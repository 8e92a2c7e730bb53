"""Checks of Keel's containers on this machine: all are there, and what the doctor finds in them."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from keel.deployment.findings import MARKS, Finding, check, fine, problem, skipped

Machine = Literal["client", "server"]
timeout_s = 10.0
inside_timeout_s = 1800.0  # the data may be decoded for the first time
# compose services of a machine; the doctor's own checks run in the last one
services = {"client": ("supernode", "executor", "worker"), "server": ("superlink", "serverapp")}
# Docker's words
no_daemon = re.compile("is the docker daemon running|if the daemon is running", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Container:
    """A container that runs or restarts: its name, compose's project and service, its status."""

    name: str
    project: str
    service: str
    status: str


def keel_containers(machine: Machine) -> list[Container]:
    """The containers that the Makefile's targets started for this kind of machine, by name."""
    label = '{{.Label "com.docker.compose.%s"}}'
    columns = ["{{.Names}}", label % "project", label % "service", "{{.Status}}"]
    command = ["docker", "ps", "--format", "\t".join(columns)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stderr.strip()}: run `keel doctor` as a user who may use Docker")
    containers = [Container(*line.split("\t")) for line in done.stdout.splitlines()]
    return sorted(
        c
        for c in containers
        if c.project.startswith("keel-") and c.service.startswith(services[machine])
    )


@check
def check_containers(
    machine: Machine,
    options: Sequence[str],
    unused_options: Sequence[str],
    check_here: Callable[[], Iterator[Finding]],
) -> Iterator[Finding]:
    """All of a machine's containers run, and what the doctor finds in the one that computes.

    options: of `keel doctor MACHINE --inside` there. unused_options: those given that only apply
    without containers. check_here: the same checks on this machine, if it has no container.
    """
    containers: list[Container] = []
    try:
        if shutil.which("docker"):
            containers = keel_containers(machine)
        if not containers:
            yield fine(f"containers: none of a {machine} runs here; checking this machine instead")
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        reason = " ".join(str(error).split())[:300]
        if no_daemon.search(reason):
            yield skipped(
                f"containers: Docker's daemon does not run here, so there are none; checking "
                f"this machine instead. If `make deploy-{machine}` deployed it, start "
                "Docker"
            )
        else:
            yield problem(f"containers: {reason}; checking this machine instead")
    if not containers:
        yield from check_here()
    elif unused_options:
        yield fine(
            f"{' and '.join(unused_options)}: only used without containers, not checked; "
            "the containers here have their own"
        )
    running = {(c.project, c.service) for c in containers}
    groups = {(c.project, re.sub(r"^[a-z]+", "", c.service)) for c in containers}
    for project, suffix in sorted(groups):  # suffix "-1" of `executor-1`, `worker-1`, ...
        missing = [s + suffix for s in services[machine] if (project, s + suffix) not in running]
        if missing:
            yield problem(
                f"containers: {project} runs here without its {', '.join(missing)}: see how that "
                "ended with `docker ps --all`, and deploy again"
            )
    for container in containers:
        name = container.name
        if container.status.startswith("Restarting"):
            yield problem(f"{name}: exits when started: docker logs --tail 20 {name}")
        elif container.service.startswith(services[machine][-1]):
            yield from check_container(name, [machine, "--inside", *options])


@check
def check_container(container: str, options: Sequence[str]) -> Iterator[Finding]:
    """What the doctor finds in this container."""
    command = ["docker", "exec", container, "python", "-m", "keel", "doctor", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=inside_timeout_s, check=False
    )
    findings = [
        Finding(mark, f"{container}: {text.lstrip()}")
        for mark, _, text in (line.partition(" ") for line in done.stdout.splitlines())
        if mark in MARKS
    ]
    yield from findings
    if not findings or done.returncode not in (0, 1):
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        yield problem(f"{container}: the doctor did not finish there: {reason}")
