"""Client state: whole or not there, by round, and never replaced in silence."""

import errno
import os
import shutil
import signal

import pytest
import torch
from client_fixtures import assert_same_bits

from client_app.state import (
    DamagedVersion,
    ResetNeeded,
    StateFolder,
    max_rounds_ahead,
    newest_state,
)
from protocol.files import round_of, versions_in


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
    return [round_of(path) for path in versions_in(state.folder)]


def test_a_round_reads_the_newest_version_before_it(state):
    state.save(2, groups(2))
    assert state.load(before_round=2) == {}
    for n in (6, 99_999, 100_000):
        state.save(n, groups(n))
        assert_is(state.load(n + 1), n)
    assert_is(state.load(100_000), 99_999)
    assert_is(newest_state(state.folder, 100_000), 99_999)


def test_a_round_trained_again_replaces_itself_and_all_that_came_after(state):
    for n in (2, 5, 6):
        state.save(n, groups(n))
    state.load(before_round=5)  # the server went back to round 4
    state.save(5, groups(50))
    assert rounds(state) == [2, 5]
    assert_is(state.load(before_round=9), 50)
    before = files(state)
    state.save(5, groups(50))  # the same result is the same file
    assert files(state) == before
    late = StateFolder(state.folder)
    late.load(before_round=3)
    state.save(7, groups(7))
    with pytest.raises(ValueError, match="round 3"):
        late.save(3, groups(3))  # a worker that is late replaces nothing
    assert rounds(state) == [2, 5, 7]


@pytest.mark.parametrize(("interval", "took_part", "last"), [(1, 0.5, 100), (10, 0.3, 25)])
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
            state.prune(before_n)
            assert len(files(state)) <= 5
        for before in [n, *(c + 1 for c in {*before_n, *checkpoints})]:  # n: the round again
            expected = max((s for s in saved if s < before), default=None)
            if expected is None:
                assert state.load(before) == {}
            else:
                assert_is(state.load(before), expected)


def test_a_damaged_version_is_refused_until_it_is_restored_or_given_up(state):
    for n in (2, 5):
        state.save(n, groups(n))
    path = versions_in(state.folder)[-1]
    whole = path.read_bytes()
    for content in (b"", whole[:-5], whole + b"0", whole[:-7] + b"\0" + whole[-6:]):
        path.write_bytes(content)
        with pytest.raises(ResetNeeded, match=path.name) as refused:
            state.load(before_round=6)
        assert str(state.folder) not in refused.value.nameless
        with pytest.raises(DamagedVersion, match=path.name):
            newest_state(state.folder, 6)
    assert_is(state.load(before_round=5), 2)  # which does not read it
    path.write_bytes(whole)
    assert_is(state.load(before_round=6), 5)
    path.write_bytes(b"")
    (state.folder / "reset-state").touch()
    assert_is(state.load(before_round=6, last_accepted_round=5), 2)


@pytest.mark.parametrize("kept", [None, 2])
def test_lost_state_is_refused_and_reset_only_once(state, kept):
    """All of it, or what came after an old backup."""
    if kept:
        state.save(kept, groups(kept))
    with pytest.raises(ResetNeeded, match="round 4"):
        state.load(before_round=6, last_accepted_round=4)
    assert state.load(before_round=6, last_accepted_round=kept or 0).keys() == (
        groups(kept).keys() if kept else set()
    )
    (state.folder / "reset-state").touch()
    left = state.load(before_round=6, last_accepted_round=4)
    state.save(6, groups(6))
    assert_is(state.load(before_round=7, last_accepted_round=6), 6)
    assert state.load(before_round=6, last_accepted_round=4).keys() == left.keys()  # again
    versions_in(state.folder)[-1].unlink()
    with pytest.raises(ResetNeeded):
        state.load(before_round=8, last_accepted_round=6)


def test_a_version_of_another_client_is_refused_and_destroys_nothing(state):
    other = StateFolder(state.folder.parent / "client-0008")
    state.save(1, groups(1))
    other.save(2, groups(2))
    [version] = versions_in(other.folder)
    copied = state.folder / version.name
    shutil.copy(version, copied)
    for read in (lambda: state.load(3), lambda: newest_state(state.folder, 3)):
        with pytest.raises(ResetNeeded, match="client-0008") as refusal:
            read()
        assert str(state.folder) not in refusal.value.nameless
    copied.unlink()
    assert_is(state.load(3), 1)


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_version(state, where):
    state.save(4, groups(4))
    owner = os if where == "fsync" else type(state.folder)
    if (child := os.fork()) == 0:
        setattr(owner, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            state.save(5, groups(5))
        finally:
            os._exit(0)  # only if it was not called
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert_is(state.load(before_round=9), 4)
    state.save(5, groups(5))
    assert_is(state.load(before_round=9), 5)
    assert len(files(state)) == 2  # the part that nobody reads is gone


def test_a_full_disk_leaves_the_old_versions_and_uses_up_no_reset(state, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for n in (48, 49, 50):
        state.save(n, groups(n))
    (state.folder / "reset-state").touch()
    assert state.load(before_round=1) == {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="round-00001"):
            state.save(1, groups(1))
    assert rounds(state) == [48, 49, 50]
    assert state.load(before_round=1) == {}  # the operator need not allow it again


def test_a_server_that_lost_its_place_is_refused_and_destroys_nothing(state):
    """An empty run directory, or one restored from an old backup."""
    for n in (48, 49, 50):
        state.save(n, groups(n))
    before = files(state)
    for asked in (1, 20, 47):
        with pytest.raises(ResetNeeded, match="round 50"):
            state.load(before_round=asked, last_accepted_round=asked - 1)
    assert files(state) == before
    (state.folder / "reset-state").touch()
    assert state.load(before_round=1) == {}
    state.save(1, groups(1))
    state.prune([0])
    assert {name.replace("safetensors", "set-aside") for name in before} < {*files(state)}
    assert_is(state.load(before_round=2, last_accepted_round=1), 1)
    assert state.load(before_round=1) == {}  # round 1 again, as after a kill of the server


@pytest.mark.parametrize("other", ["second", ""])
@pytest.mark.parametrize("asked", [1, 30])
def test_another_run_of_the_same_name_is_refused_and_destroys_nothing(tmp_path, other, asked):
    """The run directory was lost; "": a hostile server guesses the name."""

    def of(run_id):
        return StateFolder(tmp_path / "a", max_rounds_ahead(50), run_id=run_id)

    for n in (1, 2, 50):
        of("first").save(n, groups(n))
    before = files(of("first"))
    with pytest.raises(ResetNeeded, match="round 50"):
        of(other).load(asked)
    assert files(of(other)) == before
    assert_is(of("first").load(51, last_accepted_round=50), 50)  # restored after all

    (tmp_path / "a" / "reset-state").touch()
    assert of(other).load(asked) == {}  # nothing of the first run
    of(other).save(asked, groups(7))
    assert len(list((tmp_path / "a").glob("*.set-aside"))) == 3
    assert rounds(of(other)) == [asked]
    assert_is(of(other).load(asked + 1, last_accepted_round=asked), 7)
    assert of(other).load(asked) == {}  # the round again, as after a kill of the server
