"""Histories and summaries, of this version and of 0.1: tests/data/run-0.1 was made by Keel 0.1.0.

It is a FedAvg run of 3 clients and 3 rounds, killed after round 2, in which client-0001 failed
once. The expected results are those of Keel 0.1.0 for the same run without the kill.
"""

import errno
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from keel.runs import SavedRun
from protocol.files import write_atomically
from server_app import history
from server_app.history import (
    HistoryReader,
    append_history,
    condensed,
    each_line,
    load_json,
    read_history,
    truncate_history,
    whole_lines,
    without_clients,
)
from server_app.summary import (
    headline,
    read_config_file,
    read_manifest,
    read_summary,
    remove_state,
    summarise,
    write_summary,
)

OLD_RUN = Path(__file__).parent / "data" / "run-0.1"


@pytest.fixture
def old_run(tmp_path) -> Path:
    """A copy of the run of 0.1."""
    return Path(shutil.copytree(OLD_RUN, tmp_path / "run"))


def line_of(number: int, accuracy: float | None = None) -> dict[str, object]:
    line: dict[str, object] = {
        "round": number,
        "left_out": {"client-0001": "late"} if number == 1 else {},
        "rejected": number,
        "losses": {},
        "seconds": {"training": 1.5, "evaluation": 0.5},
        "bytes_down": 10,
        "bytes_up": 20,
    }
    return line if accuracy is None else line | {"global": {"accuracy": accuracy}}


# --- the history ---------------------------------------------------------------------------------


def test_lines_come_back_in_order_and_an_incomplete_last_one_is_ignored(tmp_path):
    path = tmp_path / "history.jsonl"
    assert read_history(path) == []
    for number in (1, 2):
        append_history(path, line_of(number))
    complete = path.read_bytes()
    path.write_bytes(complete + b'{"round": 3')
    assert read_history(path) == read_history(tmp_path) == [line_of(1), line_of(2)]
    append_history(path, line_of(4))  # ends the incomplete line first
    with pytest.raises(ValueError, match="line 3 is damaged"):
        read_history(path)


def test_what_json_cannot_express_is_null(tmp_path):
    path = tmp_path / "history.jsonl"
    append_history(path, line_of(1) | {"losses": {"a": float("nan"), "b": float("inf"), "c": 1.0}})
    assert read_history(path) == [line_of(1) | {"losses": {"a": None, "b": None, "c": 1.0}}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "list"),
        ("null", "NoneType"),
        ('{"round": 1}', "it has no key 'losses'"),
        (
            '{"round": 2, "losses": {}, "seconds": {}, "left_out": {}, "old_state": [1]}',
            r"old_state = \[1\]",
        ),
        ('{"round": "x", "losses": {}, "seconds": {}, "left_out": {}}', "round = 'x'"),
        (f'{{"round": {10**20}, "losses": {{}}, "seconds": {{}}, "left_out": {{}}}}', "round = 1"),
    ],
)
def test_a_line_of_another_form_is_refused_and_a_resume_drops_it(tmp_path, line, reason):
    path = tmp_path / "history.jsonl"
    path.write_text(f"{json.dumps(line_of(1))}\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2 is damaged: .*{reason}"):
        read_history(path)
    assert truncate_history(path, 2) == [line_of(1)]


def test_truncation_drops_the_rounds_after_the_last_and_renames_the_others(old_run):
    path = old_run / "history.jsonl"
    truncate_history(path, 1)
    [line] = each_line(path, [])
    assert json.loads(path.read_text()) == line
    assert "rejected" in line


def test_a_kill_during_truncation_leaves_the_history_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    for number in (1, 2, 3):
        append_history(path, line_of(number))
    before = path.read_bytes()

    def killed(*what):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        truncate_history(path, 2)
    assert path.read_bytes() == before


def test_truncation_gives_whole_lines_one_at_a_time_and_returns_them_without_clients(tmp_path):
    """What is held for the rest of a run does not grow with the number of clients."""
    path = tmp_path / "history.jsonl"
    whole = [client_line(number, ["a", "b"]) for number in (1, 2, 3)]
    for line in whole:
        append_history(path, line)
    seen: list[dict[str, object]] = []
    assert truncate_history(path, 2, seen.append) == [without_clients(line) for line in whole[:2]]
    assert seen == whole[:2]
    assert "participants" not in without_clients(whole[0])


@pytest.mark.parametrize("read", [read_history, whole_lines])
def test_a_history_is_read_without_holding_each_clients_accuracies(read, tmp_path):
    """With a million clients those of a hundred rounds would take 20 GB."""
    path = tmp_path / "history.jsonl"
    names = [f"client-{k:04d}" for k in range(2000)]
    for number in range(1, 31):
        append_history(path, client_line(number, names) | {"participants": names[:10]})
    tracemalloc.start()
    try:
        read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size


def test_a_line_without_clients_does_not_grow_with_their_number():
    score = {"mean": 0.5, "worst_decile": 0.25, "clients": {"client-0000": 0.5}}
    line = line_of(3) | {"participants": ["client-0000"], "personal": score, "local_global": score}
    short = {"mean": 0.5, "worst_decile": 0.25}
    assert without_clients(line) == line_of(3) | {"personal": short, "local_global": short}
    assert score["clients"]  # the line itself stays whole


# --- the summary ---------------------------------------------------------------------------------

CONFIG = {
    "method": "fedavg",
    "server-optimizer": "fedadam",
    "source": "digits",
    "model": "cnn-fedcka",
    "seed": 3,
    "num-rounds": 9,
}


def test_a_summary_counts_and_averages_what_the_lines_say():
    history = [line_of(1, 0.2), line_of(2), line_of(3, 0.8), line_of(4, 0.6)]
    summary = summarise(history, CONFIG, last_rounds=2)
    assert (summary["method"], summary["server_optimizer"], summary["seed"]) == (
        *("fedavg", "fedadam", 3),
    )
    assert (summary["rounds"], summary["num_rounds"]) == (4, 9)
    assert (summary["seconds"], summary["seconds_per_round"]) == (8.0, 2.0)
    assert (summary["bytes_down"], summary["bytes_up"]) == (40, 80)
    assert (summary["left_out"], summary["rejected"]) == (1, 10)
    assert (summary["accuracy_of"], summary["final_accuracy"], summary["best_accuracy"]) == (
        *("global.accuracy", 0.6, 0.8),
    )
    result = summary["results"]["global.accuracy"]
    assert result["mean of last 2"] == result["median of last 2"] == pytest.approx(0.7)
    average = 0.9 * (0.9 * 0.2 + 0.1 * 0.8) + 0.1 * 0.6
    assert result["EMA 0.9"] == pytest.approx(average)


def test_a_summary_before_the_first_round_has_no_accuracy():
    summary = summarise([], CONFIG, last_rounds=10)
    assert (summary["rounds"], summary["final_accuracy"], summary["results"]) == (0, None, {})


def test_personal_models_come_first_as_the_accuracy_of_a_run():
    names = ("global.accuracy", "personal.mean")
    results = {name: {"final": i, "best": i} for i, name in enumerate(names)}
    assert headline(results)["accuracy_of"] == "personal.mean"


def test_a_run_that_has_written_no_summary_yet_is_starting(old_run):
    (old_run / "summary.json").unlink()
    summary = read_summary(old_run)
    assert (summary["status"], summary["rounds"], summary["ended"]) == ("starting", 0, None)
    assert SavedRun(old_run).state == "interrupted"  # no process writes it


def test_a_moved_run_directory_is_named_where_it_is(tmp_path):
    write_summary(tmp_path, {"status": "finished", "directory": "/elsewhere", "num_rounds": 1})
    assert read_summary(tmp_path)["directory"] == str(tmp_path)


EXPECTED = 'expected an object with the objects "config" and "overrides"'


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "Expecting property name"),
        ("[]", EXPECTED),
        ('{"config": [], "overrides": {}}', EXPECTED),
        ('{"config": {}}', "it has no key 'overrides'"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, content, fault):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config_file(tmp_path)
    (tmp_path / "config.json").write_text(content)
    expected = (
        rf"config\.json is damaged or incomplete: {fault}.*; put back a copy, or start a new run$"
    )
    with pytest.raises(ValueError, match=expected):
        read_config_file(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        *({"seconds": 3}, {"seconds": {"training": "x"}}, {"participants": None}, {"global": 1}),
        *({"seconds": {"training": value}} for value in (math.inf, math.nan, 10**400)),
        *({"backed_off": 5}, {"client_seconds": "1"}, {"client_cpu_seconds": None}),
    ],
)
def test_a_line_of_other_kinds_of_values_is_damaged(changed, tmp_path):
    whole, damaged = json.dumps(line_of(1)), json.dumps(line_of(2) | changed)
    (tmp_path / "history.jsonl").write_text(f"{whole}\n{damaged}\n")
    lines, faults = whole_lines(tmp_path)
    assert lines == [line_of(1)]
    assert [fault.split()[2] for fault in faults] == ["2"]


@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
@pytest.mark.parametrize("content", ["", "[1]", "[" * 10_000, '"x"'])
def test_a_damaged_summary_or_manifest_is_named(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    read = read_summary if name == "summary.json" else read_manifest
    with pytest.raises(ValueError, match=f"{name}.* is damaged"):
        read(tmp_path)


def test_on_a_full_disk_the_summary_is_written_over_the_old_one(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    write_summary(tmp_path, {"status": "running", "num_rounds": 1, "more": "x" * 500})
    monkeypatch.setattr("server_app.summary.write_atomically", full)
    write_summary(tmp_path, {"status": "failed: no space", "num_rounds": 1})
    assert read_summary(tmp_path)["status"] == "failed: no space"
    with pytest.raises(OSError, match="No space left"):
        write_summary(tmp_path, {"status": "x" * 5000, "num_rounds": 1})  # takes another block
    assert read_summary(tmp_path)["status"] == "failed: no space"


@pytest.mark.end_to_end
def test_readers_of_run_directories_need_neither_torch_nor_numpy():
    code = "import keel.runs, sys; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# --- a history that grows ------------------------------------------------------------------------


def client_line(number: int, names: list[str]) -> dict[str, object]:
    scores = {"mean": 0.5, "worst_decile": 0.2, "clients": dict.fromkeys(names, 0.5)}
    line = line_of(number) | {"participants": names, "losses": {"supervised": 1.0}}
    return line | {"personal": scores, "local_global": scores}


def test_a_reader_holds_the_names_of_the_newest_lines_and_the_numbers_of_all(tmp_path, monkeypatch):
    """Of 10,000 rounds that each left out 100 clients it held 180 MB."""
    monkeypatch.setattr(history, "MAX_ALL_NAMED", 7)
    path = tmp_path / "history.jsonl"
    for number in range(1, 6):
        trouble = {"left_out": {"a": "no reply", "b": "no reply"}, "late": [f"c {number}"]}
        append_history(path, client_line(number, []) | trouble)
    reader = HistoryReader(path)
    reader.update()
    held = [(list(line["left_out"]), line["late"]) for line in reader.lines]
    assert held == [([], [])] * 3 + [(["a", "b"], [f"c {n}"]) for n in (4, 5)]
    assert [(line["num_left_out"], line["num_late"]) for line in reader.lines] == [(2, 1)] * 5
    assert [*reader.full(0)["left_out"]] == ["a", "b"]
    write_atomically(path, path.read_bytes().partition(b"\n")[2])  # another file
    reader.update()
    assert [len(line["left_out"]) for line in reader.lines] == [0, 0, 2, 2]


def test_a_reader_sees_each_line_once_when_it_is_whole(tmp_path):
    path = tmp_path / "history.jsonl"
    reader = HistoryReader(path)
    assert not reader.update()
    append_history(path, client_line(1, ["a", "b"]))
    assert reader.update()
    assert not reader.update()
    with path.open("a") as file:
        file.write('{"round": 2, ')
    assert not reader.update()
    append_history(path, client_line(3, ["c"]))  # ends the incomplete line first
    assert reader.update()
    assert [line["round"] for line in reader.lines] == [1, 3]
    assert len(reader.faults) == 1
    assert "line 2 is damaged" in reader.faults[0]
    assert reader.full(1) == {**client_line(3, ["c"])}


def test_a_long_history_is_read_without_garbage_collections_and_with_shared_keys(tmp_path):
    """Of 100,000 rounds, half of the seconds, and 120 of 390 MB."""
    path, found = tmp_path / "history.jsonl", []
    path.write_text("".join(f"{json.dumps(line_of(number))}\n" for number in range(1, 3001)))
    reader = HistoryReader(path)
    gc.callbacks.append(lambda phase, about: found.append(phase))
    try:
        reader.update()
    finally:
        gc.callbacks.pop()
    assert found.count("start") <= 1  # instead of 26: one may follow the reading
    assert gc.isenabled()
    assert [line["round"] for line in reader.lines] == list(range(1, 3001))
    one, other = reader.lines[0], reader.lines[-1]
    assert all(a is b for a, b in zip(one, other, strict=True))


def test_a_reader_begins_again_when_a_resume_replaces_the_file(tmp_path):
    path = tmp_path / "history.jsonl"
    for number in (1, 2, 3):
        append_history(path, client_line(number, ["a"]))
    reader = HistoryReader(path)
    reader.update()
    version = reader.version
    truncate_history(path, 1)
    append_history(path, client_line(2, ["b"]))
    append_history(path, client_line(3, ["b"]))  # as long as before
    assert reader.update()
    assert reader.version != version
    assert [reader.full(i)["participants"] for i in range(3)] == [["a"], ["b"], ["b"]]
    path.unlink()
    assert reader.update()
    assert reader.lines == []


def test_a_reader_begins_again_where_a_resumed_run_wrote_other_lines_into_the_same_inode(tmp_path):
    path = tmp_path / "history.jsonl"
    for number in (1, 2, 3):
        append_history(path, client_line(number, ["a"]))
    reader = HistoryReader(path)
    reader.update()
    lines = [client_line(1, ["a"]), *(client_line(number, ["bb"]) for number in (2, 3, 4))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))  # the inode stays
    assert reader.update()
    assert [reader.full(i)["participants"] for i in range(4)] == [["a"], ["bb"], ["bb"], ["bb"]]
    assert reader.faults == []


@pytest.mark.parametrize(
    "names",
    [
        *([], ["a"], ["client-0000", "client-0001"]),
        *(["x]", "y"], ["x}", "y"], ['a", "b', "c"], ["\\", '"'], ['"clients": {', "]}"]),
    ],
)
def test_condensed_lines_have_counts_and_no_clients_whatever_the_names(names):
    line = condensed(json.dumps(client_line(7, names)).encode())
    assert (line["round"], line["num_participants"]) == (7, len(set(names)))
    assert line["personal"] == line["local_global"] == {"mean": 0.5, "worst_decile": 0.2}
    assert "participants" not in line


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": [1, -0.5, 1e999, NaN, null, true]}',
        b'{"a": 1, "a": 2}',
        rb'{"\ud800": "\u00e9"}',
        b"1" + 30 * b"0",
        400 * b"[" + 400 * b"]",
    ],
)
def test_long_json_is_read_as_the_standard_library_reads_it(text, monkeypatch):
    monkeypatch.setattr(history, "LONG_BYTES", 0)
    assert repr(load_json(text)) == repr(json.loads(text))


def test_damaged_long_json_is_a_value_error(monkeypatch):
    monkeypatch.setattr(history, "LONG_BYTES", 0)
    with pytest.raises(ValueError, match="column 7"):
        load_json(b'{"a": }')


def test_a_line_names_the_first_clients_and_counts_all():
    reasons = {f"c{i}": "late" for i in range(150)}
    line = condensed(json.dumps(client_line(1, []) | {"left_out": reasons}).encode())
    assert (len(line["left_out"]), line["num_left_out"]) == (100, 150)


def test_the_newest_state_is_kept_beyond_round_99999(tmp_path):
    """As text, round-99999 comes after round-100000."""
    folder = tmp_path / "clients" / "client-0000"
    folder.mkdir(parents=True)
    for number in (99_998, 99_999, 100_000, 100_001):
        (folder / f"round-{number}-0123456789abcdef.safetensors").touch()
    remove_state(tmp_path, 100_000, keeps_personal=True)
    assert [path.name[:12] for path in folder.iterdir()] == ["round-100000"]
