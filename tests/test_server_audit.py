"""The audit log: what it records, and that no line can be changed without being found."""

import json

import pytest
from run_fixtures import SMALL, audit_of, resume

import server_app.audit
from server_app.audit import AuditLog, audit_end, audit_problem
from server_app.history import append_history
from server_app.inline import run_inline
from server_app.manifest import audit_fault
from server_app.summary import read_manifest

HISTORY = {"losses": {}, "seconds": {}, "left_out": {}}


@pytest.fixture
def log(tmp_path):
    audit = AuditLog(tmp_path)
    for number in range(1, 6):
        audit.note("sent", round=number, kind="train", clients=["a", "ü\n"], bytes=10 * number)
    return tmp_path / "audit.jsonl"


def changed(log, change):
    lines = log.read_text().splitlines()
    change(lines)
    log.write_text("".join(line + "\n" for line in lines))
    return audit_problem(log.parent)


def test_a_chain_that_nobody_touched_is_whole_over_restarts(log):
    assert audit_problem(log.parent) == ""
    AuditLog(log.parent).note("ended", status="finished")
    assert audit_problem(log.parent, audit_end(log.parent)) == ""
    assert len(log.read_text().splitlines()) == 6


def test_several_lines_go_on_with_the_chain_and_take_one_sync(log, monkeypatch):
    syncs = []
    monkeypatch.setattr("os.fsync", syncs.append)
    audit = AuditLog(log.parent)
    audit.note_all("joined", [{"client": name, "node": 7} for name in "abc"])
    audit.note_all("joined", [])
    assert len(syncs) == 1
    audit.note("ended", status="finished")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("client") for line in lines[5:]] == ["a", "b", "c", None]
    assert audit_problem(log.parent, audit_end(log.parent)) == ""


@pytest.mark.parametrize("function", ["fsync", "append_line"])
def test_the_chain_goes_on_after_an_interrupt_while_a_line_is_written(log, monkeypatch, function):
    """Ctrl-C: "ended" had the digest before the line that was on disk, so an honest log failed."""
    audit = AuditLog(log.parent)
    with monkeypatch.context() as patch:
        if function == "fsync":
            patch.setattr("os.fsync", interrupt)
        else:  # with the line on disk
            real = server_app.audit.append_line
            patch.setattr("server_app.audit.append_line", lambda *to: interrupt(real(*to)))
        with pytest.raises(KeyboardInterrupt):
            audit.note("sent", round=6, kind="train", clients=["a"], bytes=60)
    audit.note("ended", status="stopped")
    assert audit_problem(log.parent, audit_end(log.parent)) == ""


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [0, 2, 4])
def test_an_edited_line_is_found(log, number):
    def edit(lines):
        lines[number] = lines[number].replace('"bytes": ', '"bytes": 9')

    assert changed(log, edit) == f"audit.jsonl: line {number + 1} was edited"


def test_a_name_that_is_written_twice_in_a_line_is_found(log):
    """The second would count, so the digest would not change."""

    def edit(lines):
        lines[1] = lines[1].replace("{", '{"event": "refused", ', 1)

    assert changed(log, edit) == "audit.jsonl: line 2 is damaged"


def test_an_edited_line_with_a_digest_of_its_own_is_found_by_the_next(log):
    end = audit_end(log.parent)

    def forge(lines):
        forged = AuditLog(log.parent.parent)
        forged.path = log.parent / "forged"
        forged.previous = json.loads(lines[2])["previous"]
        forged.note("sent", round=3, kind="train", clients=[], bytes=0)
        lines[2] = forged.path.read_text().strip()

    assert "before line 4 was removed, added or moved" in changed(log, forge)
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    assert audit_problem(log.parent) == ""  # a chain has no end of its own
    assert "3 lines, expected 5: its end was changed" in audit_problem(log.parent, end)


def test_a_line_that_was_added_after_the_end_is_found_unless_the_run_was_resumed(log):
    end = audit_end(log.parent)
    AuditLog(log.parent).note("joined", client="b", node=7)  # fits the chain
    assert audit_problem(log.parent, end) == "audit.jsonl: 6 lines, expected 5: its end was changed"
    assert audit_problem(log.parent, end, is_resumed=True) == ""


def test_an_end_that_was_cut_off_during_the_run_is_found_by_the_history(log):
    append_history(log.parent / "history.jsonl", {"round": 4, **HISTORY})
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:4]))
    assert audit_problem(log.parent) == ""
    log.write_text("".join(lines[:3]))
    cut = "round 4 of the history is not in it: its end was cut off"
    assert audit_problem(log.parent) == f"audit.jsonl: {cut}"


def test_a_resume_says_that_the_audit_log_was_cut_off(run):
    folder = run(SMALL | {"method": "fedavg", "num-rounds": 2, "keep-state": True})
    log = folder / "audit.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    resume(folder, **{"num-rounds": 3})
    assert "audit.jsonl: round 1 of the history is not in it" in (folder / "run.log").read_text()


def test_a_run_with_a_damaged_line_ends_when_it_is_resumed(run):
    """A byte that is no UTF-8 ended it with an error that named no file, after its last round."""
    folder = run(SMALL | {"method": "fedavg", "num-rounds": 1, "keep-state": True})
    log = folder / "audit.jsonl"
    log.write_bytes(b"\xff" + log.read_bytes()[1:])
    resume(folder, **{"num-rounds": 2})
    assert read_manifest(folder)["audit"] == audit_end(folder)
    assert audit_problem(folder) == "audit.jsonl: line 1 is damaged"


@pytest.mark.parametrize("left", [-1, 0])
def test_an_end_that_was_cut_off_before_a_resume_is_not_forgotten(run, left):
    """Cut behind the last round's `sent`, the history knows nothing of it; or the log was deleted.

    What is cut off may say who was refused, and how often a client was asked for a release.
    """
    folder = run(SMALL | {"method": "fedavg", "num-rounds": 1, "keep-state": True})
    log = folder / "audit.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    if left:
        log.write_text("".join(lines[:left]))
        found = f"audit.jsonl: {len(lines) - 1} lines, expected {len(lines)}: its end was changed"
    else:
        log.unlink()
        found = "audit.jsonl is missing"
    resume(folder, **{"num-rounds": 2})
    assert found in (folder / "run.log").read_text()
    resume(folder, **{"num-rounds": 3})
    assert audit_problem(folder, read_manifest(folder)["audit"]) == found


def test_a_log_that_was_deleted_while_the_run_was_killed_is_missed(run):
    folder = run(SMALL | {"method": "fedavg", "num-rounds": 1, "keep-state": True})
    manifest = read_manifest(folder)
    del manifest["audit"]  # written at the end
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "audit.jsonl").unlink()
    assert audit_fault(folder) == "audit.jsonl is missing"


def test_a_run_of_0_1_that_is_resumed_twice_is_not_accused(run):
    """It had no audit log: "round 1 of the history is not in it" stayed there for good."""
    folder = run(SMALL | {"method": "fedavg", "num-rounds": 1, "keep-state": True})
    (folder / "audit.jsonl").unlink()
    (folder / "manifest.json").unlink()
    for num_rounds in (2, 3):
        resume(folder, **{"num-rounds": num_rounds})
    assert "audit.jsonl" not in (folder / "run.log").read_text()
    assert audit_problem(folder, read_manifest(folder)["audit"]) == ""
    log = folder / "audit.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: [json.loads(line)["event"] for line in lines].index("sent")]))
    assert "round 2 of the history is not in it" in audit_problem(folder)


def test_a_log_that_went_on_since_the_last_end_is_whole(run):
    """As after a resume that was killed."""
    folder = run(SMALL | {"method": "fedavg", "num-rounds": 1, "keep-state": True})
    AuditLog(folder).note("started", round=2)
    resume(folder, **{"num-rounds": 2})
    assert audit_problem(folder, read_manifest(folder)["audit"]) == ""
    assert "audit.jsonl" not in (folder / "run.log").read_text()


@pytest.mark.parametrize("number", [0, 2])
def test_a_removed_a_repeated_and_a_moved_line_are_found(log, number):
    whole = log.read_text()
    for change in (
        lambda lines: lines.pop(number),
        lambda lines: lines.insert(number, lines[number]),
        lambda lines: lines.append(lines.pop(number)),
    ):
        log.write_text(whole)
        assert "was removed, added or moved" in changed(log, change)
    log.write_text(whole + "{}\n")
    assert audit_problem(log.parent) == "audit.jsonl: line 6 is damaged"
    log.unlink()
    assert audit_problem(log.parent) == "audit.jsonl is missing"


def test_a_line_that_a_kill_left_incomplete_is_dropped(log):
    log.write_bytes(log.read_bytes() + b'{"time": "20')
    AuditLog(log.parent).note("joined", client="a", node=1)
    assert audit_problem(log.parent) == ""
    assert len(log.read_text().splitlines()) == 6


@pytest.mark.end_to_end  # a whole run
def test_a_run_says_who_joined_was_sent_and_released_what(tmp_path, no_pictures):
    keys = {"output-dir": str(tmp_path), "num-rounds": 2, "privacy.epsilon": 0.5}
    keys |= {"privacy.delta": 1e-5, "privacy.clip-norm": 1e-3, "local-test-fraction": 0.2}
    keys |= {"privacy.metrics": "exact"}  # so that there is something to evaluate
    run = run_inline(SMALL | keys | {"method": "fedavg", "evaluate-clients": "all"}, 3)
    lines = audit_of(run)
    events = [line["event"] for line in lines]
    a_round = ["sent", "released", "sent"]
    assert events == ["started", *(3 * ["joined"]), *a_round, *a_round, "ended"]
    names = [f"client-{n:04d}" for n in range(3)]
    assert [line["client"] for line in lines[1:4]] == names
    sent, released, evaluated = lines[4:7]
    history = json.loads((run / "history.jsonl").read_text().splitlines()[0])
    assert (sent["round"], sent["kind"], sent["clients"]) == (1, "train", names)
    assert sent["bytes"] == history["bytes_down"] > 10_000
    assert (released["clients"], released["epsilon"], released["delta"]) == (names, 0.5, 1e-5)
    assert (evaluated["kind"], evaluated["bytes"]) == ("evaluate", history["evaluation_bytes_down"])
    assert lines[-1]["status"] == "finished"
    assert audit_problem(run, read_manifest(run)["audit"]) == ""
