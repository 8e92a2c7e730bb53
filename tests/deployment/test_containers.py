"""Real containers: compose.local.yml trains digits to the end, one client killed on the way.

Engine, compose and debootstrap come from Debian's packages (installed if they are missing), the
base image is made here. Everything lives under one folder and a Docker daemon of its own, and is
gone afterwards, but for the empty chains that Docker adds to the firewall. KEEL_TEST_BASE and
KEEL_TEST_WHEELS name an unpacked Debian and a folder of wheels made before, which saves downloads.
"""

import contextlib
import errno
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml
from deployment_fixtures import documented_commands
from run_fixtures import wait_until

from keel.deployment.credentials import make_credentials
from keel.deployment.loopback import free_ports
from keel.deployment.reach import wait_for_server
from keel.deployment.superlink import SuperLinkClient
from protocol.config import app_folder

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(3600)]
packages = {
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
}
debian = ["--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm"]
torch_cpu = os.environ.get("KEEL_TEST_TORCH", "torch")  # such as torch==2.13.0+cpu
clients = [f"client-000{i}" for i in range(3)]
run_limit_s = 900
resolver_address = "127.0.53.53"  # of this machine's loopback, as systemd's resolver is


def sh(*words, limit_s=600, **options):
    """Run a command; what it printed. Fails with what it printed."""
    options = {"check": False, "text": True, "stdout": subprocess.PIPE} | options
    done = subprocess.run(words, stderr=subprocess.STDOUT, timeout=limit_s, **options)
    assert done.returncode == 0, f"{' '.join(map(str, words))}:\n{done.stdout[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tools():
    if os.getuid() != 0:
        pytest.skip("a Docker daemon of its own needs root")
    missing = [package for command, package in packages.items() if not shutil.which(command)]
    if missing:
        if not shutil.which("apt-get"):
            pytest.skip(f"{', '.join(missing)} are missing, and there is no apt-get")
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", *missing]):
            done = subprocess.run(["apt-get", "-y", *words], env=env, timeout=900, check=False)
            if done.returncode:
                pytest.skip(f"apt-get could not install {', '.join(missing)}")


@pytest.fixture(scope="module")
def work(tools):
    with tempfile.TemporaryDirectory(prefix="keel-docker-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def asked(tools):
    """What a resolver on this machine was asked: the questions, as they are in the packets."""
    questions = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        resolver.bind((resolver_address, 53))
        resolver.settimeout(0.5)
        stop = threading.Event()

        def answer():
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    query, peer = resolver.recvfrom(512)
                    questions.append(query[12:])
                    head = query[:2] + b"\x81\x83" + query[4:6] + bytes(6)  # no such name
                    resolver.sendto(head + query[12:], peer)

        thread = threading.Thread(target=answer)
        thread.start()
        yield questions
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def docker(work, asked):
    """The environment in which `docker` speaks to a daemon of the test's own.

    The daemon takes names to the resolver `asked`: nothing here needs another.
    """
    (work / "resolv.conf").write_text(f"nameserver {resolver_address}\n")
    with_resolver = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    address = f"unix://{work / 'docker.sock'}"
    env = os.environ | {
        "DOCKER_HOST": address,
        "DOCKER_BUILDKIT": "0",
        "COMPOSE_HTTP_TIMEOUT": "300",
    }
    with (work / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(
            [
                *("unshare", "--mount", "sh", "-c", with_resolver, str(work / "resolv.conf")),
                *("dockerd", "--host", address, "--data-root", str(work / "data")),
                *("--exec-root", str(work / "exec"), "--pidfile", str(work / "dockerd.pid")),
                *("--bridge", "none"),  # compose makes its own networks, and takes them away
                # where no other daemon's firewall rules, left on the machine, masquerade packets
                *("--default-address-pool", "base=10.213.0.0/16,size=24"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 100
        while subprocess.run(
            ["docker", "info"], env=env, capture_output=True, timeout=60, check=False
        ).returncode:
            if daemon.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"no Docker daemon starts: {(work / 'dockerd.log').read_text()[-600:]}")
            time.sleep(1)
        yield env
    finally:
        daemon.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(60)
        daemon.kill()
        daemon.wait()


@pytest.fixture(scope="module")
def image(work, docker):
    """The image, built as `make image` does, from a base made here."""
    base = Path(os.environ.get("KEEL_TEST_BASE", work / "base"))
    if not base.exists():
        sh("debootstrap", *debian, str(base), limit_s=1800)
    tar = subprocess.Popen(["tar", "-C", str(base), "-c", "."], stdout=subprocess.PIPE)
    sh("docker", "import", "-", "keel-base", stdin=tar.stdout, env=docker)
    assert tar.wait(60) == 0
    context = work / "context"
    shutil.copytree(
        app_folder,
        context,
        ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "wheels", ".*_cache"),
    )
    wheels = os.environ.get("KEEL_TEST_WHEELS")
    if wheels:
        shutil.copytree(wheels, context / "docker" / "wheels")
    else:  # the build itself needs no network then
        command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
        command += ["--python-version", "3.11", "-d", str(context / "docker" / "wheels")]
        sh(*command, torch_cpu, "-r", str(context / "docker/requirements.txt"), limit_s=1800)
    sh(
        *(
            "make",
            "image",
            "BASE=keel-base",
            "CONSTRAINTS=requirements.txt",
            f"PIP_OPTIONS=--no-index {torch_cpu}",
        ),
        cwd=context,
        env=docker,
        limit_s=1800,
    )
    return "keel"


@pytest.fixture(scope="module")
def local(work, docker, image):
    """compose.local.yml, up, with registered clients: what `make deploy-local` does."""
    [control] = free_ports(1)
    credentials = work / "credentials"
    make_credentials(credentials, ["superlink"], clients)
    sh("chown", "-R", "10001", str(credentials))
    env = docker | {
        "KEEL_CREDENTIALS": str(credentials),
        "KEEL_CONTROL": f"127.0.0.1:{control}",
        "KEEL_IMAGE": image,
        "KEEL_UID": "10001",
    }
    compose = Compose(env)
    superlink = SuperLinkClient(
        work / "flwr", f"127.0.0.1:{control}", credentials / "server/ca.pem"
    )
    try:
        compose("up", "-d", "superlink", "serverapp")
        wait_for_server(f"127.0.0.1:{control}", credentials / "server" / "ca.pem", 120)
        register = ["python", "-m", "keel", "deploy", "register", "--credentials", "/credentials"]
        lines = compose("exec", "-T", "superlink", *register).splitlines()
        assert [line.split()[0] for line in lines] == ["registered"] * 3
        compose("up", "-d")
        yield compose, superlink
    finally:
        print(compose("logs", "--no-color", "--tail", "30"))
        compose("down", "--volumes", "--timeout", "20")


class Compose:
    """docker-compose on compose.local.yml."""

    def __init__(self, env):
        self.env = env

    def __call__(self, *words):
        files = ["-p", "keel-test", "-f", str(app_folder / "docker/compose.local.yml")]
        return sh("docker-compose", *files, *words, env=self.env)

    def within(self, service, code):
        """What Python code prints in a service's container."""
        return self("exec", "-T", service, "python", "-c", code)


history = (
    "from pathlib import Path; print(*(p.read_text() for p in "
    "Path('/state/keel/runs').glob('*/history.jsonl')), sep='')"
)


def test_compose_files_are_what_compose_takes(docker, work):
    given = docker | {
        "KEEL_SERVER": "a:1",
        "KEEL_CLIENT": "site-a",
        "KEEL_DATA": str(work),
        "KEEL_DEVICE": "cuda",
    }
    for files in (["server"], ["client"], ["client", "gpu"], ["local"]):
        words = [w for f in files for w in ("-f", str(app_folder / f"docker/compose.{f}.yml"))]
        resolved = yaml.safe_load(sh("docker-compose", *words, "config", env=given))
        assert resolved["services"]
        if files[0] == "client":
            command = resolved["services"]["supernode"]["command"]
            assert 'name="site-a" source="folder:/data" device="cuda"' in command[-1]


def test_digits_are_trained_to_the_end_and_a_killed_client_comes_back(local):
    compose, superlink = local
    run_id = superlink.submit(
        {
            "method": "fedreco",
            **{f"fedreco.{name}": 0.05 for name in ("eta-0", "eta-u", "eta-v")},
            **{f"fedreco.{name}": "3 epochs" for name in ("k-u", "k-v")},
            "batch-size": 32,
            "model": "cnn-fedreco",
            "alpha": 5.0,
            "local-test-fraction": 0.2,
            "num-clients": 3,
            "num-rounds": 12,
            "round-timeout": 120.0,
            "device": "cpu",
        }
    )

    def lines():
        return [
            json.loads(line) for line in compose.within("serverapp", history).split("\n") if line
        ]

    deadline = time.monotonic() + run_limit_s
    while len(lines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(2)  # each look is a process in the container
    for service in ("worker-1", "executor-1"):
        compose("kill", "-s", "SIGKILL", service)
    compose("up", "-d", "executor-1")  # compose does not restart what it was told to kill
    assert superlink.wait(run_id, run_limit_s) == "finished:completed"
    rows = lines()
    assert [row["round"] for row in rows] == list(range(1, 13))
    assert "client-0001" in rows[-1]["participants"]
    state = compose.within(
        "worker-1",
        "from pathlib import Path; print(*Path('/state/keel/clients').rglob('*/client-0001/*'))",
    )
    assert "round-00012-" in state
    assert "damaged" not in state
    accuracies = [row["personal"]["mean"] for row in rows if "personal" in row]
    assert accuracies[-1] > 0.5


def test_the_code_of_a_run_finds_neither_data_nor_client_state_and_the_worker_no_network(local):
    compose, _ = local
    code = (
        "import socket; from pathlib import Path\n"
        "print([n for _, n in socket.if_nameindex()], Path('/data').exists(),"
        " Path('/state/keel/clients').exists(), Path('/run/keel/worker.sock').is_socket())"
    )
    _, *executor = compose.within("executor-0", code).rsplit(maxsplit=3)
    assert executor == ["False", "False", "True"]
    interfaces, *_ = compose.within("worker-0", code).rsplit(maxsplit=3)
    assert interfaces == "['lo']"


def test_the_code_of_a_run_cannot_take_the_socket_away_nor_fill_the_disk(local):
    compose, _ = local
    code = (
        "import os; from pathlib import Path\n"
        "for do in (lambda: os.unlink('/run/keel/worker.sock'), Path('/run/keel/x').mkdir,"
        " Path('/state/x').touch, Path('/app/x').touch):\n"
        "    try: do(); print('done')\n"
        "    except OSError as error: print(error.errno)\n"
    )
    assert compose.within("executor-0", code).split() == [str(errno.EROFS)] * 4


def test_a_killed_worker_is_restarted_and_answers_again(local, docker):
    compose, _ = local
    ask = "from client_app.worker_client import worker_status as ask\n"
    ask += "print(pid := ask('/run/keel/worker.sock', 90)['pid'])\n"
    with contextlib.suppress(AssertionError):  # the container ends
        compose.within("worker-2", ask + "import os; os.kill(pid, 9)")
    name = compose("ps", "-q", "worker-2").strip()
    count = ["docker", "inspect", "--format", "{{.RestartCount}}", name]
    wait_until(lambda: sh(*count, env=docker).strip() == "1", 60)
    assert compose.within("executor-2", ask).strip().isdigit()


def test_the_code_of_a_run_reaches_no_network_but_its_supernode(local):
    compose, _ = local
    code = (
        "import socket\n"
        "socket.create_connection(('supernode', 9094), 5).close(); print('supernode')\n"
        "for there in (('superlink', 9092), ('1.1.1.1', 53)):\n"
        "    try: socket.create_connection(there, 3); print('reached', there)\n"
        "    except OSError: pass\n"
    )
    assert compose.within("executor-0", code).split() == ["supernode"]


def test_names_that_the_code_of_a_run_looks_up_reach_no_resolver(local, asked):
    """A name can carry data out: older engines ask the machine's resolver for an inner network."""
    compose, _ = local
    code = (
        "import socket\n"
        "try: socket.getaddrinfo('data-of-{}.example', 80); print('found')\n"
        "except OSError: print('unknown')\n"
    )
    for service in ("supernode-0", "executor-0", "serverapp"):
        assert compose.within(service, code.format(service)).strip() == "unknown"
    questions = b" ".join(asked)
    assert b"data-of-supernode-0" in questions  # who may reach the outside: the check sees it
    assert b"data-of-executor-0" not in questions
    assert b"data-of-serverapp" not in questions


def test_the_code_of_a_run_reaches_no_service_of_its_machine(local, docker):
    """Everything that listens on all addresses is there at the gateway of an ordinary bridge."""
    compose, _ = local
    reached = {}
    with socket.create_server(("0.0.0.0", 0)) as service_of_this_machine:
        port = service_of_this_machine.getsockname()[1]
        for service, network in (
            ("supernode-0", "fleet"),
            ("executor-0", "client-0"),
            ("serverapp", "server"),
        ):
            words = [
                "docker",
                "network",
                "inspect",
                "--format",
                "{{(index .IPAM.Config 0).Subnet}}",
            ]
            subnet = sh(*words, f"keel-test_{network}", env=docker).strip()
            gateway = next(ipaddress.ip_network(subnet).hosts())
            code = (
                "import socket\n"
                f"try: socket.create_connection(('{gateway}', {port}), 3); print('reached')\n"
                "except OSError: print('not reached')\n"
            )
            reached[service] = compose.within(service, code).strip()
    assert reached == {
        "supernode-0": "reached",  # the check sees what there is to see
        "executor-0": "not reached",
        "serverapp": "not reached",
    }


def test_containers_run_unprivileged_and_hold_no_secret(local, docker, image):
    compose, _ = local
    assert compose.within("executor-0", "import os; print(os.getuid())").strip() == "10001"
    found = sh("docker", "run", "--rm", image, "find", "/app", "-name", "*.key", env=docker)
    assert found.strip() == ""


def test_the_documented_commands_back_up_and_restore_volumes(docker, image, tmp_path):
    """With their owner and modes, also into a volume that is not there any more."""
    for name in ("ca", "server"):
        (tmp_path / "credentials" / name).mkdir(parents=True)
    (tmp_path / "make").write_text("#!/bin/sh\n")
    (tmp_path / "make").chmod(0o755)
    env = docker | {"PATH": f"{tmp_path}{os.pathsep}{docker['PATH']}"}
    volumes = [f"keel-server_{name}" for name in ("superlink", "registry", "runs")]

    def within(volume, script):
        words = ["docker", "run", "--rm", "--network", "none", "--user", "10001"]
        return sh(*words, "-v", f"{volume}:/state", image, "sh", "-c", script, env=docker)

    look = "cd /state && find . -exec stat -c '%n %a %u %g' {} + | sort && cat superlink.db"
    try:
        for volume in volumes:
            within(volume, "umask 077; mkdir -p /state/keel/runs; echo old > /state/superlink.db")
        before = [within(volume, look) for volume in volumes]
        assert ". 1777 0 0" in before[0]
        assert "./superlink.db 600 10001 10001" in before[0]
        assert sh("sh", "-c", documented_commands("NOT BACKED UP"), cwd=tmp_path, env=env) == ""
        within(volumes[0], "echo new > /state/superlink.db; touch /state/new")
        sh("docker", "volume", "rm", volumes[1], env=docker)
        assert sh("sh", "-c", documented_commands("NOT RESTORED"), cwd=tmp_path, env=env) == ""
        assert [within(volume, look) for volume in volumes] == before
    finally:
        sh("docker", "volume", "rm", "--force", *volumes, env=docker)


def test_the_size_of_the_image(docker, image, capsys):
    size = int(sh("docker", "image", "inspect", "--format", "{{.Size}}", image, env=docker))
    with capsys.disabled():
        print(f"\nimage: {size / 2**20:.0f} MiB")
    assert size < 12 * 2**30
