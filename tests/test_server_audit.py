"""The audit log: what it records, that edits are found, and the releases counted from it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from run_fixtures import audit_of, resume, summary_of

from protocol.files import Chain, read_chain
from server_app.manifest import AuditLog, check_audit
from server_app.pool import InlineWorkers
from server_app.run_reader import AUDIT_FILE, RunReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A chain of five lines."""
    chain = Chain(tmp_path / "chain.jsonl")
    for number in range(5):
        chain.append({"n": number, "clients": ["a", "ü\n"]})
    return chain.path


EDITS: dict[str, Callable[[list[str]], object]] = {
    "edited": lambda lines: lines.__setitem__(2, lines[2].replace("a", "b", 1)),
    "a name twice": lambda lines: lines.__setitem__(2, '{"n": 9, ' + lines[2][1:]),
    "removed": lambda lines: lines.pop(2),
    "first removed": lambda lines: lines.pop(0),
    "moved": lambda lines: lines.insert(1, lines.pop(3)),
    "repeated": lambda lines: lines.insert(2, lines[2]),
    "no JSON": lambda lines: lines.__setitem__(2, "x"),
    "no digest": lambda lines: lines.insert(2, '{"n": 9}'),
}


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_of_a_chain_is_found(path, edit):
    lines = path.read_text().splitlines()
    EDITS[edit](lines)
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(ValueError, match=str(path)):
        list(read_chain(path))
    with pytest.raises(ValueError, match=str(path)):
        Chain(path)


def test_a_line_that_a_kill_left_incomplete_is_dropped(path):
    with path.open("a") as file:
        file.write('{"n": 5, "dig')
    Chain(path).append({"n": 6})
    assert [entry["n"] for entry in read_chain(path)] == [0, 1, 2, 3, 4, 6]


def test_an_interrupt_while_lines_are_written_does_not_break_the_chain(path, monkeypatch):
    chain = Chain(path)

    def interrupt(file: int) -> None:  # with the line on disk
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chain.append({"n": 5})
    chain.append({"n": 6})
    assert [entry["n"] for entry in read_chain(path)] == list(range(7))


# --- of a run --------------------------------------------------------------------------------


def test_a_run_records_who_joined_what_was_sent_and_who_was_left_out(run, failing):
    folder = run({"num-rounds": 3, "local-epochs": 0})
    assert [line["simulated"] for line in audit_of(folder, "joined")] == [4]
    assert [(line["round"], line["kind"]) for line in audit_of(folder, "sent")] == [
        (1, "train"),
        (2, "train"),
        (3, "train"),
    ]
    assert all(line["bytes"] > 0 for line in audit_of(folder, "sent"))
    rejected = [(line["round"], list(line["clients"])) for line in audit_of(folder, "rejected")]
    assert rejected == [(2, ["client-0001"])]
    assert [line["status"] for line in audit_of(folder, "ended")] == ["finished"]
    assert check_audit(RunReader(folder)) == len(audit_of(folder))


@pytest.mark.parametrize("num_cut", [1, 4, None])
def test_an_end_that_was_cut_off_is_found_and_not_resumed(run, num_cut):
    folder = run({"num-rounds": 2, "local-epochs": 0})
    path = folder / AUDIT_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-num_cut])) if num_cut else path.unlink()
    with pytest.raises(ValueError, match=AUDIT_FILE):
        check_audit(RunReader(folder))
    with pytest.raises(ValueError, match=AUDIT_FILE):
        resume(folder, num_rounds=3)


# --- releases --------------------------------------------------------------------------------


def test_releases_are_counted_over_restarts(tmp_path):
    audit = AuditLog(tmp_path)
    audit.note("released", round=1, clients=["a", "b"], epsilon=1.0, delta=1e-5)
    audit.note("sent", round=1, clients=["a", "b"])
    audit.note("released", round=2, clients=["a"], epsilon=1.0, delta=1e-5)
    assert audit.releases == AuditLog(tmp_path).releases == {"a": 2, "b": 1}


def test_a_round_that_a_resume_repeats_is_another_release(run, tmp_path):
    """A kill between the request and the round's line: its release was made."""
    keys = {"method": "fedreco", "privacy.epsilon": 0.5, "local-test-fraction": 0.2}
    folder = run(keys | {"num-rounds": 2})
    assert summary_of(folder)["privacy"]["releases"] == 2
    assert [line["round"] for line in audit_of(folder, "released")] == [1, 2]
    audit = AuditLog(folder)
    clients = sorted(audit.releases)
    audit.note("released", round=3, clients=clients, epsilon=0.5, delta=1e-5)
    resume(folder, num_rounds=3)
    assert summary_of(folder)["privacy"]["releases"] == 4


def test_a_release_is_on_the_disk_before_it_is_requested(run, tmp_path, monkeypatch):
    seen: list[int] = []
    answers = InlineWorkers.answers

    def look(workers, contents, kind, seconds):
        if kind == "train":
            (path,) = tmp_path.glob(f"*/{AUDIT_FILE}")
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            seen.append(sum(line["event"] == "released" for line in lines))
        return answers(workers, contents, kind, seconds)

    monkeypatch.setattr(InlineWorkers, "answers", look)
    keys = {"method": "fedreco", "privacy.epsilon": 0.5, "local-test-fraction": 0.2}
    run(keys | {"num-rounds": 2})
    assert seen == [1, 2]
