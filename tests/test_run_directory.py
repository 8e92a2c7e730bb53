"""The run directory: its format, and that neither a kill nor damage loses anything in silence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_fixtures import (
    NUM_CLIENTS,
    SMALL,
    assert_same_run,
    history_of,
    resume,
    same_bits,
    without_pictures,
)

import server_app.run
import server_app.run_directory
from protocol.config import resolve_config
from protocol.options import OptionValue
from server_app.inline import run_inline
from server_app.manifest import begin_manifest
from server_app.run_directory import Checkpoint, RunDirectory, new_run_directory
from server_app.run_reader import (
    CLIENTS_FILE,
    HISTORY_FILE,
    LAYOUT,
    MANIFEST_FILE,
    RunReader,
    new_path,
)

pytestmark = pytest.mark.end_to_end  # they train whole runs

LINE = {
    "participants": ["a", "b"],
    "left_out": {"c": "no answer in time"},
    "rejected": 0,
    "reset_needed": [],
    "backed_off": ["d"],
    "losses": {"supervised": float("nan"), "penalty": 0.5},
    "seconds": {"training": 1.5},
    "bytes_down": 7,
    "bytes_up": 8,
    "personal": {"mean": 0.5, "worst_decile": 0.25, "clients": {"a": 0.25, "b": 0.75}},
}


@pytest.fixture
def directory(tmp_path: Path):
    """A new run directory with a config and a manifest, open."""
    config = resolve_config({"output-dir": str(tmp_path), "run-name": "made"})
    opened = new_run_directory(config)
    opened.save_config(config, {"run-name": "made"})
    begin_manifest(opened.path, config, 3, True, "split")
    yield opened
    opened.close()


def checkpoint(number: int) -> Checkpoint:
    arrays = {"w": torch.full((3,), float(number))}
    return Checkpoint(number, arrays, {"n": torch.tensor([number])})


def done(directory: RunDirectory, *rounds: int) -> None:
    """Record these rounds, each with its checkpoint."""
    for number in rounds:
        directory.rewind(number - 1) if number == 1 else None
        directory.record({"round": number, **LINE})
        directory.save_checkpoint(checkpoint(number))


# --- lines -----------------------------------------------------------------------------------


def test_a_round_is_one_short_line_and_one_about_clients(directory):
    done(directory, 1)
    run = RunReader(directory.path)
    [line], [of_clients] = run.history, list(run.clients())
    assert line["personal"] == {"mean": 0.5, "worst_decile": 0.25}
    assert (line["num_participants"], line["num_left_out"], line["num_backed_off"]) == (2, 1, 1)
    assert line["losses"] == {"supervised": None, "penalty": 0.5}  # JSON has no NaN
    assert "participants" not in line
    assert of_clients["personal"] == {"a": 0.25, "b": 0.75}
    assert of_clients["participants"] == ["a", "b"]
    assert of_clients["left_out"] == {"c": "no answer in time"}
    assert "losses" not in of_clients


def test_what_a_kill_left_of_a_round_is_not_read_and_dropped_by_a_resume(directory):
    done(directory, 1, 2)
    with (directory.path / CLIENTS_FILE).open("a") as file:
        file.write('{"round": 3}\n{"round": 4, "par')  # a whole line whose round was not done
    with (directory.path / HISTORY_FILE).open("a") as file:
        file.write('{"round": 3, "los')
    run = RunReader(directory.path)
    assert (run.last_round, len(list(run.clients()))) == (2, 2)
    assert [line["round"] for line in directory.rewind(1)] == [1]  # to a checkpoint
    done(directory, 2, 3)
    assert [line["round"] for line in history_of(directory.path)] == [1, 2, 3]


# --- damage ----------------------------------------------------------------------------------


def cut(content: str) -> str:
    return content[: len(content) // 2]


DAMAGE: list[tuple[str, Callable[[str], str]]] = [
    ("config.json", cut),
    ("config.json", lambda content: "{}"),
    ("manifest.json", cut),
    ("summary.json", cut),
    ("summary.json", lambda content: "[]"),
    (HISTORY_FILE, lambda content: "damaged" + content),
    (HISTORY_FILE, lambda content: content.split("\n", 1)[1]),  # without round 1
    (HISTORY_FILE, lambda content: content.split("\n")[0] + "\n"),  # without the last
    ("audit.jsonl", lambda content: content.replace('"train"', '"trail"', 1)),
]


def test_a_damaged_file_is_refused_in_one_line_that_names_it(run):
    path = run({"num-rounds": 2, "local-epochs": 0})
    for name, damage in DAMAGE:
        file, content = path / name, (path / name).read_text()
        file.write_text(damage(content))
        before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
        with pytest.raises(ValueError) as caught:
            resume(path, num_rounds=3)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert before == {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
        file.write_text(content)


@pytest.mark.parametrize("layout", [None, LAYOUT + 1])
def test_a_directory_of_another_layout_is_refused(directory, layout):
    path = directory.path / MANIFEST_FILE
    manifest = json.loads(path.read_text()) | {"layout": layout}
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))
    with pytest.raises(ValueError) as caught:
        RunReader(directory.path).config  # noqa: B018
    assert str(directory.path) in str(caught.value)
    assert f"layout {layout or 1}" in str(caught.value)


def test_a_key_that_is_gone_does_not_keep_a_run_from_being_read(directory):
    path = directory.path / "config.json"
    saved = json.loads(path.read_text())
    saved["config"] |= {"no-longer-there": 3, "lr": 0.125}
    path.write_text(json.dumps(saved))
    run = RunReader(directory.path)
    assert run.run_config.flat["lr"] == 0.125
    assert run.config.keys() == resolve_config({}).flat.keys()


# --- checkpoints -----------------------------------------------------------------------------


def test_the_newest_two_checkpoints_stay_and_the_newest_intact_one_is_read(directory):
    done(directory, 1, 2, 3)
    assert directory.checkpoint_rounds() == [2, 3]
    expected = checkpoint(3)
    found = directory.newest_checkpoint(expected.arrays)
    assert (found.round, found.state) == (3, expected.state)
    assert same_bits(found.arrays, expected.arrays)
    newest = RunReader(directory.path).checkpoints[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    assert directory.newest_checkpoint(expected.arrays).round == 2
    assert directory.skipped == [newest]
    for path in RunReader(directory.path).checkpoints:
        path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="checkpoints"):
        directory.newest_checkpoint(expected.arrays)


def test_a_checkpoint_has_its_arrays_in_the_order_of_the_run_and_is_of_its_model(directory):
    arrays = {"weight": torch.ones(2), "bias": torch.zeros(2)}
    directory.save_checkpoint(Checkpoint(1, arrays, {}))
    directory.record(LINE | {"round": 1})
    assert list(directory.newest_checkpoint(arrays).arrays) == ["weight", "bias"]
    with pytest.raises(ValueError):
        directory.newest_checkpoint({"v": torch.zeros(3)})


# --- a kill ----------------------------------------------------------------------------------


THREE: dict[str, OptionValue] = {"method": "fedintr", "num-rounds": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is not killed."""
    with without_pictures():
        folder = tmp_path_factory.mktemp("whole")
        return run_inline(SMALL | THREE | {"output-dir": str(folder)}, NUM_CLIENTS)


@pytest.mark.parametrize("step", range(5))
def test_a_run_that_is_killed_anywhere_in_a_round_resumes_to_the_same_bits(
    run, whole, tmp_path, monkeypatch, step: int
):
    """Before each of the four steps that write round 2 of 3, and before round 3."""
    steps = list[str]()

    def dying(function):
        def call(*arguments):
            if len(steps) == 4 + step:  # a round has four steps
                raise SystemExit
            steps.append(function.__name__)
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        module = server_app.run_directory
        patch.setattr(module, "append_line", dying(module.append_line))
        patch.setattr(server_app.run, "note_round", dying(server_app.run.note_round))
        patch.setattr(RunDirectory, "save_checkpoint", dying(RunDirectory.save_checkpoint))
        with pytest.raises(SystemExit):
            run(THREE | {"run-name": "killed"})
    assert steps[:4] == ["append_line", "append_line", "note_round", "save_checkpoint"]
    resumed = resume(tmp_path / "killed")
    assert_same_run(whole, resumed)
    noted = [RunReader(each).manifest["rounds"] for each in (whole, resumed)]
    assert noted[0].keys() == {"1", "2", "3"}
    assert noted[1] == noted[0]


# --- names and ends --------------------------------------------------------------------------


def test_a_directory_is_made_once_and_open_once(directory, tmp_path):
    config = resolve_config({"output-dir": str(tmp_path), "run-name": "a.b_C-1"})
    assert new_path(config) == tmp_path / "a.b_C-1"
    new_run_directory(config).close()
    with pytest.raises(ValueError, match="run-name"):
        new_path(config)
    with pytest.raises(ValueError, match=str(directory.path)):
        RunDirectory(directory.path)


def test_an_output_dir_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ValueError, match="output-dir"):
        new_run_directory(resolve_config({"output-dir": str(tmp_path / "runs")}))


@pytest.mark.parametrize(
    ("method", "kept"), [("moon", (0, 0)), ("fedreco", (1, 4)), ("fedavg", (0, 0))]
)
def test_without_keep_state_only_what_personal_models_need_stays(run, method, kept):
    path = run({"method": method, "num-rounds": 2, "keep-state": False, "local-test-fraction": 0.2})
    found = [path.glob("checkpoints/round-*"), path.glob("clients/*/round-*")]
    assert tuple(len(list(each)) for each in found) == kept
    with pytest.raises(ValueError, match=r"num-rounds|keep-state"):
        resume(path)
