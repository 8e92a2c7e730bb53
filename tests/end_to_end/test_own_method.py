"""The README's example of a method of one's own, run from one file and one table."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

root = Path(__file__).parents[2]
readme = (root / "README.md").read_text()
packages = ("client_app", "data", "models", "protocol", "server_app", "strategies")

RUN = """
from server_app.inline import run_inline

keys = {"method": "fedpull", "num-rounds": 2, "fedpull.mu": 0.5, "lr": 0.05}
print(run_inline(keys, num_clients=2))
"""


def test_the_readmes_method_trains_and_its_penalty_counts(tmp_path: Path) -> None:
    code = re.search(r"```python\n(# client_app/methods/fedpull\.py\n.*?)```", readme, re.S)
    table = re.search(r"```toml\n(\[tool\.flwr\.app\.config\.fedpull\]\n.*?)```", readme, re.S)
    assert code
    assert table
    app = tmp_path / "app"
    for package in packages:
        shutil.copytree(root / package, app / package)
    (app / "client_app" / "methods" / "fedpull.py").write_text(code[1])
    (app / "pyproject.toml").write_text((root / "pyproject.toml").read_text() + "\n" + table[1])
    environment = os.environ | {"KEEL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(app)}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=app,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert all(line["losses"]["penalty"] > 0 for line in lines)
