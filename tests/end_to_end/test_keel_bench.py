"""Every part of `keel bench`, as short as it can be."""

import json

import pytest

from keel.cli.main import main

LONG = {
    "engine": "bare", "scale": "clients", "deployment": "deployed round", "frameworks": "bare",
    "gpu": "fedavg",
}  # fmt: skip
SLOW = ("resnet50", "precisions")


def bench(tmp_path, *words):
    assert main(["bench", *words, "--quick", "--out", str(tmp_path / "bench")]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (tmp_path / "bench.md").read_text().startswith("| what |")
    return rows


@pytest.mark.slow
def test_evaluation_of_personal_models(tmp_path):
    [row] = bench(tmp_path, "personal")
    assert "evaluation of 100 personal models" in row["what"]
    assert row["ratio"] > 0


@pytest.mark.slow
def test_many_clients_with_state(tmp_path):
    [row] = bench(tmp_path, "million")
    assert "1,000 clients, 100 a round, 5 rounds" in row["what"]
    assert 300 < row["clients_trained"] <= 500


@pytest.mark.slow
def test_memory(tmp_path):
    rows = bench(tmp_path, "memory")
    assert len(rows) == 2
    assert all(row["ratio"] > 1 for row in rows)  # an update takes less than the process


@pytest.mark.parametrize(
    "part", ["steps", *(pytest.param(part, marks=pytest.mark.slow) for part in SLOW)]
)
def test_local_training(part, tmp_path):
    rows = bench(tmp_path, part)
    assert all("fedavg" in row["what"] or "/" in row["what"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("part", LONG)
def test_whole_rounds(part, tmp_path):
    words = ["--gpu", "--device", "cpu"] if part == "gpu" else [part]
    assert LONG[part] in bench(tmp_path, *words)[0]["what"]
