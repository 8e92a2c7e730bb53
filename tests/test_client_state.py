"""What a client keeps: whole or not there, by round, and never replaced in silence."""

import errno
import logging
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from client_fixtures import assert_same_bits
from safetensors.torch import save

import client_app.state
from client_app.state import ResetNeeded, StateFolder, max_rounds_ahead
from protocol.files import digest, write_atomically


def groups(seed):
    """Two groups, with a 0-d integer (as batch norms have) and an array in channels-last memory."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    return {
        "previous": {"stages.conv1.weight": weight, "count": torch.tensor(seed)},
        "model": {"stages.conv1.weight": torch.randn(5, generator=generator)},
    }


def assert_is(loaded, seed):
    expected = groups(seed)
    assert loaded.keys() == expected.keys()
    for name, arrays in expected.items():
        assert_same_bits(loaded[name], arrays)
        assert all(loaded[name][n].dtype == a.dtype for n, a in arrays.items())


@pytest.fixture
def state(tmp_path):
    return StateFolder(tmp_path / "clients" / "client-0007")


def files(state):
    return sorted(path.name for path in state.folder.iterdir())


def rounds(state):
    return [int(name.split("-")[1]) for name in files(state)]


def rounds_of(state, kind="safetensors"):
    return sorted(int(path.name.split("-")[1]) for path in state.folder.glob(f"round-*.{kind}"))


def test_a_version_that_was_damaged_before_its_digest_was_taken_is_set_aside_too(state):
    state.save(1, groups(1))
    content = b"no tensors"
    (state.folder / f"round-00002-{digest(content)}.safetensors").write_bytes(content)
    assert_is(state.load(3), 1)
    assert len(list(state.folder.glob("*.damaged"))) == 1


def test_nothing_was_kept_yet(state):
    assert state.load(before_round=1) == {}
    assert not state.folder.exists()


def test_what_is_saved_is_what_is_loaded(state):
    state.save(3, groups(3))
    assert_is(state.load(before_round=4), 3)


def test_a_round_reads_the_newest_version_before_it(state):
    state.save(2, groups(2))
    assert state.load(before_round=2) == {}
    assert state.load(before_round=1) == {}
    for n in (6, 7, 99_999, 100_000):
        state.save(n, groups(n))
        for before, expected in ((6, 2), (7, 6), (99_999, 7), (100_000, 99_999)):
            if n - 1 <= before <= n:  # no older one is asked for
                assert_is(state.load(before), expected)
        assert_is(state.load(n + 1), n)


def test_a_round_trained_again_replaces_itself_and_all_that_came_after(state):
    for n in (2, 5, 6):
        state.save(n, groups(n))
    state.save(5, groups(50))  # the server went back to round 4
    assert rounds(state) == [2, 5]
    assert_is(state.load(before_round=9), 50)


def test_the_same_round_with_the_same_result_is_one_file(state):
    state.save(5, groups(5))
    before = files(state)
    state.save(5, groups(5))
    assert files(state) == before


@pytest.mark.parametrize("interval", [1, 2, 10])
@pytest.mark.parametrize("took_part", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("last", [25, 100])
def test_all_that_a_resume_asks_for_stays_and_nothing_else(tmp_path, interval, took_part, last):
    """A server that resumes from checkpoint c asks for the newest version before round c + 1.

    last: where the run first ended, with a checkpoint, before more rounds were added.
    """
    state = StateFolder(tmp_path, max_rounds_ahead(interval))
    chance = torch.Generator().manual_seed(interval)
    checkpoints, saved = [], []
    for n in range(1, 60):
        before_n = checkpoints  # a server killed in round n may not have written that of n - 1
        if (n - 1) % interval == 0 or n - 1 == last:
            checkpoints = [c for c in checkpoints if c >= n - 1 - interval] + [n - 1] * (n > 1)
        if torch.rand((), generator=chance) < took_part:
            state.save(n, groups(n))
            saved.append(n)
            state.prune(before_n)  # as the server lists them, if it has not written that of n - 1
            assert len(files(state)) <= 5
        for before in [n, *(c + 1 for c in {*before_n, *checkpoints})]:  # n: the round again
            expected = max((s for s in saved if s < before), default=None)
            if expected is None:
                assert state.load(before) == {}
            else:
                assert_is(state.load(before), expected)


def test_another_process_may_prune_the_same_client(tmp_path, monkeypatch):
    """A worker that is late with a client, or cut off, may still write while another trains it."""
    folder = StateFolder(tmp_path, max_ahead=10)
    for round_ in range(1, 6):
        folder.save(round_, groups(round_))
    listed = folder._versions()
    listed[0][1].unlink()
    monkeypatch.setattr(folder, "_versions", lambda *_: listed)
    folder.prune([0])
    folder.save(1, groups(6))  # replaces all of them
    monkeypatch.undo()
    assert [round_ for round_, _ in folder._versions()] == [1]


def flip_a_byte(content):
    middle = len(content) - 7  # of the arrays: the header would not parse at all
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE = pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        lambda content: content[:-5],
        lambda content: b"",
        lambda content: content + b"0",
    ],
    ids=["a bit flipped", "cut short", "empty", "too long"],
)


def damage_version(state, number, damage):
    (path,) = state.folder.glob(f"round-{number:05d}-*.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    return path


@DAMAGE
def test_a_damaged_version_is_set_aside_with_a_warning_and_the_older_one_used(
    state, damage, caplog
):
    state.save(2, groups(2))
    state.save(5, groups(5))
    path = damage_version(state, 5, damage)
    with caplog.at_level(logging.WARNING, logger="keel.client"):
        assert_is(state.load(before_round=6), 2)
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert not path.exists()
    assert path.with_suffix(".damaged").exists()
    caplog.clear()
    assert_is(state.load(before_round=6), 2)  # said once
    assert not caplog.records


@DAMAGE
def test_with_no_version_left_it_is_not_reset_silently(state, damage):
    state.save(5, groups(5))
    damage_version(state, 5, damage)
    for _ in range(2):  # nor the second time, when the file is aside already
        with pytest.raises(
            ValueError, match=r"round-00005.*\.damaged is damaged.*restore.*reset-state"
        ):
            state.load(before_round=6)
    (state.folder / "reset-state").touch()
    assert state.load(before_round=6) == {}


def test_a_version_older_than_the_last_accepted_round_is_warned_of(state, caplog):
    state.save(2, groups(2))
    assert_is(state.load(before_round=8, last_accepted_round=2), 2)
    assert not caplog.records
    assert_is(state.load(before_round=8, last_accepted_round=7), 2)
    assert "is older than round 7, in which this client's update was aggregated" in caplog.text


@pytest.mark.parametrize("marker", ["reset-state", "begin-anew"])  # the second: Keel 0.1
def test_lost_state_is_refused_and_reset_only_once(state, caplog, marker):
    with pytest.raises(
        ValueError, match=r"trained in round 4, and .* holds no state of it: restore"
    ):
        state.load(before_round=6, last_accepted_round=4)
    assert state.load(before_round=6, last_accepted_round=0) == {}
    (state.folder / marker).touch()
    assert state.load(before_round=6, last_accepted_round=4) == {}
    assert "starts again without" in caplog.text
    state.save(6, groups(6))
    assert_is(state.load(before_round=7, last_accepted_round=6), 6)
    assert state.load(before_round=6, last_accepted_round=4) == {}  # the same round, trained again
    (path,) = state.folder.glob("*.safetensors")  # the file is gone
    path.unlink()
    with pytest.raises(ValueError, match="holds no state"):
        state.load(before_round=8, last_accepted_round=6)


def test_damage_to_a_later_round_does_not_keep_an_earlier_one_from_being_trained(state):
    """A server that resumes before this client's first round asks for nothing that was lost."""
    state.save(5, groups(5))
    damage_version(state, 5, flip_a_byte)
    with pytest.raises(ValueError, match="is damaged"):
        state.load(before_round=6)
    assert state.load(before_round=5) == {}


def test_a_damaged_version_that_nobody_reads_does_no_harm(state, caplog):
    for n in (2, 5):
        state.save(n, groups(n))
    damage_version(state, 2, flip_a_byte)
    assert_is(state.load(before_round=6), 5)
    assert not caplog.records


def killed_while_saving(state, where, owner):
    """Fork, die by SIGKILL at the first call of `owner.where` during save(5); the exit status."""
    child = os.fork()
    if child == 0:
        setattr(owner, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            state.save(5, groups(5))
        finally:
            os._exit(0)  # only if it was not called
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_version_of_another_client_is_refused_by_name_and_destroys_nothing(state):
    other = StateFolder(state.folder.parent / "client-0008")
    state.save(1, groups(1))
    other.save(2, groups(2))
    (version,) = other.folder.glob("round-*")
    copied = shutil.copy(version, state.folder)
    for reader in (state, StateFolder(state.folder, reads_only=True)):
        with pytest.raises(ResetNeeded, match="is of client 'client-0008'") as refusal:
            reader.load(3)
        assert str(copied) in str(refusal.value)
        assert str(state.folder) not in refusal.value.nameless
    Path(copied).unlink()  # as the message asks
    assert_is(state.load(3), 1)


def test_a_version_from_before_clients_were_named_in_it_is_read(state):
    content = save({"previous/weight": torch.ones(2)})
    state.folder.mkdir(parents=True)
    (state.folder / f"round-00001-{digest(content)}.safetensors").write_bytes(content)
    assert_same_bits(state.load(2)["previous"], {"weight": torch.ones(2)})


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_version(state, where, caplog):
    state.save(4, groups(4))
    owner = os if where == "fsync" else type(state.folder)
    killed_while_saving(state, where, owner)
    assert len(files(state)) == 2  # the part is there, under a name that nobody reads
    assert_is(state.load(before_round=9), 4)
    state.save(5, groups(5))
    assert_is(state.load(before_round=9), 5)
    assert rounds(state) == [4, 5]  # and the part is gone
    assert not caplog.records


def test_a_kill_before_the_replaced_versions_are_gone_leaves_the_new_one(state):
    state.save(4, groups(4))
    state.save(6, groups(6))
    killed_while_saving(state, "unlink", type(state.folder))  # round 5, after a resume
    assert rounds(state) == [4, 5, 6]
    assert_is(state.load(before_round=6), 5)  # what round 6 reads when it is trained again


@pytest.mark.parametrize("before", ["", "first"])
def test_no_version_is_written_before_its_runs_id_is_on_the_disk(tmp_path, monkeypatch, before):
    """A power cut in between would let another run of the name use it, or refuse its own run."""
    if before:
        StateFolder(tmp_path / "site", run_id=before).save(1, groups(1))
    state, write, written = StateFolder(tmp_path / "site", run_id="second"), write_atomically, []

    def note(path, *pieces):
        written.append(path.name[:11])
        write(path, *pieces)

    monkeypatch.setattr(client_app.state, "write_atomically", note)
    state.save(1, groups(2))
    assert written == ["run-id", "round-00001"]


def test_a_full_disk_uses_up_no_reset(state, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for n in (48, 49, 50):
        state.save(n, groups(n))
    (state.folder / "reset-state").touch()
    assert state.load(before_round=1) == {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            state.save(1, groups(1))
    assert rounds_of(state) == [48, 49, 50]
    assert state.load(before_round=1) == {}  # the operator need not allow it again


def test_a_reset_that_0_1_recorded_still_counts(state):
    state.folder.mkdir(parents=True)
    (state.folder / "begun-anew-00006").touch()
    assert state.load(before_round=6, last_accepted_round=4) == {}
    with pytest.raises(ValueError, match="holds no state"):
        state.load(before_round=7, last_accepted_round=4)


def test_a_server_that_lost_its_place_is_refused_and_destroys_nothing(state, caplog):
    """An empty run directory, or one restored from an old backup."""
    for n in (48, 49, 50):
        state.save(n, groups(n))
    before = files(state)
    for asked in (1, 20, 47):
        with pytest.raises(
            ValueError,
            match=rf"the server is behind: it asks for round {asked}, this client has round 50: "
            "resume the run from a newer checkpoint, or create the file .*reset-state",
        ):
            state.load(before_round=asked, last_accepted_round=asked - 1)
    assert files(state) == before
    (state.folder / "reset-state").touch()
    assert state.load(before_round=1) == {}
    assert "the server is behind" in caplog.text
    state.save(1, groups(1))
    state.prune([0])
    assert files(state)[1:4] == [name.replace("safetensors", "set-aside") for name in before]
    assert_is(state.load(before_round=2, last_accepted_round=1), 1)
    assert state.load(before_round=1) == {}  # round 1 again, as after a kill of the server


@pytest.mark.parametrize("interval", [25, 50])
@pytest.mark.parametrize("asked", [1, 30])
def test_another_run_of_the_same_name_is_refused_and_destroys_nothing(
    tmp_path, interval, asked, caplog
):
    """As after the run directory was lost; with checkpoints so far apart, round 1 may be asked."""

    def of(run_id):
        return StateFolder(tmp_path / "a", max_rounds_ahead(interval), run_id=run_id)

    for n in (1, 2, 50):
        of("first").save(n, groups(n))
    (tmp_path / "a" / "state-was-reset-00040").touch()
    before = files(of("first"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has state of another run of this name, up to round "
                           r"50: .*restore .*run-name.*reset-state"):  # fmt: skip
            of("second").load(asked)
    assert files(of("second")) == before
    assert_is(of("first").load(51, last_accepted_round=50), 50)  # restored after all

    (tmp_path / "a" / "reset-state").touch()
    assert of("second").load(asked) == {}  # nothing of the first run
    assert "another run" in caplog.text
    of("second").save(asked, groups(7))
    assert rounds_of(of("second"), "set-aside") == [1, 2, 50]
    assert rounds_of(of("second")) == [asked]
    assert_is(of("second").load(asked + 1, last_accepted_round=asked), 7)
    assert of("second").load(asked) == {}  # the round again, as after a kill of the server
    (path,) = (tmp_path / "a").glob("*.safetensors")
    path.unlink()
    with pytest.raises(ValueError, match="holds no state"):  # the first run's reset does not count
        of("second").load(asked + 1, last_accepted_round=asked)


def test_state_under_the_old_name_of_a_renamed_run_is_named(tmp_path):
    """The refusal advised a backup or a reset, which gives up state that is there."""
    StateFolder(tmp_path / "another" / "a", run_id="other").save(2, groups(1))
    StateFolder(tmp_path / "old" / "b", run_id="run").save(2, groups(1))
    renamed = StateFolder(tmp_path / "new" / "a", run_id="run")
    with pytest.raises(ResetNeeded, match="holds no state of it: restore it from a backup"):
        renamed.load(3, last_accepted_round=2)
    StateFolder(tmp_path / "old" / "a", run_id="run").save(2, groups(2))
    remedy = "rename the run directory on the server to 'old', of which this client has state"
    with pytest.raises(ResetNeeded, match=f"holds no state of it: {remedy}, or create") as found:
        renamed.load(3, last_accepted_round=2)
    assert str(tmp_path) not in found.value.nameless
    assert_is(StateFolder(tmp_path / "old" / "a", run_id="run").load(3, 2), 2)


@pytest.mark.parametrize("asked", [1, 51])
def test_a_server_that_names_no_run_has_no_state_of_one(tmp_path, asked):
    """Every server of today's Keel names its run: this one is hostile, and guessed the name."""
    first = StateFolder(tmp_path / "a", max_rounds_ahead(10**6), run_id="first")
    first.save(50, groups(50))
    before = files(first)
    with pytest.raises(ValueError, match="has state of another run of this name"):
        StateFolder(tmp_path / "a", max_rounds_ahead(10**6)).load(asked)
    assert files(first) == before
    only_read = StateFolder(tmp_path / "a", reads_only=True)
    assert_is(only_read.load(51), 50)


def test_a_reset_for_a_server_that_names_no_run_is_not_needed_again(tmp_path):
    StateFolder(tmp_path / "a", run_id="first").save(50, groups(50))
    (tmp_path / "a" / "reset-state").touch()
    unnamed = StateFolder(tmp_path / "a", max_rounds_ahead(10**6))
    assert unnamed.load(1) == {}
    unnamed.save(1, groups(7))
    assert_is(unnamed.load(2, last_accepted_round=1), 7)
    unnamed.save(2, groups(8))
    assert rounds_of(unnamed) == [1, 2]
    assert rounds_of(unnamed, "set-aside") == [50]


def test_state_of_a_run_without_an_id_is_used_and_belongs_to_the_run_from_then_on(tmp_path):
    """That of Keel 0.2, whose run directory gets an id with the resume."""
    StateFolder(tmp_path / "a").save(5, groups(5))
    resumed = StateFolder(tmp_path / "a", run_id="one")
    assert_is(resumed.load(6, last_accepted_round=5), 5)
    resumed.save(6, groups(6))
    with pytest.raises(ValueError, match="another run"):
        StateFolder(tmp_path / "a", run_id="two").load(6)


def test_state_of_a_run_without_an_id_is_set_aside_by_another_run_of_its_name(tmp_path):
    """Whose it is cannot be told: with checkpoints so far apart, it may be a resume of the run."""
    for n in (1, 2, 50):
        StateFolder(tmp_path / "a").save(n, groups(n))
    other = StateFolder(tmp_path / "a", max_rounds_ahead(25), run_id="other")
    assert other.load(1) == {}
    other.save(1, groups(7))
    assert rounds_of(other) == [1]
    assert rounds_of(other, "set-aside") == [1, 2, 50]
    other.save(1, groups(8))  # its own from then on: replaced
    assert rounds_of(other, "set-aside") == [1, 2, 50]
    assert len(files(other)) == 5


def test_an_intact_version_is_set_aside_rather_than_a_damaged_one_of_its_name(
    tmp_path, monkeypatch
):
    """A round that was trained again, with the same result, after its version was damaged."""
    first = StateFolder(tmp_path / "a", run_id="first")
    first.save(5, groups(5))
    (path,) = (tmp_path / "a").glob("*.safetensors")
    content = path.read_bytes()
    path.with_suffix(".damaged").write_bytes(content[:9])
    (tmp_path / "a" / "reset-state").touch()
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: sorted(iterdir(self), reverse=True))
    StateFolder(tmp_path / "a", run_id="second").save(1, groups(7))
    (path,) = (tmp_path / "a").glob("*.set-aside")
    assert path.read_bytes() == content


@pytest.mark.parametrize("asked", [49, 50, 51])
def test_a_resume_from_either_checkpoint_is_not_behind(state, asked):
    """Checkpoints of rounds 48 to 50; the client has trained round 50 already."""
    for n in (47, 48, 49, 50):
        state.save(n, groups(n))
    assert_is(state.load(asked, last_accepted_round=asked - 1), asked - 1)
    state.save(asked, groups(asked))
    assert rounds(state)[-1] == asked
    assert not list(state.folder.glob("*.set-aside"))


@pytest.mark.parametrize("newest", [8, 50])  # 8: the first from which a reset is needed
def test_saving_over_much_newer_versions_sets_them_aside(state, newest):
    for n in (5, 6, newest):
        state.save(n, groups(n))
    with pytest.raises(ResetNeeded, match="the server is behind"):
        state.load(before_round=5)
    state.save(5, groups(7))
    assert rounds(state) == [5, 5, 6, newest]
    names = [path.name[:11] for path in sorted(state.folder.glob("*.set-aside"))]
    assert names == ["round-00005", "round-00006", f"round-{newest:05d}"]
    assert_is(state.load(before_round=6), 7)


def test_a_full_disk_leaves_the_old_version_and_is_named(state):
    state.save(4, groups(4))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*round-00005-.*'"):
            state.save(5, groups(5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert rounds(state) == [4]  # nor a part
    state.save(5, groups(5))  # there is room again
    assert_is(state.load(before_round=6), 5)
