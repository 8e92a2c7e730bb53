"""Every part of keel bench runs at its smallest size; the long ones are marked slow."""

import json

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from client_app.method import Update
from client_app.precision import products
from flower_adapter import begin_task
from keel.benchmarks import bare, frameworks, gpu, report
from keel.benchmarks.report import BenchOptions
from keel.cli.bench import PARTS
from keel.cli.main import main


def test_every_part_is_tested():
    """In end_to_end/test_keel_bench.py."""
    short = {"steps", "resnet50", "million", "personal", "memory", "precisions"}
    long = {"engine", "scale", "deployment", "frameworks", "gpu"}
    assert set(PARTS) == short | long


def test_results_that_could_not_be_written_are_refused_at_once(tmp_path, capsys):
    assert main(["bench", "engine", "--out", str(tmp_path / "none" / "bench")]) == 2
    line = f"error: --out {tmp_path}/none/bench: {tmp_path}/none is not a directory\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("name", ["v0.2", "v0.2.json", "v0.2.md"])
def test_the_results_of_a_version_do_not_take_the_place_of_anothers(name, tmp_path, monkeypatch):
    monkeypatch.setattr("keel.benchmarks.steps.overheads", lambda options: [{"what": "x"}])
    assert main(["bench", "steps", "--out", str(tmp_path / name)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"v0.2.json", "v0.2.md"}


def test_a_gpu_is_asked_for_in_one_line(refusal, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device cpu --quick" in refusal("bench", "--gpu")


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
        assert ("repeat the command to continue" in capsys.readouterr().out) is (expected == "abc")
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


def test_a_measurement_that_fails_is_tried_again_and_does_not_end_the_others(
    tmp_path, monkeypatch, refusal
):
    failing = [ValueError("compile = true: no compiler"), torch.OutOfMemoryError("CUDA out of")]
    measured = []

    def measure():
        measured.append("b")
        if failing:
            raise failing.pop()
        return {}

    rows = [("a", lambda: measured.append("a") or {}), ("b", measure), ("c", dict)]
    monkeypatch.setattr(gpu, "measurements", lambda options: rows)
    words = ["bench", "--gpu", "--device", "cpu", "--out", str(tmp_path / "bench")]
    for reason in ("CUDA out of", "compile = true"):
        error = refusal(*words)
        assert "failed measurements: 1; repeat the command to try them again; " in error
        assert f"the first is b: {reason}" in error
        written = json.loads((tmp_path / "bench.json").read_text())["rows"]
        assert [row["what"] for row in written] == ["a", "c"]
    assert main(words) == 0
    assert measured == ["a", "b", "b", "b"]


def test_a_device_that_cannot_be_measured_is_refused_in_one_line(refusal):
    assert "--device = 'cuda:1' is unknown" in refusal("bench", "--gpu", "--device", "cuda:1")


def test_frameworks_that_are_not_installed_are_left_out_in_a_line_each(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(frameworks.importlib.util, "find_spec", lambda name: name == "ray" or None)
    names = [what for what, _ in frameworks.rounds(BenchOptions(tmp_path, True, device="cpu"))]
    assert [what for what in names if "pfl" in what or "fluke" in what] == []
    assert [what for what in names if "Flower" in what] == [
        "W1: inline engine / Flower with Ray, s a round"
    ]
    assert capsys.readouterr().out.splitlines() == [
        "pfl is left out: pfl is not installed",
        "fluke is left out: fluke is not installed",
    ]
    on_gpu = [what for what, _ in frameworks.rounds(BenchOptions(tmp_path, True, device="cuda"))]
    recorded = [what for what in on_gpu if "recorded steps" in what]
    assert [what.replace(", recorded steps", "") for what in recorded] == names
    assert on_gpu[: len(names)] == names


@pytest.mark.parametrize("place", ["bare", "framework", "worker of Flower"])
def test_others_train_in_float32_as_keel_does(place, monkeypatch):
    """torch's default on a GPU is TF32 in convolutions."""
    seen = []

    def ends(*about, **options):
        seen.append(torch.backends.cudnn.conv.fp32_precision)
        raise KeyboardInterrupt

    monkeypatch.setattr(bare, "Data", ends)
    monkeypatch.setattr("sys.argv", ["bare", "fedavg"])
    frameworks.data_of.cache_clear()
    begin_task(0)
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    begin = {
        "bare": bare.main,
        "framework": lambda: frameworks.main("pfl", "", "cpu", 1),
        "worker of Flower": lambda: frameworks.client_app("", "cpu")(message, context),
    }
    with products("tf32"), pytest.raises(KeyboardInterrupt):  # puts the setting back
        begin[place]()
    assert seen == ["ieee"]


@pytest.mark.end_to_end
def test_a_framework_that_fails_names_its_error(tmp_path, monkeypatch):
    options = BenchOptions(tmp_path, True, device="cpu")
    monkeypatch.setattr(frameworks, "workload_source", lambda options: "npz:/no/such.npz")
    with pytest.raises(RuntimeError, match=r"^\w+: .*/no/such\.npz"):
        frameworks.rounds_with("pfl", options, 2)


def test_steps_are_counted_and_a_clients_error_is_raised():
    alone, other = (Update({}, n, {}) for n in (3, 4))
    assert gpu.num_steps(lambda: alone) == 3
    assert gpu.num_steps(lambda: [alone, other]) == 7
    with pytest.raises(ValueError, match="no labels"):
        gpu.num_steps(lambda: [alone, ValueError("no labels")])


@pytest.mark.slow
def test_clients_one_by_one_recorded_and_stacked_are_measured_on_a_cpu(tmp_path):
    rows = [measure() for _, measure in gpu.stacking(BenchOptions(tmp_path, True, device="cpu"))]
    assert len(rows) == 3 * len(gpu.STACKED)
    for row in rows:
        assert row["steps_a_second"] > 0
        assert 0.0 < row["busy_share"] < 1.5  # in operators, on a CPU
