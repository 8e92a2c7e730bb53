"""The audit log: what it records, that edits are found, and the releases counted from it."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import audit_of, resume, summary_of

from protocol.files import Chain, read_chain
from server_app.manifest import AuditLog, check_audit
from server_app.pool import InlineWorkers
from server_app.run_reader import AUDIT_FILE, RunReader


def chain_in(folder: Path) -> Path:
    """A chain of five lines."""
    chain = Chain(folder / "chain.jsonl")
    for number in range(5):
        chain.append({"n": number, "clients": ["a", "ü\n"]})
    return chain.path


@given(st.data())
def test_of_a_chain_with_any_edit_only_the_lines_before_it_can_be_read(tmp_path_factory, data):
    """Lines removed, moved or repeated, and bytes changed, inserted or cut."""
    path = chain_in(tmp_path_factory.mktemp("chain"))
    before, lines = list(read_chain(path)), path.read_bytes().splitlines(keepends=True)
    if data.draw(st.booleans()):
        content = b"".join(data.draw(st.lists(st.sampled_from(lines), max_size=7)))
    else:
        content, at = b"".join(lines), data.draw(st.integers(0, path.stat().st_size))
        rest = content[at + data.draw(st.integers(0, 30)) :]
        content = content[:at] + data.draw(st.binary(max_size=30)) + rest
    path.write_bytes(content)
    found, is_read = [], False
    with contextlib.suppress(ValueError):
        found.extend(read_chain(path))
        is_read = True
    assert found == before[: len(found)]
    with contextlib.nullcontext() if is_read else pytest.raises(ValueError, match=path.name):
        Chain(path)


def test_a_line_that_a_kill_left_incomplete_is_dropped_and_a_whole_one_is_not(
    tmp_path, monkeypatch
):
    path = chain_in(tmp_path)
    with path.open("a") as file:
        file.write('{"n": 5, "dig')
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
    sent = audit_of(folder, "sent")
    assert [(line["round"], line["kind"]) for line in sent] == [(n, "train") for n in (1, 2, 3)]
    assert all(line["bytes"] > 0 for line in sent)
    rejected = [(line["round"], list(line["clients"])) for line in audit_of(folder, "rejected")]
    assert rejected == [(2, ["client-0001"])]
    assert [line["status"] for line in audit_of(folder, "ended")] == ["finished"]
    assert check_audit(RunReader(folder)) == len(audit_of(folder))


def test_an_end_that_was_cut_off_is_found_and_not_resumed(run):
    folder = run({"num-rounds": 2, "local-epochs": 0})
    path = folder / AUDIT_FILE
    lines = path.read_text().splitlines(keepends=True)
    for num_cut in (1, 4, None):
        path.write_text("".join(lines[:-num_cut])) if num_cut else path.unlink()
        with pytest.raises(ValueError, match=AUDIT_FILE):
            check_audit(RunReader(folder))
        with pytest.raises(ValueError, match=AUDIT_FILE):
            resume(folder, num_rounds=3)


def test_a_release_is_counted_before_it_is_requested_and_again_when_a_resume_repeats_it(
    run, tmp_path, monkeypatch
):
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
    folder = run(keys | {"num-rounds": 2})
    assert seen == [1, 2]
    assert summary_of(folder)["privacy"]["releases"] == 2
    audit = AuditLog(folder)
    [client, *others] = sorted(audit.releases)
    assert audit.releases == dict.fromkeys([client, *others], 2)
    # a kill between the request and the round's line: its release was made
    audit.note("released", round=3, clients=[client], epsilon=0.5, delta=1e-5)
    resume(folder, num_rounds=3)
    assert AuditLog(folder).releases == {client: 4} | dict.fromkeys(others, 3)
    assert summary_of(folder)["privacy"]["releases"] == 4
