"""A simulation on a Ray cluster of two nodes with addresses of their own; `make test-cluster`."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import own_fixtures
import pytest
from cluster_fixtures import ROOT, two_nodes
from run_fixtures import (
    SMALL,
    all_models,
    assert_same_run,
    history_of,
    same_bits,
    summary_of,
    wait_until,
)

from keel.deployment.superlink import app_packages
from server_app.inline import run_inline

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
NUM_CLIENTS = 5
PERSONAL = {key: value for key, value in SMALL.items() if key != "lr"}  # fedreco has its own
PERSONAL |= {"method": "fedreco", "local-test-fraction": 0.2}
STATEFUL = SMALL | {"method": "moon", "local-test-fraction": 0.2, "num-rounds": 3}
packages = (*app_packages, "keel")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with two_nodes(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def words(keys, name):
    """The keys as words of the command line."""
    own = {"run-name": name, **keys}
    return [*(f"{key}={value}" for key, value in own.items()), "--clients", str(NUM_CLIENTS)]


def started(cluster, keys, name):
    return cluster.keel("run", *words(keys, name), "--engine", "flower", "--ray", cluster.ray)


def run_of(cluster, name):
    return cluster.home / "runs" / name


def assert_as_inline(folder, keys, base):
    inline = run_inline(keys | {"output-dir": str(base)}, NUM_CLIENTS)
    assert_same_run(folder, inline)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(STATEFUL | {"server-optimizer": "fedadam"}, id="objective with state"),
        pytest.param(PERSONAL, id="personal"),
    ],
)
def test_two_nodes_with_a_shared_directory_give_the_bits_of_the_inline_engine(
    cluster, tmp_path, keys
):
    if 1 not in cluster.nodes:
        cluster.start(1)
    name = f"shared-{keys['method']}"
    code, out, err = cluster.run(*words(keys, name))
    assert (code, err) == (0, ""), out
    folder = run_of(cluster, name)
    manifest = json.loads((folder / "manifest.json").read_text())
    workers = {worker["node"] for worker in manifest["workers"]}
    assert workers == {cluster.address(0), cluster.address(1)}
    assert {worker["device"] for worker in manifest["workers"]} == {"cpu"}
    assert not list(folder.parent.glob(".preflight*"))
    assert_as_inline(folder, keys, tmp_path)


def test_a_method_in_a_file_is_sent_to_both_nodes(cluster, tmp_path):
    if 1 not in cluster.nodes:
        cluster.start(1)
    mine = own_fixtures.file(tmp_path)
    keys = SMALL | {"method": f"{mine}:FedPull", "fedpull.mu": 0.3}
    code, out, err = cluster.run(*words(keys, "own-method"))
    assert (code, err) == (0, ""), out
    assert_as_inline(run_of(cluster, "own-method"), keys, tmp_path / "inline")


def test_a_worker_sees_the_variables_of_the_run_and_not_those_of_its_raylet(cluster, tmp_path):
    """The second node's raylet has another $KEEL_HOME, which would be another cache."""
    other = tmp_path / "other"
    cluster.start(1, [f"export KEEL_HOME={other}"])
    code, out, err = cluster.run(*words(SMALL, "variables"))
    assert (code, err) == (0, ""), out
    assert not other.exists()


def test_without_the_shared_directory_a_stateless_method_has_the_same_bits(cluster, tmp_path):
    cluster.start(1, [f"mount -t tmpfs none {cluster.home}"])
    keys = SMALL | {"method": "fedprox"}
    code, out, err = cluster.run(*words(keys, "unshared"))
    assert (code, err) == (0, ""), out
    assert_as_inline(run_of(cluster, "unshared"), keys, tmp_path)


def test_without_the_shared_directory_a_stateful_method_is_refused(cluster):
    cluster.start(1, [f"mount -t tmpfs none {cluster.home}"])
    code, _, err = cluster.run(*words(STATEFUL, "refused-unshared"))
    assert code != 0
    assert f"worker on {cluster.address(1)} does not see {cluster.home / 'runs'}" in err
    assert err.count("\n") == 1
    assert not run_of(cluster, "refused-unshared").exists()


def test_a_node_with_other_code_is_refused(cluster, tmp_path):
    """Its checkout differs by a line; the app's directory is not shared, or it would be used."""
    other = tmp_path / "checkout"
    for package in packages:
        shutil.copytree(ROOT / package, other / package)
    shutil.copy(ROOT / "pyproject.toml", other)
    with (other / "client_app" / "trainer.py").open("a") as file:
        file.write("# another version\n")
    mounts = [f"mount --bind {other / p} {ROOT / p}" for p in packages]
    cluster.start(1, [*mounts, f"mount -t tmpfs none {cluster.home}"])
    code, _, err = cluster.run(*words(SMALL, "refused-code"))
    assert code != 0
    assert f"worker on {cluster.address(1)}: " in err
    assert "runs code " in err
    assert err.count("\n") == 1
    assert not run_of(cluster, "refused-code").exists()


@pytest.fixture
def two_data_sets(tmp_path):
    """Folders with a set.npz of the same shape each."""
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 255, (400, 28, 28), dtype=np.uint8),
        "y_train": np.arange(400) % 10,
        "x_test": rng.integers(0, 255, (50, 28, 28), dtype=np.uint8),
        "y_test": np.arange(50) % 10,
    }
    folders = tmp_path / "mine", tmp_path / "theirs"
    for folder in folders:
        folder.mkdir()
        np.savez(folder / "set.npz", **arrays)
        arrays["x_train"] = arrays["x_train"][::-1]
    return folders


def test_a_node_with_other_data_is_refused(cluster, two_data_sets):
    mine, theirs = two_data_sets
    cluster.start(1, [f"mount --bind {theirs} {mine}"])
    keys = SMALL | {"source": f"npz:{mine / 'set.npz'}"}
    code, _, err = cluster.run(*words(keys, "refused-data"))
    assert code != 0
    assert f"worker on {cluster.address(1)}: its copy of the run's data has the digest" in err
    assert err.count("\n") == 1


def wait_for_rounds(cluster, name, rounds, process):
    history = run_of(cluster, name) / "history.jsonl"
    wait_until(history.exists, 200, process)
    wait_until(lambda: history.read_text().count("\n") >= rounds, 200, process)


def training_on(node, title="ClientAppActor.run"):
    """Ids of the node's processes that work on a message, or on a task with another title."""
    from cluster_fixtures import ip

    found = []
    for pid in map(int, ip("netns", "pids", node.space).split()):
        try:
            if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_the_clients_of_a_node_killed_in_a_round_are_played_again(cluster, tmp_path):
    node = cluster.start(1)
    keys = STATEFUL | {"local-epochs": 15}
    process = cluster.keel(
        "run", *words(keys, "killed"), "--engine", "flower", "--ray", cluster.ray
    )
    try:
        wait_for_rounds(cluster, "killed", 1, process)
        while not training_on(node):
            time.sleep(0.01)
        node.kill()
        del cluster.nodes[1]
        rounds_then = len(history_of(run_of(cluster, "killed")))
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert rounds_then < 3  # it was in a round
    assert (process.returncode, err) == (0, ""), out
    folder = run_of(cluster, "killed")
    assert [line["left_out"] for line in history_of(folder)] == [{}] * 3
    assert "is lost" in (folder / "run.log").read_text()
    assert_as_inline(folder, keys, tmp_path)


def test_a_worker_that_dies_on_each_message_ends_the_run_with_a_line(cluster, tmp_path):
    """A resume on two nodes then has the bits of the inline engine."""
    name = "dying"
    if node := cluster.nodes.pop(1, None):
        node.kill()
    keys = STATEFUL | {"num-rounds": 50}
    process = started(cluster, keys, name)
    try:
        wait_for_rounds(cluster, name, 1, process)
        while process.poll() is None:
            for pid in training_on(cluster.nodes[0]):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    folder = run_of(cluster, name)
    assert summary_of(folder)["status"].startswith("failed: ")
    assert "3 workers died on its messages" in (folder / "run.log").read_text()
    done = len(history_of(folder))
    cluster.start(1)
    given = (f"num-rounds={done + 1}", "--engine", "flower", "--ray", cluster.ray)
    resumed = cluster.keel("resume", name, *given)
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, (out, err)
    inline = run_inline(keys | {"num-rounds": done + 1, "output-dir": str(tmp_path)}, NUM_CLIENTS)
    assert same_bits(all_models(folder), all_models(inline))


def test_workers_larger_than_any_node_are_refused_in_a_line(cluster):
    code, _, err = cluster.run(*words(SMALL, "large"), "--cpus-per-client", "64")
    assert code != 0
    assert f"{cluster.address(0)} has 1 CPU" in err
    assert err.count("\n") == 1
    assert not run_of(cluster, "large").exists()


# --- a recipe -----------------------------------------------------------------------------------


def experiments(cluster, folder, **given):
    """`keel experiments run` of two runs on the cluster, and its output folder."""
    recipe, output = folder / "recipe.yaml", cluster.home / folder.name
    own = {name.replace("_", "-"): value for name, value in given.items()}
    keys = {**SMALL, "num-clients": NUM_CLIENTS, "num-rounds": 3} | own
    recipe.write_text(json.dumps({"config": keys, "seeds": 2, "rows": {"A": {"method": "moon"}}}))
    words = ("run", str(recipe), "--output", str(output), "--ray", cluster.ray)
    return cluster.keel("experiments", *words), output


def finished_in(output):
    """The directories of its runs, which are finished."""
    found = [path.parent for path in output.glob("runs/*/*/config.json")]
    assert [summary_of(path)["status"] for path in found] == ["finished"] * 2
    return found


def test_a_run_of_a_lost_node_is_resumed_on_another_with_the_same_bits(cluster, tmp_path):
    """Until then each node executes one."""
    cluster.start(1)
    process, output = experiments(cluster, tmp_path, num_rounds=40)
    try:
        nodes, checkpoints = cluster.nodes.values(), "runs/*/*/checkpoints/round-*"
        wait_until(lambda: all(training_on(n, "ray::execute") for n in nodes), 200, process)
        wait_until(lambda: len({path.parent for path in output.glob(checkpoints)}) >= 2, 200)
        cluster.nodes.pop(1).kill()
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, ""), out
    assert out.count("it is resumed once") == 1
    for number, folder in enumerate(finished_in(output)):
        keys = json.loads((folder / "config.json").read_text())["overrides"]
        assert_as_inline(folder, keys, tmp_path / str(number))


def test_a_node_that_does_not_see_the_output_folder_is_refused(cluster, tmp_path):
    cluster.start(1, [f"mount -t tmpfs none {cluster.home}"])
    process, output = experiments(cluster, tmp_path)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2
    assert f"{cluster.address(1)} does not see {output}: set --output" in err
    assert err.count("\n") == 1
    assert not list(output.glob("runs/*/*/config.json"))


def test_a_node_with_other_data_executes_no_run(cluster, tmp_path, two_data_sets):
    mine, theirs = two_data_sets
    cluster.start(1, [f"mount --bind {theirs} {mine}"])
    process, output = experiments(cluster, tmp_path, source=f"npz:{mine / 'set.npz'}")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2
    assert f"{cluster.address(1)} has other data for source = 'npz:" in err
    assert err.count("\n") == 1
    assert not list(output.glob("runs/*/*/config.json"))
