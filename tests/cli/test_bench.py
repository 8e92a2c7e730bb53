"""Every part of keel bench runs at its smallest size; the long ones are marked slow."""

import json

import pytest

from keel.benchmarks import gpu, report
from keel.benchmarks.report import BenchOptions
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
    assert set(PARTS) == {"splits", "steps", "resnet50", "operators", "untrained", "memory", *LONG}


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


def test_the_gpu_part_stops_in_time_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    measured, now = [], [0.0]

    def measurement(what):
        def measure():
            now[0] += 200.0
            measured.append(what)
            return {"wall_seconds": now[0]}

        return what, measure

    monkeypatch.setattr(gpu, "measurements", lambda options: map(measurement, "abcde"))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    words = ["bench", "--gpu", "--device", "cpu", "--out", str(tmp_path / "bench")]
    for expected in ("abc", "abcde", "abcde"):  # 480 s: none begins after 600
        assert main(words) == 0
        rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
        assert [row["what"] for row in rows] == measured == list(expected)
        assert ("the same command continues" in capsys.readouterr().out) is (expected == "abc")
    monkeypatch.setattr(report.torch, "__version__", "0.0")  # others' rows are measured again
    assert main(words) == 0
    assert measured == list("abcdeabc")


@pytest.mark.parametrize("other", [["--quick"], ["--device", "cuda"], ["--cifar10", "/other"]])
def test_rows_of_other_sizes_or_of_another_device_are_measured_again(other, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        gpu, "measurements", lambda options: [("a", lambda: {"n": measured.append("a")})]
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    words = ["bench", "--gpu", "--out", str(tmp_path / "bench")]
    for arguments, count in ((["--device", "cpu"], 1), (["--device", "cpu", *other], 2)):
        assert main([*words, *arguments]) == 0
        assert main([*words, *arguments]) == 0  # continues with nothing
        assert len(measured) == count


def test_an_interrupted_gpu_part_keeps_what_it_measured(tmp_path, monkeypatch):
    def fails():
        raise ValueError("out of memory")

    rows = [("a", dict), ("b", fails)]
    monkeypatch.setattr(gpu, "measurements", lambda options: rows)
    words = ["bench", "--gpu", "--device", "cpu", "--out", str(tmp_path / "bench")]
    assert main(words) == 2
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == [{"what": "a"}]


@pytest.mark.slow
def test_clients_one_by_one_and_stacked_are_measured_on_a_cpu(tmp_path):
    rows = [measure() for _, measure in gpu.stacking(BenchOptions(tmp_path, True, device="cpu"))]
    assert len(rows) == 2
    for row in rows:
        assert row["steps_a_second"] > 0
        assert 0.0 < row["busy_share"] < 1.5  # in operators, on a CPU
