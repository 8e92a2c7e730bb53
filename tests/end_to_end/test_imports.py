"""What the processes of a run import."""

import subprocess
import sys

import pytest

from protocol.code import SERVER_PACKAGES, run_by_worker
from protocol.config import app_folder


@pytest.fixture(scope="module")
def loaded() -> tuple[set[str], set[str]]:
    """The modules of a process that trains, and then loads all that runs import."""
    code = (
        "import sys, torch; from client_app.optimizers import SGD; import client_app.trainer\n"
        "p = torch.ones(3, requires_grad=True); sgd = SGD([p], 0.9, 0.1); p.sum().backward()\n"
        "torch.nn.utils.clip_grad_norm_([p], 1.0); sgd.step(0.1); print(*sys.modules)\n"
        "import server_app.app, client_app.app; print(*sys.modules)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words, cwd=app_folder, capture_output=True, text=True, timeout=120, check=True
    )
    trainer, whole = (set(line.split()) for line in done.stdout.splitlines())
    return trainer, whole


def test_a_training_process_does_not_load_torchs_compiler(loaded):
    """It takes 1 to 2 seconds, in deployment at every message."""
    trainer, _ = loaded
    assert "torch" in trainer
    assert [name for name in trainer if name.startswith("torch._dynamo")] == []


def test_all_packages_that_a_run_loads_are_in_the_digest(loaded):
    own = {path.parent.name for path in app_folder.glob("*/__init__.py")}
    packages = {name.partition(".")[0] for modules in loaded for name in modules}
    assert packages & own <= {*run_by_worker, *SERVER_PACKAGES}
