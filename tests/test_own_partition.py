"""Partitions of one's own: dicts, lists, functions and JSON files, with the clients' names."""

import json

import numpy as np
import own_fixtures
import pytest
from own_fixtures import cell
from run_fixtures import SMALL, assert_same_run

import keel
from data.own_partition import own_parts
from protocol.config import resolve_config
from protocol.options import ConfigError
from protocol.own_code import own_of

pytestmark = pytest.mark.usefixtures("no_pictures")
KEYS = {key: value for key, value in SMALL.items() if key != "alpha"}  # of dirichlet alone
LABELS = np.arange(40) % 4
SITES = {"site-b": list(range(0, 80)), "site-a": range(100, 160)}
HALVES = """def halves(labels, num_clients, seed):
    labels.sort()  # of a copy
    return [range(i, 40, num_clients) for i in range(num_clients)]
"""


def parts_of(value, num_clients=2):
    """The parts of a partition over 40 samples."""
    return own_parts(own_of("partition", value), LABELS, num_clients, 0)


def test_samples_and_names_are_the_dicts():
    parts = parts_of({"x": [7, 3], "y": np.array([0, 39])})
    assert [part.tolist() for part in parts] == [[3, 7], [0, 39]]
    assert parts.names == ("x", "y")
    assert parts_of([[1], [2]]).names == ()
    found = parts_of(cell(HALVES, "halves"), 4)
    assert found[1].tolist() == list(range(1, 40, 4))
    assert LABELS[:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "key", "named"),
    [
        ({"x": [1, 2], "y": [2]}, "partition", "sample 2 is at x and again at y"),
        ({"x": [1, 1], "y": [2]}, "partition", "sample 1 is at x and again at x"),
        ({"x": [1], "y": [40]}, "partition", "y has the sample 40: expected 0 to 39"),
        ({"x": [1], "y": [-1]}, "partition", "y has the sample -1"),
        ({"x": [1], "y": []}, "partition", "y has"),
        ({"x": [1], "y": [0.5]}, "partition", "y has float64"),
        ({"x": [1], "y": [[2, 3], [4]]}, "partition", "y has"),
        (cell("def f(labels, num_clients, seed):\n    pass\n", "f"), "partition", "f (<cell"),
        ({"x": [1], "a/b": [2]}, "partition", "a/b"),
        ({"x": [1]}, "num-clients", "1 client"),
        (3, "partition", "is a int"),
        (
            cell("def f(labels, num_clients, seed):\n    return 1 / 0\n", "f"),
            "partition",
            "f (<cell",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(value, key, named):
    with pytest.raises(ConfigError) as refused:
        parts_of(value)
    assert refused.value.key == key
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_json_file_is_kept_by_value(tmp_path):
    file = tmp_path / "my-split.json"
    file.write_text(json.dumps({"x": [1], "y": [2]}))
    config = resolve_config({"partition": str(file)})
    assert config.data.partition == "own:my_split"
    assert config.own["own:my_split"].value == {"x": [1], "y": [2]}
    file.write_text('{"x": [1],\n "y": 2')
    with pytest.raises(ConfigError, match=r"my-split\.json:2"):
        resolve_config({"partition": str(file)})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rounds of a stateful method at two sites with names."""
    return trained(tmp_path_factory.mktemp("partition"), SITES)


def trained(folder, partition, **keys):
    """A run with this partition."""
    keys = KEYS | {"output-dir": str(folder / "runs"), "method": "ditto", "num-rounds": 2} | keys
    keys |= {"data-fraction": 1.0, "local-test-fraction": 0.2, "keep-state": True}
    return keel.run(keys, partition=partition, quiet=True)


def test_names_of_a_dict_are_the_clients_names(run):
    lines = [json.loads(line) for line in (run.directory / "clients.jsonl").open()]
    assert {*lines[0]["personal"]} == {"site-a", "site-b"} == {*lines[0]["participants"]}
    sizes = {e["client"]: sum(e["label_counts"] + e["test_label_counts"]) for e in roster_of(run)}
    assert sizes == {"site-a": 60, "site-b": 80}
    log = (run.directory / "run.log").read_text()
    assert "leaves 1298 of 1438 samples unused" in log
    assert keel.load_model(run, client="site-b").class_names[3] == "3"


def test_a_clients_part_is_what_it_was_evaluated_on(run):
    data = run.client_data("site-b")
    samples = {tuple(image.ravel()) for part in data for image in part.images}
    assert len(data.train.labels) + len(data.test.labels) == 80
    model = run.model("site-b")
    guess = model.probabilities(data.test.images).argmax(1).numpy()
    lines = [json.loads(line) for line in (run.directory / "clients.jsonl").open()]
    assert np.mean(guess == data.test.labels) == lines[-1]["personal"]["site-b"]
    assert len(samples) >= 79
    with pytest.raises(ValueError, match="site-b"):
        run.client_data("site-c")


def roster_of(run):
    """The entries of roster.json."""
    found = json.loads((run.directory / "roster.json").read_text())
    return found.values() if isinstance(found, dict) else found


@pytest.mark.end_to_end
def test_the_same_split_has_the_same_bits_and_resumes(run, tmp_path):
    file = tmp_path / "split.json"
    file.write_text(json.dumps({name: list(samples) for name, samples in SITES.items()}))
    mine = own_fixtures.file(tmp_path, f"sites = {SITES!r}\n")
    other = trained(tmp_path, str(file), **{"num-rounds": 1})
    file.unlink()
    other = keel.run(resume=other.directory, num_rounds=2, quiet=True)
    for each in (other, trained(tmp_path, f"{mine}:sites")):
        assert_same_run(each.directory, run.directory)
