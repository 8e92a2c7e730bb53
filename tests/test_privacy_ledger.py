"""What the server counts as released: never too little, whatever happens to its file."""

import json
import shutil
from types import SimpleNamespace

import pytest
from client_fixtures import make_config
from flwr.app import Message, RecordDict
from run_fixtures import without_pictures

from protocol import chained
from protocol.chained import append_chained, parsed, read_chained
from server_app.audit import AuditLog
from server_app.inline import run_inline
from server_app.rounds import Sent
from server_app.run_directory import RunDirectory, read_arrays


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three rounds of two clients that privatise what they send; not to be changed."""
    output = str(tmp_path_factory.mktemp("private"))
    config = make_config(
        privacy__epsilon=0.5, num_rounds=3, batch_size=64, keep_state=True, output_dir=output
    )
    with without_pictures():
        return run_inline({k: v for k, v in config.flat.items() if k != "resume"}, 2)


@pytest.fixture
def directory(finished, tmp_path, no_pictures):
    """A copy of the finished run, to spoil and to resume."""
    return shutil.copytree(finished, tmp_path / finished.name)


def resumed(directory, num_rounds):
    run_inline({"resume": str(directory), "num-rounds": num_rounds}, 2)
    return json.loads((directory / "summary.json").read_text())["privacy"]


def spoil(path, how):
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "delete":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(b"".join(lines[:1]))
    elif how == "cut within a line":
        path.write_bytes(b"".join(lines)[:-9])
    elif how == "edit":
        path.write_bytes(b"".join(lines).replace(b'"round": 2', b'"round": 7'))
    elif how == "fewer clients":
        path.write_bytes(b"".join(lines).replace(b'"client-0000", ', b""))
    elif how == "empty":
        path.write_bytes(b"")


HOW = ("nothing", "delete", "cut short", "cut within a line", "edit", "fewer clients", "empty")


@pytest.mark.end_to_end  # whole runs, as below
@pytest.mark.parametrize("how", HOW)
def test_the_releases_of_a_resumed_run_are_never_under_counted(how, directory):
    spoil(directory / "releases.jsonl", how)
    spent = resumed(directory, 5)
    assert 5 <= spent["releases"] <= (5 if how == "nothing" else 9)
    again = resumed(directory, 6)  # the file is complete again: nothing is counted twice
    if how == "fewer clients":  # damaged lines count for whoever turns up later too
        assert again["releases"] > spent["releases"]
    else:
        assert again["releases"] == spent["releases"] + 1


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("found", "damaged"),
    [(b'"round": 2', b'"round": "'), (b'["client-0000"', b"[[]"), (b'["client-0000"', b"[1")],
)
def test_a_damaged_history_does_not_stop_the_resume_of_a_private_run(directory, found, damaged):
    history = directory / "history.jsonl"
    content = history.read_bytes()
    assert found in content
    history.write_bytes(content.replace(found, damaged, 1))
    assert resumed(directory, 5)["releases"] == 5


@pytest.mark.end_to_end
@pytest.mark.parametrize("what", ["checkpoint", "audit log", "history"])
@pytest.mark.parametrize("how", ["delete", "empty"])
def test_without_the_file_and_the_history_checkpoint_or_audit_log_counts(how, what, directory):
    """The audit log alone has the rounds that a resume repeats before its next checkpoint."""
    spoil(directory / "releases.jsonl", how)
    state = RunDirectory(directory)
    try:
        checkpoint = max((directory / "checkpoints").glob("*.safetensors"))
        arrays, _ = read_arrays(checkpoint)
        if what != "history":
            (directory / "history.jsonl").write_text("")
        if what != "audit log":
            (directory / "audit.jsonl").unlink()
        if what == "checkpoint":
            state.restore_releases({"releases": arrays["state/releases"]})
        else:
            state.restore_releases({})
        assert state.release_counts() == {"client-0000": 4, "client-0001": 4}
        assert sum(len(names) for names in state.read_releases()) == 8  # appended to the file
    finally:
        state.close()


def test_a_client_that_was_left_out_of_a_round_has_released_in_it_too(tmp_path):
    """Its update may have arrived and been rejected, or arrived too late."""
    about = {"losses": {}, "seconds": {}, "participants": ["a"]}
    for number in (1, 2):
        left_out = {"b": "no answer in time"} if number == 2 else {}
        append_round(tmp_path, {"round": number, **about, "left_out": left_out})
    directory = RunDirectory(tmp_path)
    directory.restore_releases({})
    assert directory.release_counts() == {"a": 3, "b": 2}  # a round may have been under way
    directory.close()


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_training_and_what_is_sent_again_in_it_are_releases_and_evaluations_are_not(tmp_path, kind):
    directory, roster = RunDirectory(tmp_path), {2: SimpleNamespace(client="a")}
    config = make_config(method="fedreco", privacy__epsilon=0.5)
    run = SimpleNamespace(
        config=config, directory=directory, roster=roster, audit=AuditLog(tmp_path)
    )
    sent = Sent(run, 1, kind, [Message(RecordDict(), dst_node_id=2, message_type=kind)])
    sent.note(2)
    assert directory.release_counts() == ({"a": 2} if kind == "train" else {})
    directory.close()


def test_if_one_client_s_releases_are_missing_every_client_gets_one_more(tmp_path):
    directory, audit = RunDirectory(tmp_path), AuditLog(tmp_path)
    for number in (1, 2):
        directory.append_releases(number, ["a"])
        audit.note("released", round=number, clients=["a", "b"])
    directory.restore_releases({})
    assert directory.release_counts() == {"a": 3, "b": 3}
    directory.close()


def test_a_damaged_line_of_a_completed_file_is_one_release(tmp_path):
    directory = RunDirectory(tmp_path)
    audit = AuditLog(tmp_path)
    for number in range(20):
        audit.note("released", round=number, clients=["a", "b"] if number < 15 else ["a"])
    directory.restore_releases({})
    assert directory.release_counts() == {"a": 21, "b": 16}
    directory.close()
    path = tmp_path / "releases.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round": 0', b'"round": 1', 1))
    directory = RunDirectory(tmp_path)
    assert directory.release_counts() == {"a": 21, "b": 16}
    directory.close()


@pytest.mark.end_to_end
def test_a_file_deleted_while_the_run_goes_on_changes_nothing(tmp_path):
    directory = RunDirectory(tmp_path)
    for number in (1, 2, 3):
        directory.append_releases(number, ["a", "b"])
    (tmp_path / "releases.jsonl").unlink()
    directory.append_releases(4, ["a"])
    assert directory.release_counts() == {"a": 4, "b": 3}
    directory.close()


def test_a_round_of_a_long_private_run_reads_only_the_end_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(chained, "TAIL_BYTES", 200)
    sizes, directory = [], RunDirectory(tmp_path)
    monkeypatch.setattr(chained, "parsed", lambda text: sizes.append(len(text)) or parsed(text))
    for number in range(50):
        directory.append_releases(number, ["a", "b"])
        releases = json.loads(bytes(directory.release_state()["releases"].tolist()))
        assert releases == {"a": number + 1, "b": number + 1}
    assert len(sizes) < 2 * 50
    assert directory.release_counts() == {"a": 50, "b": 50}
    directory.close()


@pytest.mark.parametrize("num_bytes", [1, 60, 1000, 1 << 20])
def test_the_newest_digest_is_found_behind_lines_that_have_none(tmp_path, monkeypatch, num_bytes):
    monkeypatch.setattr(chained, "TAIL_BYTES", num_bytes)
    path = tmp_path / "chain.jsonl"
    assert chained.newest_digest(path) == ""
    path.write_text("{}\n")
    assert chained.newest_digest(path) == ""
    append_chained(path, {"n": 0, "clients": ["a" * 300]})
    digest = json.loads(path.read_text().splitlines()[1])["digest"]
    assert chained.newest_digest(path) == digest
    with path.open("a") as file:
        file.write("damaged\n" * 50 + '{"n": 1, "dig')
    assert chained.newest_digest(path) == digest


def test_lines_of_0_1_without_digests_count(tmp_path):
    path = tmp_path / "releases.jsonl"
    path.write_text('{"round": 1, "clients": ["a"]}\n{"round": 2, "clients": ["a", "b"]}\n')
    directory = RunDirectory(tmp_path)
    directory.append_releases(3, ["b"])
    assert directory.read_releases() == [["a"], ["a", "b"], ["b"]]
    directory.close()


def test_a_line_without_clients_counts_for_every_client(tmp_path):
    (tmp_path / "releases.jsonl").write_text('{"round": 1, "clients": ["a", "b"]}\n{"round": 2}\n')
    directory = RunDirectory(tmp_path)
    assert directory.release_counts() == {"a": 2, "b": 2}
    directory.close()


def test_every_line_has_a_digest_of_itself_and_of_the_line_before(tmp_path):
    path = tmp_path / "chain.jsonl"
    for number in range(4):
        append_chained(path, {"n": number})
    assert read_chained(path) == ([{"n": n} for n in range(4)], 0)
    lines = path.read_text().splitlines()
    for order, intact in (
        ([0, 1, 3], [0, 1]),  # one is missing: the next does not follow
        ([1, 2, 3], [2, 3]),
        ([0, 2, 1, 3], [0]),
    ):
        path.write_text("\n".join(lines[n] for n in order) + "\n")
        entries, num_damaged = read_chained(path)
        assert [entry["n"] for entry in entries] == intact
        assert num_damaged == len(order) - len(intact)


def test_a_line_after_half_a_line_is_intact(tmp_path):
    path = tmp_path / "chain.jsonl"
    append_chained(path, {"n": 0})
    with path.open("a") as file:
        file.write('{"n": 1, "dig')
    append_chained(path, {"n": 2})
    assert read_chained(path) == ([{"n": 0}, {"n": 2}], 1)
