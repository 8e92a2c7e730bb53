"""Every part of keel bench runs at its smallest size; the long ones are marked slow."""

import json

from keel.cli.bench import PARTS, source_lines
from keel.cli.main import main
from protocol.config import app_folder

LONG = {"engine": "bare", "scale": "clients", "deployment": "deployed round", "gpu": "fedavg"}


def bench(tmp_path, *words):
    assert main(["bench", *words, "--quick", "--out", str(tmp_path / "bench")]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (tmp_path / "bench.md").read_text().startswith("| what |")
    return rows


def test_every_part_is_tested():
    assert set(PARTS) == {"splits", "steps", "resnet50", "operators", *LONG}


def test_lines_counts_what_git_tracks(capsys):
    assert main(["bench", "--lines"]) == 0
    *packages, total = capsys.readouterr().out.splitlines()
    counts = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in packages}
    assert counts == source_lines(app_folder)
    assert counts["models"] > 100
    assert int(total.split()[0].replace(",", "")) == sum(counts.values()) - counts["tests"]


def test_a_gpu_is_asked_for_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--gpu"]) == 2
    assert "--device cpu --quick" in capsys.readouterr().err
