"""A site's own limits and ledger: they hold whatever the server asks for."""

import json
import math
import resource
import shutil
from dataclasses import replace

import numpy as np
import pytest
from client_fixtures import Client, assert_same_bits, differ, facts, initial, make_config, pictures
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from PIL import Image

import client_app.app
from client_app.handlers import answer
from client_app.site_privacy import (
    BUDGET,
    BUDGET_DELTA,
    MAX_CLIP,
    METRICS,
    MIN_NOISE,
    VARIABLES,
    Ledger,
    PrivacyRefused,
    check_limits,
    site_limits,
)
from protocol.array_records import array_record, tensors
from protocol.config import config_from_json
from protocol.messages import (
    PreflightRequest,
    TrainRequest,
    message_content,
    request_record,
)
from protocol.privacy import composed_epsilon, noise_multiplier
from protocol.simulated import joined_content


@pytest.fixture
def source(tmp_path, monkeypatch):
    (x, y), (x_test, y_test) = pictures(24, seed=5), pictures(12, seed=6)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))
    return f"npz:{tmp_path / 'own.npz'}"


@pytest.fixture
def limit(monkeypatch):
    """Set one of the site's limits."""
    return lambda name, value: monkeypatch.setenv(name, str(value))


def private(epsilon=0.5, **keys):
    return make_config(privacy__epsilon=epsilon, **{f"privacy__{k}": v for k, v in keys.items()})


def site(source, config, run_dir="runs/a", name="site-a"):
    return Client(config, run_dir, {"name": name, "source": source})


def train(client, number=1):
    """The error's reason, or "" where the client released its update."""
    reply = client.ask("train", number, initial(client.config, seed=5))
    return reply.error.reason if reply.has_error() else ""


def ledger():
    """The lines of the ledger."""
    path = Ledger().path
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("name", "value", "keys", "refused"),
    [
        (MIN_NOISE, 12, {}, "privacy.epsilon"),
        (MAX_CLIP, 2.0, {"clip_norm": 2.0000001}, "privacy.clip-norm"),
        (MAX_CLIP, 2.0, {"epsilon": 0.0}, "privacy.epsilon"),
        (MAX_CLIP, 2.0, {"metrics": "exact"}, "privacy.metrics"),
        (METRICS, "withheld", {"metrics": "exact"}, "privacy.metrics"),
        (METRICS, "withheld", {"epsilon": 0.0}, "privacy.epsilon"),
        (BUDGET, 0.3, {}, "privacy.epsilon"),
    ],
)
def test_a_request_beyond_a_limit_is_refused_in_one_line(name, value, keys, refused, source, limit):
    limit(name, value)
    client = site(source, private(**keys))
    for kind in ("query", "train", "evaluate"):
        said = client.ask(kind, 1, initial(client.config, seed=5)).error.reason
        assert "\n" not in said
        assert refused in said
    assert ledger() == []  # nothing was released


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((MAX_CLIP, value) for value in ("much", "-1", "0", "nan")),
        *((BUDGET_DELTA, value) for value in ("1", "5", "inf")),
        (METRICS, "none"),
        (f"{BUDGET}S", "1"),
        (BUDGET.replace("Y_", "Y"), "1"),
        ("keel_privacy_max_clip_norm", "1"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(name, value, limit):
    """Ignored, it would be no limit at all."""
    limit(name, value)
    with pytest.raises(PrivacyRefused, match=name):
        check_limits(private(), {"source": "digits"})
    for each in (name, *VARIABLES):  # the compose file passes all, empty where a site sets none
        limit(each, "")
    check_limits(private(epsilon=0.0), {"source": "digits"})
    assert not site_limits().is_set


def test_a_limit_in_the_node_config_is_refused_by_name():
    """It would bind nobody: the node config passes through the run's code."""
    with pytest.raises(ValueError, match="privacy-max-clip-norm"):
        check_limits(private(), {"source": "digits", "privacy-max-clip-norm": 1.0})


def test_the_budget_ends_across_runs_servers_restarts_names_and_data(source, limit, tmp_path):
    """Nothing but the ledger is shared."""
    other = shutil.copy(source.partition(":")[2], tmp_path / "other.npz")
    multiplier = noise_multiplier(0.5, 1e-5)
    limit(BUDGET, composed_epsilon(multiplier / math.sqrt(3), 1e-5) * 1.0001)  # three releases
    assert train(site(source, private(), "runs/a")) == ""
    assert train(site(f"npz:{other}", private(), "other/b")) == ""
    assert train(site(source, private(), "runs/c", name="renamed")) == ""
    assert BUDGET in train(site(source, private(), "runs/d"))
    assert [json.loads(line)["run"] for line in ledger()] == ["a", "b", "c"]


def test_a_site_has_a_ledger_without_limits_and_not_of_runs_without_noise(source):
    client = site(source, private())
    assert train(client) == train(client) == ""  # the same round twice is two releases
    assert train(site(source, private(epsilon=0.0), "runs/b")) == ""
    entry, again = map(json.loads, ledger())
    assert (entry["client"], entry["round"], entry["epsilon"]) == ("site-a", 1, 0.5)
    assert entry["multiplier"] == pytest.approx(9.6896, abs=1e-4)
    assert again["round"] == 1


def test_a_round_that_fails_on_the_data_is_charged(source, tmp_path):
    """That it fails is an answer about the data."""
    (tmp_path / "own.npz").write_bytes(b"damaged")
    assert train(site(source, private()))
    assert len(ledger()) == 1


@pytest.mark.parametrize("damage", ["edit", "cut short", "deleted", "mark"])
def test_a_damaged_ledger_ends_releases_until_it_is_restored(damage, source):
    client = site(source, private())
    for number in (1, 2, 3):
        assert train(client, number) == ""
    own, lines = Ledger(), ledger()
    whole = own.path.read_bytes()
    if damage == "edit":
        lines[1] = lines[1].replace('"round": 2', '"round": 9')
    elif damage == "cut short":
        lines = lines[:2]
    own.path.write_text("".join(f"{line}\n" for line in lines))
    if damage == "deleted":
        own.path.unlink()
    mark = own.newest.read_bytes()
    if damage == "mark":
        own.newest.write_bytes(b"")
    said = train(client, 4)
    assert "ledger" in said
    assert str(own.path.parent) not in said  # the server is told no path
    own.path.write_bytes(whole)
    own.newest.write_bytes(mark)
    assert train(client, 4) == ""


def hostile(config, **keys):
    """A config that no server of Keel's would make: only its own checks refuse these keys."""
    flat = json.loads(config.to_json()) | {k.replace("__", "."): v for k, v in keys.items()}
    return config_from_json(json.dumps(flat))


@pytest.mark.parametrize(
    ("plain", "keys", "named"),
    [
        ({"method": "fedproc"}, {"privacy__epsilon": 0.5}, "privacy.epsilon"),
        ({"model": "resnet20"}, {"privacy__epsilon": 0.5}, "privacy.epsilon"),
        ({}, {"privacy__epsilon": 5.0}, "privacy.epsilon"),
        ({"privacy__epsilon": 0.5}, {"privacy__clip-norm": 1e308}, "privacy.clip-norm"),
        ({"privacy__epsilon": 0.5}, {"privacy__clip-norm": 1e307}, "privacy.clip-norm"),
        ({"privacy__epsilon": 0.5}, {"privacy__delta": 1e-320}, "privacy.clip-norm"),
    ],
    ids=[
        *("a method without noise", "statistics without noise", "no guarantee"),
        *("NaN", "an infinite deviation", "an infinite multiplier"),
    ],
)
def test_a_server_cannot_ask_for_less_than_its_own_checks_allow(plain, keys, named, source):
    """It may state privacy.epsilon and ask for something that is sent without noise."""
    config = hostile(make_config(**plain), **keys)
    client, received = site(source, config), initial(make_config(**plain), seed=5)
    for kind in ("query", "train", "evaluate"):
        assert named in client.ask(kind, 1, received).error.reason
    assert ledger() == []


PARTITION = {"partition-id": 0, "num-partitions": 1}


@pytest.fixture(params=["a site", "a worker", "a limit"])
def at_a_site(request, source, monkeypatch, task_identity):
    """Sends a message to a process of a site, whose node config the run's code may forge."""
    node = {"name": "site-a", "source": source} if request.param == "a site" else PARTITION
    variable = {"a worker": "KEEL_WORKER", "a limit": MAX_CLIP}.get(request.param)
    if variable:
        monkeypatch.setenv(variable, "1")
    return lambda content, kind: answer(
        Message(content, 1, kind), Context(1, 1, node, RecordDict(), {})
    )


def test_a_site_says_nothing_of_its_data_or_files_before_round_1(at_a_site, source, tmp_path):
    """What a simulation's worker is asked is refused: a digest of the data is exact."""
    (tmp_path / "secret").write_text("word")
    config = make_config(source=source)
    request = PreflightRequest(config, facts(config), str(tmp_path / "secret"), "word", True)
    content = RecordDict({"round": request_record(request)})
    assert isinstance(at_a_site(content, "query"), Error)


@pytest.mark.parametrize("odd", ["colour", "size"])
def test_the_form_of_one_image_is_not_told(odd, tmp_path):
    """A shape that all images decide, or a refusal of one that differs, would be exact."""
    told = []
    for is_odd in (False, True):
        folder = tmp_path / f"site-{is_odd}"
        for part, num in (("train", 9), ("test", 3)):
            for n, (pixels, label) in enumerate(zip(*pictures(num, seed=3), strict=True)):
                image = Image.fromarray(pixels)
                if is_odd and (part, n) == ("train", 4):
                    image = image.convert("RGB") if odd == "colour" else image.resize((30, 29))
                (folder / part / str(label)).mkdir(parents=True, exist_ok=True)
                image.save(folder / part / str(label) / f"{n}.png")
        client = site(f"folder:{folder}", private())
        told.append(client.ask("query").content["roster"]["entry"])
        assert train(client) == ""
    assert told[0] == told[1]


@pytest.mark.parametrize("shape", [(3, 28, 513), (1, 0, 0), (0, 28, 28)])
def test_a_server_s_image_shape_is_refused_before_a_site_decodes_to_it(shape, source, tmp_path):
    """Images have 8 to 512 pixels a side."""
    client = site(source, private())
    client.facts = replace(client.facts, image_shape=shape)
    before = set((tmp_path / "home" / "cache").glob("*/*.npy"))  # of the run's source
    for kind in ("query", "train"):
        assert "privacy.metrics" in client.ask(kind, 1, {}).error.reason
    assert set((tmp_path / "home" / "cache").glob("*/*.npy")) == before


def test_a_site_simulates_no_clients(at_a_site, source):
    """They have no limits and no ledger, and the server may name their data: the site's."""
    config = hostile(make_config(), source=source)
    request = request_record(TrainRequest(config, facts(config), 1, [0], False, "a"))
    own = message_content(request, array_record(initial(config, seed=5)), ArrayRecord(), 0)
    assert isinstance(at_a_site(joined_content([own], [0], 1), "train"), Error)


def asked_to_train(source, kind="train", run="a", as_text=str):
    """The reply of a site to a message whose run is called this, and whose config is written so."""
    config = private()
    record = request_record(TrainRequest(config, facts(config), 1, [0], False, run))
    record["config"] = as_text(config.to_json())
    content = message_content(record, array_record(initial(config)), array_record({}), 0)
    node = {"name": "site-a", "source": source}
    return answer(Message(content, 1, kind), Context(1, 1, node, RecordDict(), {}))


@pytest.mark.parametrize("run", ["", "..", "a/b", "/a", "a\nb", "a" * 200])
def test_a_run_without_an_allowed_name_is_not_in_the_ledger(run, source, task_identity, caplog):
    assert "privacy.metrics" in asked_to_train(source, run=run).reason
    assert "run-dir" in caplog.text
    assert ledger() == []


@pytest.mark.parametrize("kind", ["query", "train", "evaluate"])
def test_the_reason_is_withheld_however_a_server_writes_the_config(
    kind, source, tmp_path, task_identity
):
    """Also as bytes."""
    own = np.load(source.partition(":")[2])
    np.savez(tmp_path / "other.npz", **{**own, "y_train": own["y_train"] + 7})
    reply = asked_to_train(f"npz:{tmp_path / 'other.npz'}", kind, as_text=str.encode)
    assert "class" not in reply.reason


@pytest.mark.parametrize("damage", ["cut short", "broken link", "16 bits", "size", "gone"])
def test_no_path_and_no_file_name_of_a_site_is_in_an_error(damage, tmp_path, caplog):
    """They may name people. The client's own log has them."""
    folder = tmp_path / "Sankt Georg"
    for n, pixels in enumerate(pictures(4, seed=3)[0]):
        file = folder / ("train", "test")[n % 2] / "cat" / f"Meier, Anna {n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    odd, what = folder / "train" / "cat" / "Meier, Anna 2.png", "an image"
    if damage == "cut short":
        odd.write_bytes(odd.read_bytes()[:200])
    elif damage == "broken link":
        odd.unlink()
        odd.symlink_to("nowhere")
        what = "FileNotFoundError: No such file"
    elif damage == "16 bits":
        Image.fromarray(np.zeros((28, 28), dtype=np.uint16)).save(odd)
    elif damage == "size":
        Image.new("L", (30, 29)).save(odd)
        what = "28x28 and 30x29"
    else:
        shutil.rmtree(folder / "test")
        what = "/test does not exist"
    said = site(f"folder:{folder}", make_config()).ask("query").error.reason
    assert what in said
    assert "Meier" not in said
    assert "Georg" not in said
    assert str(folder) in caplog.text


@pytest.mark.parametrize("name", ["other/../Schmidt", "Sch\\midt", "Sch\"'midt", "Sch\tmidt"])
def test_no_path_is_in_an_error_however_it_is_spelt(name, tmp_path):
    """With "..", or with characters that Python's repr escapes."""
    for folder in (tmp_path / "other", tmp_path / name / "train"):
        folder.mkdir(parents=True)
    for source in (f"npz:{tmp_path / name}", f"folder:{tmp_path / name}"):
        said = site(source, make_config()).ask("query").error.reason
        assert "…" in said
        assert str(tmp_path) not in said
        assert "midt" not in said


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KEEL_WORKER", "/run/keel/worker.sock"), (MAX_CLIP, "2")],
)
def test_noise_under_a_worker_is_never_the_run_seeds(variable, value, source, monkeypatch):
    """Also where the node config says that the client is simulated; its ledger is written."""
    config = hostile(private(), source=source)
    client = Client(config, "runs/a", {"partition-id": 0, "num-partitions": 1})
    arrays = initial(config, seed=5)

    def released():
        return tensors(client.ask("train", 1, arrays).content["arrays"])

    assert_same_bits(released(), released())  # a simulation repeats
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(client_app.app, "send_to_worker", lambda _, *given: answer(*given))
    assert differ(released(), released())
    assert len(ledger()) == 2


def test_a_worker_with_limits_takes_no_partition(source, monkeypatch):
    """Split by label, its sizes would tell how many samples each class has."""
    monkeypatch.setenv("KEEL_PRIVACY_MAX_CLIP_NORM", "2")
    check_limits(private(), {"partition-id": 0, "num-partitions": 2})
    monkeypatch.setenv("KEEL_WORKER", "/run/keel/worker.sock")
    check_limits(private(), {"source": source})
    with pytest.raises(PrivacyRefused, match="source"):
        check_limits(private(), {"partition-id": 0, "num-partitions": 2})


def test_a_full_disk_does_not_damage_the_ledger(source):
    """The release is refused with the cause; with room again, releases go on under the budget."""
    client = site(source, private())
    assert train(client) == ""
    size = Ledger().path.stat().st_size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limit[1]))
    try:
        with pytest.raises(OSError, match="ledger"):
            Ledger().charge(client.config.privacy, {"round": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert train(client, 2) == ""
    assert len(ledger()) == 2
