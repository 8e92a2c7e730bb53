"""What a training process does not import."""

import subprocess
import sys


def test_a_training_process_does_not_load_torchs_compiler():
    """It takes 1 to 2 seconds, in deployment at every message."""
    code = (
        "import sys, torch; from client_app.sgd import SGD; import client_app.trainer\n"
        "p = torch.ones(3, requires_grad=True); sgd = SGD([p], 0.9, 0.1); p.sum().backward()\n"
        "torch.nn.utils.clip_grad_norm_([p], 1.0); sgd.step(0.1)\n"
        "print([m for m in sys.modules if m.startswith('torch._dynamo')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
