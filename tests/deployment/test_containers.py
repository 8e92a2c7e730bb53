"""Real containers: a server and three clients train digits to the end, one killed on the way.

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
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_fixtures import wait_until

from keel.deployment.credentials import make_credentials
from keel.deployment.keys import make_key
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
# a container that may reach the outside, and those that run the code of a run
PLACES = [(clients[0], "supernode"), (clients[0], "executor"), ("server", "serverapp")]
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


def write_part(folder, number):
    """A third of scikit-learn's digits, as a site's own npz file."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    part = slice(number, None, len(clients))
    images = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)[part]
    labels, cut = labels[part], len(labels[part]) * 4 // 5
    names = ("x_train", "y_train", "x_test", "y_test")
    parts = (images[:cut], labels[:cut], images[cut:], labels[cut:])
    folder.mkdir(parents=True)
    np.savez(folder / "own.npz", **dict(zip(names, parts, strict=True)))


@pytest.fixture(scope="module")
def deployed(work, docker, image):
    """A server and clients with own data and keys, as `make deploy-server`, ... start them."""
    [control] = free_ports(1)
    credentials = work / "credentials"
    make_credentials(credentials, ["superlink"])
    for number, name in enumerate(clients):
        write_part(work / "data" / name, number)
        make_key(credentials / name, name)
        shutil.copy(credentials / "server" / "ca.pem", credentials / name)
    sh("chown", "-R", "10001", str(credentials))
    env = docker | {"KEEL_IMAGE": image, "KEEL_UID": "10001", "KEEL_SOURCE": "npz:/data/own.npz"}
    env |= {"KEEL_SERVER": "superlink:9092", "KEEL_FLEET": "127.0.0.1:0"}
    env |= {"KEEL_CONTROL": f"127.0.0.1:{control}"}
    files = ["docker/compose.client.yml", "tests/deployment/compose.trial.yml"]
    machines = {"server": Compose("server", ["docker/compose.server.yml"], env | {
        "KEEL_CREDENTIALS": str(credentials / "server")})}  # fmt: skip
    for name in clients:
        own = {"KEEL_CLIENT": name, "KEEL_DATA": str(work / "data" / name)}
        own |= {"KEEL_CREDENTIALS": str(credentials / name)}
        machines[name] = Compose(name, files, env | own)
    ca = credentials / "server" / "ca.pem"
    superlink = SuperLinkClient(work / "flwr", f"127.0.0.1:{control}", ca)
    try:
        machines["server"]("up", "-d")
        wait_for_server(f"127.0.0.1:{control}", ca, 120)
        register = ["python", "-m", "keel", "deploy", "register", "--credentials", "/credentials"]
        requests = "".join((credentials / name / f"{name}.pub").read_text() for name in clients)
        lines = machines["server"]("exec", "-T", "superlink", *register, "-", input=requests)
        assert [line.split()[0] for line in lines.splitlines()[:3]] == ["registered"] * 3
        for name in clients:
            machines[name]("up", "-d")
        yield machines, superlink
    finally:
        for machine in reversed(machines.values()):
            print(machine("logs", "--no-color", "--tail", "30"))
            machine("down", "--volumes", "--timeout", "20")


class Compose:
    """docker-compose for one machine of the deployment."""

    def __init__(self, name, files, env):
        self.project, self.env = f"keel-trial-{name}", env
        self.options = ["-p", self.project, "--project-directory", str(app_folder / "docker")]
        self.options += [word for file in files for word in ("-f", str(app_folder / file))]

    def __call__(self, *words, **options):
        return sh("docker-compose", *self.options, *words, env=self.env, **options)

    def within(self, service, code):
        """What Python code prints in a service's container."""
        return self("exec", "-T", service, "python", "-c", code)


READ = (
    "from pathlib import Path; print(*(p.read_text() for p in "
    "Path('/state/keel/runs').glob('*/{}.jsonl')), sep='')"
)


def test_compose_files_are_what_compose_takes(docker, work):
    given = docker | {"KEEL_SERVER": "a:1", "KEEL_CLIENT": "site-a", "KEEL_DATA": str(work)}
    given |= {"KEEL_DEVICE": "cuda"}
    for files in (["server"], ["client"], ["client", "gpu"]):
        words = [w for f in files for w in ("-f", str(app_folder / f"docker/compose.{f}.yml"))]
        resolved = yaml.safe_load(sh("docker-compose", *words, "config", env=given))
        assert resolved["services"]
        if files[0] == "client":
            command = resolved["services"]["supernode"]["command"]
            values = dict(pair.split("=", 1) for pair in shlex.split(command[-1]))
            assert values == {
                "name": "site-a",
                "source": "folder:/data",
                "classes": "",
                "device": "cuda",
            }


def test_digits_are_trained_to_the_end_and_a_killed_client_comes_back(deployed):
    machines, superlink = deployed
    run_id = superlink.submit(
        {
            "method": "fedreco",
            **{f"fedreco.{name}": 0.05 for name in ("eta-0", "eta-u", "eta-v")},
            **{f"fedreco.{name}": "3 epochs" for name in ("k-u", "k-v")},
            "batch-size": 32,
            "model": "cnn-fedreco",
            "local-test-fraction": 0.2,
            "num-clients": 3,
            "num-rounds": 12,
            "round-timeout": 120.0,
            "device": "cpu",
        }
    )

    def lines(name="history"):
        found = machines["server"].within("serverapp", READ.format(name))
        return [json.loads(line) for line in found.split("\n") if line]

    deadline = time.monotonic() + run_limit_s
    while len(lines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(2)  # each look is a process in the container
    killed = machines[clients[1]]
    for service in ("worker", "executor"):
        killed("kill", "-s", "SIGKILL", service)
    killed("up", "-d", "executor")  # compose does not restart what it was told to kill
    assert superlink.wait(run_id, run_limit_s) == "finished:completed"
    rows = lines()
    assert [row["round"] for row in rows] == list(range(1, 13))
    assert "client-0001" in lines("clients")[-1]["participants"]
    state = machines[clients[1]].within(
        "worker",
        "from pathlib import Path; print(*Path('/state/keel/clients').rglob('*/client-0001/*'))",
    )
    assert "round-00012-" in state
    assert "damaged" not in state
    accuracies = [row["personal"]["mean"] for row in rows if "personal" in row]
    assert accuracies[-1] > 0.5


def test_the_code_of_a_run_finds_neither_data_nor_client_state_and_the_worker_no_network(deployed):
    machines, _ = deployed
    code = (
        "import socket; from pathlib import Path\n"
        "print([n for _, n in socket.if_nameindex()], Path('/data').exists(),"
        " Path('/state/keel/clients').exists(), Path('/run/keel/worker.sock').is_socket())"
    )
    _, *executor = machines[clients[0]].within("executor", code).rsplit(maxsplit=3)
    assert executor == ["False", "False", "True"]
    interfaces, *_ = machines[clients[0]].within("worker", code).rsplit(maxsplit=3)
    assert interfaces == "['lo']"


def test_the_code_of_a_run_cannot_take_the_socket_away_nor_fill_the_disk(deployed):
    machines, _ = deployed
    code = (
        "import os; from pathlib import Path\n"
        "for do in (lambda: os.unlink('/run/keel/worker.sock'), Path('/run/keel/x').mkdir,"
        " Path('/state/x').touch, Path('/app/x').touch):\n"
        "    try: do(); print('done')\n"
        "    except OSError as error: print(error.errno)\n"
    )
    assert machines[clients[0]].within("executor", code).split() == [str(errno.EROFS)] * 4


def test_a_killed_worker_is_restarted_and_answers_again(deployed, docker):
    machines, _ = deployed
    ask = "from client_app.worker_client import worker_status as ask\n"
    ask += "print(pid := ask('/run/keel/worker.sock', 90)['pid'])\n"
    with contextlib.suppress(AssertionError):  # the container ends
        machines[clients[2]].within("worker", ask + "import os; os.kill(pid, 9)")
    name = machines[clients[2]]("ps", "-q", "worker").strip()
    count = ["docker", "inspect", "--format", "{{.RestartCount}}", name]
    wait_until(lambda: sh(*count, env=docker).strip() == "1", 60)
    assert machines[clients[2]].within("executor", ask).strip().isdigit()


def test_the_code_of_a_run_reaches_no_network_but_its_supernode(deployed):
    machines, _ = deployed
    code = (
        "import socket\n"
        "socket.create_connection(('supernode', 9094), 5).close(); print('supernode')\n"
        "for there in (('superlink', 9092), ('1.1.1.1', 53)):\n"
        "    try: socket.create_connection(there, 3); print('reached', there)\n"
        "    except OSError: pass\n"
    )
    assert machines[clients[0]].within("executor", code).split() == ["supernode"]


def test_names_that_the_code_of_a_run_looks_up_reach_no_resolver(deployed, asked):
    """A name can carry data out: older engines ask the machine's resolver for an inner network."""
    machines, _ = deployed
    code = (
        "import socket\n"
        "try: socket.getaddrinfo('data-of-{}.example', 80); print('found')\n"
        "except OSError: print('unknown')\n"
    )
    for machine, service in PLACES:
        assert machines[machine].within(service, code.format(service)).strip() == "unknown"
    questions = b" ".join(asked)
    assert b"data-of-supernode" in questions  # who may reach the outside: the check sees it
    assert b"data-of-executor" not in questions
    assert b"data-of-serverapp" not in questions


def test_the_code_of_a_run_reaches_no_service_of_its_machine(deployed, docker):
    """Everything that listens on all addresses is there at the gateway of an ordinary bridge."""
    machines, _ = deployed
    reached = {}
    with socket.create_server(("0.0.0.0", 0)) as service_of_this_machine:
        port = service_of_this_machine.getsockname()[1]
        for machine, service in PLACES:
            network = "keel-trial-server_outside"
            if service != "supernode":
                network = f"{machines[machine].project}_inside"
            words = ["docker", "network", "inspect", "--format"]
            words += ["{{(index .IPAM.Config 0).Subnet}}", network]
            subnet = sh(*words, env=docker).strip()
            gateway = next(ipaddress.ip_network(subnet).hosts())
            code = (
                "import socket\n"
                f"try: socket.create_connection(('{gateway}', {port}), 3); print('reached')\n"
                "except OSError: print('not reached')\n"
            )
            reached[service] = machines[machine].within(service, code).strip()
    assert reached == {
        "supernode": "reached",  # the check sees what there is to see
        "executor": "not reached",
        "serverapp": "not reached",
    }


def test_containers_run_unprivileged_and_hold_no_secret(deployed, docker, image):
    machines, _ = deployed
    user = "import os; print(os.getuid())"
    assert machines[clients[0]].within("executor", user).strip() == "10001"
    found = sh("docker", "run", "--rm", image, "find", "/app", "-name", "*.key", env=docker)
    assert found.strip() == ""


def test_the_size_of_the_image(docker, image, capsys):
    size = int(sh("docker", "image", "inspect", "--format", "{{.Size}}", image, env=docker))
    with capsys.disabled():
        print(f"\nimage: {size / 2**20:.0f} MiB")
    assert size < 12 * 2**30
