"""What only a GPU shows; elsewhere other tests have it, on a CPU or with mocks.

`python -m pytest tests/test_gpu.py -n 8`. $TEST_DEVICE=cpu tries the tests on a CPU, less
those that need CUDA's own calls.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from client_fixtures import Client, initial, make_config, make_round, subject_of, train
from method_fixtures import LONG, METHODS, train_two_rounds
from run_fixtures import SMALL, all_models, resume, same_bits

import client_app.graphs
import client_app.handlers
import client_app.trainer
from client_app.evaluation import predictions
from client_app.methods.fedcr import FedCR
from client_app.worker_client import worker_status, worker_variable
from flower_adapter import GPU_LOST
from server_app.inline import run_inline

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch.cuda.is_available() is false"
)
on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA's own calls")
root = Path(__file__).parent.parent
# in which float64 is left, or rounding is multiplied
TOLERANCE = {"fedlc": 1e-5, "feddecorr": 1e-6}


def machine_name():
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "none"


def flat(arrays, names):
    return torch.cat([arrays[name].detach().double().cpu().flatten() for name in names])


def distance(arrays, others, start=()):
    """|arrays - others|, relative to |others - start|; norms over all arrays.

    start: arrays, 0 for those that it lacks. Integers have to be equal.
    """
    assert arrays.keys() == others.keys()
    names = [name for name, array in others.items() if array.is_floating_point()]
    assert all(arrays[n].tolist() == others[n].tolist() for n in others.keys() - set(names))
    if not names:
        return 0.0
    origin = {n: start[n] if n in start else torch.zeros(others[n].shape) for n in names}
    a, b, o = (flat(each, names) for each in (arrays, others, origin))
    return ((a - b).norm() / (b - o).norm().clamp_min(1e-300)).item()


@pytest.fixture
def draws_on_cpu(monkeypatch):
    """FedCR draws on its device; a CPU's and a GPU's generators give other numbers."""

    def draws(self, ctx, stream):
        generator = torch.Generator().manual_seed(ctx.seed("dropout", stream))
        size = self.samples, ctx.model.feature_width
        return lambda step: torch.randn(size[0], len(step.y), size[1], generator=generator).to(
            ctx.device
        )

    monkeypatch.setattr(FedCR, "_draws", draws)


# --- local training -------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize(
    "keys",
    [
        *({"method": name} for name in METHODS),
        {"method": "moon", "crop_padding": 2, "rotation": 9.0},
        {"method": "moon", "server_optimizer": "fedacg"},
        {"method": "moon", "precision": "bf16"},
        {"method": "moon", "cache_mb": 0},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_no_step_waits_for_the_gpu(keys, monkeypatch):
    steps = []

    class Watched(client_app.trainer.MeanTerms):
        def __init__(self):
            super().__init__()
            torch.cuda.set_sync_debug_mode("error")

        def read(self):
            torch.cuda.set_sync_debug_mode("default")
            steps.append(self.num_samples)
            return super().read()

    subject, keys = subject_of(keys["method"]), {k: v for k, v in keys.items() if k != "method"}
    train_two_rounds(subject, device=DEVICE, **keys)  # what is made once in a process
    monkeypatch.setattr(client_app.trainer, "MeanTerms", Watched)
    try:
        train_two_rounds(subject, device=DEVICE, **keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(num > 0 for num in steps) >= 2


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.fixture
def recordings(monkeypatch):
    """Those made from here on; phases of few steps are recorded too."""
    made, begin = [], client_app.graphs.Recording.__init__
    monkeypatch.setattr(client_app.trainer, "MIN_CALLS", 1)
    monkeypatch.setattr(client_app.graphs.Replayed, "obstacles", {})

    def counted(self, *about):
        begin(self, *about)
        made.append(self)

    monkeypatch.setattr(client_app.graphs.Recording, "__init__", counted)
    return made


@on_cuda
@pytest.mark.parametrize(
    "keys",
    [
        *({"method": name} for name in METHODS),
        {"method": "moon", "crop_padding": 2, "rotation": 9.0},
        {"method": "moon", "server_optimizer": "fedacg", "weight_decay": 0.1},
        {"method": "fedrcl", "model": "resnet20", "lr_decay_epoch": 0.5},
        {"method": "fedavg", "model": "resnet20", "norm": "group", "momentum": 0.0},
        {"method": "fedavg", "model": "vgg9"},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_recorded_steps_are_those_that_are_not(keys, in_float64, recordings, caplog):
    caplog.set_level("INFO")
    method = keys["method"]
    subject, keys = subject_of(method), {k: v for k, v in keys.items() if k != "method"}
    keys |= {"device": DEVICE, "local_epochs": 6, **LONG.get(method, {})}
    found = train_two_rounds(subject, cuda_graphs=True, **keys)
    num = len(recordings)
    expected = train_two_rounds(subject, cuda_graphs=False, **keys)
    assert num >= 4, caplog.text  # of batches and of steps, in each round
    assert num == len(recordings)
    assert not client_app.graphs.Replayed.obstacles
    for one, other in zip(found, expected, strict=True):
        assert (one.num_steps, one.terms) == (other.num_steps, pytest.approx(other.terms, rel=1e-5))
        parts = [("arrays", one.arrays, other.arrays), ("extra", one.extra, other.extra)]
        parts += [(group, one.state[group], arrays) for group, arrays in other.state.items()]
        far = {name: distance(a, b) for name, a, b in parts}
        assert max(far.values()) <= TOLERANCE.get(method, 1e-8), far


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedintr", "fedrep"])
def test_bf16_and_tf32_are_near_fp32(method):
    start = initial(make_config(method=method))
    plain, tf32, bf16 = (
        train(
            make_config(method=method, device=DEVICE, local_epochs=2, precision=precision),
            number=2,
            state={"previous": initial(make_config(method=method), seed=5)},
        ).arrays
        for precision in ("fp32", "tf32", "bf16")
    )
    assert {a.dtype for a in (*tf32.values(), *bf16.values())} == {torch.float32}
    start = {name: start[name] for name in plain}
    assert distance(tf32, plain, start) < 0.1
    assert 1e-6 < distance(bf16, plain, start) < 0.2


@on_cuda
def test_auto_trains_large_networks_in_bf16_and_evaluates_in_tf32():
    small = make_round(make_config(device="cuda", precision="auto"))
    now = make_round(make_config(device="cuda", precision="auto", model="vgg9"))
    assert (small.precision, now.precision) == ("fp32", "bf16")
    now.model.load_state_dict(now.received)
    logits = {
        precision: torch.cat([z for z, _ in predictions(now.model, now.train_samples, precision)])
        for precision in ("fp32", "bf16", "auto")
    }
    now.model.double()
    with torch.no_grad():
        exact = torch.cat([now.model(x.double()) for x, _ in now.train_samples.in_order()])
    errors = {k: ((z.double() - exact).norm() / exact.norm()).item() for k, z in logits.items()}
    assert errors["fp32"] < 3e-5, errors
    assert errors["bf16"] < 3e-5, errors  # evaluation after bf16 is in float32
    assert 5e-5 < errors["auto"] < 1e-2, errors


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_run_sends_from_the_cpu_and_ends_where_a_run_on_the_cpu_does(
    method, draws_on_cpu, monkeypatch, no_pictures, request
):
    if method != "fedcr":  # what it sends is float32 in part
        request.getfixturevalue("in_float64")
    reply_content = client_app.handlers.reply_content
    places = set()

    def recorded(reply):
        places.update(a.device.type for part in (reply.arrays, reply.extra) for a in part.values())
        return reply_content(reply)

    monkeypatch.setattr(client_app.handlers, "reply_content", recorded)
    subject = subject_of(method)
    found, expected = (subject.run(num_rounds=2, device=d) for d in (DEVICE, "cpu"))
    assert places <= {"cpu"}
    models = all_models(found), all_models(expected)
    assert {a.device.type for a in models[0].values()} == {"cpu"}
    assert distance(*models) <= {"fedcr": 1e-4}.get(method, 10 * TOLERANCE.get(method, 1e-8))


@pytest.mark.parametrize("method", ["fedreco", "fedintr", "fedrep"])
def test_a_run_resumes(method, tmp_path, record_property, no_pictures):
    """Of an interrupted run the last bits may differ on a GPU: whether they do is a warning."""

    def run(name, **keys):
        given = {"method": method, "device": DEVICE, "num-rounds": 3, "output-dir": str(tmp_path)}
        given |= {"run-name": name, "local-test-fraction": 0.2}
        return run_inline(SMALL | given | keys, 4)

    whole, again = run("whole"), run("again")
    cut = run("cut", **{"num-rounds": 2})
    resume(cut, num_rounds=3)
    expected = all_models(whole)
    far = {r.name: distance(all_models(r), expected) for r in (again, cut)}
    assert max(far.values()) < 1e-3, far
    bits = {r.name: same_bits(all_models(r), expected) for r in (again, cut)}
    record_property("bit-identical", str(bits))
    message = f"{method} on {DEVICE}: bit-identical to the first run: {bits}; distances {far}"
    warnings.warn(message, stacklevel=1)
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["versions"]["gpu"] == machine_name()
    assert DEVICE != "cuda" or manifest["machines"] == [f"cuda: {machine_name()}"]
    assert DEVICE == "cuda" or manifest["machines"][0].startswith("cpu: ")


# --- in processes of their own: a full, a shared and a lost GPU -----------------------------------


def environment(home):
    return os.environ | {
        "KEEL_HOME": str(home),
        "FLWR_HOME": str(home / "flwr"),
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests"), *sys.path)),
        "FLWR_TELEMETRY_ENABLED": "0",
    }


def python(home, *arguments, **more):
    """(code, stdout, stderr) of a Python process."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment(home) | more,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@on_cuda
def test_a_client_that_does_not_fit_is_one_line(tmp_path):
    keys = {"source": "digits", "model": "resnet20", "method": "fedavg", "num-rounds": 1}
    code = (
        "import sys, torch; torch.cuda.set_per_process_memory_fraction(0.001); "
        f"from server_app.inline import run_inline; run_inline({keys | {'device': 'cuda'}}, 2)"
    )
    returned, out, err = python(tmp_path, "-c", code)
    assert returned == 1, (out, err)
    assert "CUDA out of memory: lower batch-size" in err.splitlines()[-1], err


SHARED = """
import sys
import torch
from client_app import worker_server

def takes(share):
    torch.cuda.empty_cache()
    try:
        torch.empty(int(share * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return True

print(worker_server.warm_device(0.02), [takes(0.01), takes(0.03)])
"""


@on_cuda
def test_the_share_of_a_worker_is_a_limit(tmp_path):
    code, out, err = python(tmp_path, "-c", SHARED, KEEL_DEVICE="cuda")
    assert (code, out.strip()) == (0, "cuda, at most 2% of its memory [True, False]"), err


LOST = """
import sys
import torch
import torch.nn.functional as F
from client_app.methods.fedavg import FedAvg

def supervised(self, batch):
    if batch.logits.device.type == "cpu":
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\\nSearch for")
    return F.cross_entropy(batch.logits, batch.y + 1000)  # no such class: an assert on the device

FedAvg.supervised = supervised
if sys.argv[1:]:
    from keel.cli.main import main

    sys.exit(main(sys.argv[1:]))
from client_app.worker_server import main

sys.exit(main())
"""
LOST_TEXTS = ("CUDA error", "CUDNN_STATUS_EXECUTION_FAILED")  # which one is torch's choice
words = [f"{key}={value}" for key, value in SMALL.items()]


def test_a_lost_gpu_ends_a_run_with_one_line(tmp_path):
    given = ["method=fedavg", f"device={DEVICE}", "run-name=lost"]
    code, out, err = python(tmp_path, "-c", LOST, "run", *words, *given, "--clients", "3")
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1, (out, err)
    assert len(lines) == 1, err
    assert lines[0].startswith("error: round 1: "), lines
    assert any(text in lines[0] for text in LOST_TEXTS), lines
    assert "Traceback" not in out + err, err
    summary = json.loads((tmp_path / "runs" / "lost" / "summary.json").read_text())
    assert summary["status"].startswith("failed: "), summary


def test_a_worker_that_lost_its_gpu_answers_and_ends(tmp_path, monkeypatch):
    path = tmp_path / "s"
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-c", LOST],
        cwd=root,
        env=environment(tmp_path) | {worker_variable: str(path), "KEEL_DEVICE": DEVICE},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        assert worker_status(str(path), 100)["pid"] == process.pid
        monkeypatch.setenv(worker_variable, str(path))
        config = make_config(device=DEVICE)
        reply = Client(config, tmp_path / "run").ask("train", 1, initial(config))
        assert reply.error.code == GPU_LOST, reply.error
        assert any(text in reply.error.reason for text in LOST_TEXTS), reply.error
        assert "\n" not in reply.error.reason
        process.wait(60)
    finally:
        process.kill()
        process.wait(60)
        log.seek(0)
        text = log.read()
        log.close()
    assert process.returncode == 0, text
    assert "the GPU context of this process is lost: exiting, to be restarted" in text


# --- Flower's simulation --------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["0.25", pytest.param("", marks=on_cuda)])
def test_workers_of_a_simulation_share_a_gpu_or_have_their_own(share, tmp_path, no_pictures):
    """Their run ends where the inline one does."""
    pytest.importorskip("ray")
    options = ["--gpus-per-client", share] if share and DEVICE == "cuda" else []
    given = {"method": "fedreco", "fedreco.eta-0": 0.5, "local-test-fraction": 0.2}
    keys = SMALL | given | {"device": DEVICE, "run-name": "one"}
    del keys["lr"]  # FedReCo has rates of its own
    arguments = [*(f"{k}={v}" for k, v in keys.items()), "--engine", "flower", "--clients", "4"]
    code, out, err = python(tmp_path, "-m", "keel", "run", *arguments, *options)
    assert code == 0, (out, err)
    made = tmp_path / "runs" / "one"
    inline = run_inline(keys | {"output-dir": str(tmp_path / "inline")}, 4)
    assert distance(all_models(made), all_models(inline)) < 1e-4
    workers = json.loads((made / "manifest.json").read_text())["workers"]
    if DEVICE == "cuda":
        assert len(workers) == (4 if share else min(4, torch.cuda.device_count()))
        assert {each["machine"] for each in workers} == {f"cuda: {machine_name()}"}, workers
    assert {each["device"] for each in workers} == {"cuda:0" if DEVICE == "cuda" else "cpu"}
