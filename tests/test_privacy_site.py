"""A site's own limits and ledger: they hold whatever the server asks for."""

import fcntl
import itertools
import json
import math
import re
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from client_fixtures import Client, assert_same_bits, differ, facts, initial, make_config, pictures
from flwr.app import ArrayRecord, Context, Message, RecordDict
from PIL import Image

import client_app.app
import client_app.handlers
from client_app.handlers import answer, turn
from client_app.site_privacy import (
    KEYS,
    Ledger,
    PrivacyRefused,
    check_limits,
    site_limits,
    variable_of,
)
from keel.cli.progress import Terminal
from protocol.chained import append_chained
from protocol.config import config_from_json
from protocol.messages import (
    PreflightRequest,
    TrainRequest,
    array_record,
    message_content,
    request_record,
    simulated_content,
    tensors,
)
from protocol.privacy import composed_epsilon, noise_multiplier


@pytest.fixture
def source(tmp_path, monkeypatch):
    (x, y), (x_test, y_test) = pictures(24, seed=5), pictures(12, seed=6)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))
    return f"npz:{tmp_path / 'own.npz'}"


def private(epsilon=0.5, **keys):
    return make_config(privacy__epsilon=epsilon, **{f"privacy__{k}": v for k, v in keys.items()})


def site(source, config, run_dir="runs/a", **limits):
    node = {"name": "site-a", "source": source}
    node |= {key.replace("_", "-"): value for key, value in limits.items()}
    return Client(config, run_dir, node)


def train(client, number=1):
    """The error's reason, or "" where the client released its update."""
    reply = client.ask("train", number, initial(client.config, seed=5))
    return reply.error.reason if reply.has_error() else ""


def ledger_lines(source):
    return Ledger({"source": source}).path.read_text().splitlines()


LIMITS = [
    (
        {"privacy_min_noise_multiplier": 12},
        {},
        r"privacy\.epsilon = 0\.5: its noise is 9\.69 .* 12 ",
    ),
    ({"privacy_max_clip_norm": 0.5}, {}, r"privacy\.clip-norm = 1: this site allows 0\.5 or less"),
    (  # rounded, it would seem to be allowed
        {"privacy_max_clip_norm": 2.0},
        {"clip_norm": 2.0000001},
        r"privacy\.clip-norm = 2\.0000001: this site allows 2 or less",
    ),
    ({"privacy_max_clip_norm": 2.0}, {"epsilon": 0.0}, r"privacy\.epsilon = 0: this site"),
    (
        {"privacy_max_clip_norm": 2.0},
        {"metrics": "exact"},
        r"privacy\.metrics = 'exact': this site",
    ),
    ({"privacy_metrics": "withheld"}, {"metrics": "exact"}, r"privacy\.metrics = 'exact': this"),
    ({"privacy_metrics": "withheld"}, {"epsilon": 0.0}, r"privacy\.epsilon = 0: this site"),
    ({"privacy_budget_epsilon": 0.3}, {}, r"spent epsilon 0\.\d+ at delta 1e-05, it allows 0\.3"),
]


@pytest.mark.parametrize("where", ["node config", "environment"])
@pytest.mark.parametrize(("limits", "keys", "reason"), LIMITS)
def test_a_request_beyond_a_limit_is_refused_in_one_line(
    where, limits, keys, reason, source, monkeypatch
):
    if where == "environment":
        for key, value in limits.items():
            monkeypatch.setenv(variable_of(key.replace("_", "-")), str(value))
        limits = {}
    client = site(source, private(**keys), **limits)
    with pytest.raises(PrivacyRefused, match=reason):
        check_limits(
            client.config, {"source": source, **{k.replace("_", "-"): v for k, v in limits.items()}}
        )
    for kind in ("query", "train", "evaluate"):
        said = client.ask(kind, 1, initial(client.config, seed=5)).error.reason
        assert "\n" not in said
        assert re.search(reason, said)
    assert not Ledger({"source": source}).path.exists()  # nothing was released


def test_a_request_at_every_limit_is_allowed(source):
    multiplier = noise_multiplier(0.5, 1e-5)
    node = {
        "source": source,
        "privacy-min-noise-multiplier": multiplier,
        "privacy-max-clip-norm": 1.0,
        "privacy-budget-epsilon": composed_epsilon((multiplier**-2) ** -0.5, 1e-5),
    }
    check_limits(private(clip_norm=1.0), node)
    exact = private(clip_norm=1.0, metrics="exact")
    check_limits(exact, node | {"privacy-metrics": "exact"})
    for key in node.keys() - {"source", "privacy-min-noise-multiplier"}:
        with pytest.raises(PrivacyRefused, match=key):
            check_limits(private(clip_norm=1.0), node | {key: node[key] * 0.999})
    with pytest.raises(PrivacyRefused, match="privacy-min-noise-multiplier"):
        check_limits(private(), node | {"privacy-min-noise-multiplier": multiplier * 1.001})


def test_an_empty_variable_counts_as_unset(monkeypatch):
    """The compose file passes every variable, empty where the site sets none."""
    for key in KEYS:
        monkeypatch.setenv(variable_of(key), "")
    check_limits(private(epsilon=0.0), {"source": "folder:/data"})
    assert not site_limits({}).is_set


def test_the_stricter_of_node_config_and_environment_holds(monkeypatch):
    node = {
        "privacy-min-noise-multiplier": 3,
        "privacy-max-clip-norm": 2,
        "privacy-metrics": "exact",
    }
    monkeypatch.setenv("KEEL_PRIVACY_MIN_NOISE_MULTIPLIER", "5")
    monkeypatch.setenv("KEEL_PRIVACY_MAX_CLIP_NORM", "7")
    limits = site_limits(node)
    assert (limits.min_noise_multiplier, limits.max_clip_norm) == (5, 2)
    assert not limits.allows_exact_metrics  # the environment has limits and does not allow it
    monkeypatch.setenv("KEEL_PRIVACY_METRICS", "exact")
    assert site_limits(node).allows_exact_metrics
    monkeypatch.setenv("KEEL_PRIVACY_METRICS", "withheld")
    assert not site_limits(node).allows_exact_metrics


def test_a_node_config_cannot_loosen_the_delta_of_a_budget_in_the_environment(monkeypatch):
    """It passes through code that comes with a run; the default delta is a limit, too."""
    node = {"privacy-budget-epsilon": 2, "privacy-budget-delta": 0.99}
    assert site_limits(node).budget_delta == 0.99  # its own budget
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "2")
    assert site_limits(node).budget_delta == 1e-5
    assert site_limits({"privacy-budget-delta": 1e-6}).budget_delta == 1e-6
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_DELTA", "0.001")
    assert site_limits(node).budget_delta == 0.001


@pytest.mark.parametrize("where", ["node config", "environment"])
def test_to_allow_exact_metrics_is_no_limit(where, monkeypatch):
    node = {"source": "digits"}
    if where == "environment":
        monkeypatch.setenv("KEEL_PRIVACY_METRICS", "exact")
    else:
        node["privacy-metrics"] = "exact"
    check_limits(private(epsilon=0.0), node)
    check_limits(private(metrics="exact"), node)


@pytest.mark.parametrize("value", ["much", -1, 0, math.nan, True])
def test_a_limit_that_is_no_number_is_refused_by_name(value):
    site_limits({"privacy-max-clip-norm": 1})  # equal to True
    with pytest.raises(PrivacyRefused, match=r"privacy-max-clip-norm = .*expected a number > 0"):
        site_limits({"privacy-max-clip-norm": value})


@pytest.mark.parametrize(
    "key",
    [
        *("privacy-budget-epsilion", "privacy-clip-norm", "privacy_metrics"),
        *("privacy.budget-epsilon", "Privacy-budget-epsilon", "privacybudget-epsilon"),
    ],
)
def test_a_misspelt_limit_is_refused_by_name(key, monkeypatch):
    """Ignored, it would be no limit at all."""
    with pytest.raises(PrivacyRefused, match=rf"{key}: unknown .*; expected one of privacy-"):
        check_limits(private(), {"source": "digits", key: 1})
    if key in ("privacy-budget-epsilion", "privacy-clip-norm", "privacybudget-epsilon"):
        monkeypatch.setenv(variable_of(key), "1")
        with pytest.raises(PrivacyRefused, match=rf"{variable_of(key)}: unknown .*; expec"):
            check_limits(private(), {"source": "digits"})
        monkeypatch.setenv(variable_of(key), "")  # as compose.yml sets what is not set
        check_limits(private(), {"source": "digits"})


def test_metrics_are_withheld_or_exact():
    with pytest.raises(PrivacyRefused, match=r"privacy-metrics = 'none' of .*: expected withheld"):
        site_limits({"privacy-metrics": "none"})


def test_the_budget_ends_across_runs_servers_restarts_and_names(source):
    """Each ask is a fresh client process's view: nothing but the ledger's file is shared."""
    multiplier = math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
    budget = composed_epsilon(multiplier / math.sqrt(3), 1e-5) * 1.0001  # of three releases
    for run, name in (("runs/a", "site-a"), ("other/b", "site-a"), ("runs/c", "renamed")):
        client = site(source, private(), run, name=name, privacy_budget_epsilon=budget)
        assert train(client) == ""
    client = site(source, private(), "runs/d", privacy_budget_epsilon=budget)
    assert "(privacy-budget-epsilon)" in train(client)
    assert len(ledger_lines(source)) == 3
    assert [json.loads(line)["run"] for line in ledger_lines(source)] == ["a", "b", "c"]
    # another data set of the same machine has a budget of its own
    assert not Ledger({"source": source + "x"}).path.exists()


def test_a_site_keeps_its_ledger_without_limits_and_not_of_runs_without_noise(source):
    assert train(site(source, private())) == ""
    assert train(site(source, private(epsilon=0.0), "runs/b")) == ""
    (line,) = ledger_lines(source)
    entry = json.loads(line)
    assert (entry["client"], entry["round"], entry["epsilon"]) == ("site-a", 1, 0.5)
    assert entry["multiplier"] == pytest.approx(9.6896, abs=1e-4)


def test_the_same_round_asked_twice_is_two_releases(source):
    client = site(source, private())
    assert train(client) == train(client) == ""
    assert len(ledger_lines(source)) == 2


def test_a_round_that_fails_on_the_data_is_charged(source, tmp_path):
    """That it fails is an answer about the data."""
    (tmp_path / "own.npz").write_bytes(b"damaged")
    assert "failed; privacy.metrics" in train(site(source, private()))
    assert len(ledger_lines(source)) == 1


def test_a_client_that_waits_for_its_turn_is_not_charged(source, monkeypatch):
    """The one that trains may end the process before the others have read any data."""
    was_charged = []

    def noted_turn():
        was_charged.append(Ledger({"source": source}).path.exists())
        return turn()

    monkeypatch.setattr(client_app.handlers, "turn", noted_turn)
    assert train(site(source, private())) == ""
    assert was_charged == [False]
    assert len(ledger_lines(source)) == 1


def test_what_another_process_released_during_the_wait_for_the_turn_counts(source, monkeypatch):
    """Both fitted when they were asked; together they are beyond the budget."""
    budget = composed_epsilon(noise_multiplier(0.5, 1e-5), 1e-5) * 1.0001  # of one release
    client = site(source, private(), privacy_budget_epsilon=budget)

    def slow_turn():
        Ledger({"source": source}).charge(private(), {"source": source}, {"client": "other"})
        return turn()

    monkeypatch.setattr(client_app.handlers, "turn", slow_turn)
    assert "(privacy-budget-epsilon)" in train(client)
    assert [json.loads(line)["client"] for line in ledger_lines(source)] == ["other"]


@pytest.mark.parametrize("delta", [1, 5.0, math.inf])
def test_a_budget_at_a_delta_that_covers_everything_is_refused(delta):
    with pytest.raises(PrivacyRefused, match=r"privacy-budget-delta = .*expected below 1"):
        site_limits({"privacy-budget-epsilon": 1.0, "privacy-budget-delta": delta})


@pytest.mark.end_to_end  # trains several times, as below
@pytest.mark.parametrize("lines", [0, 1, 2], ids=["deleted", "one line", "two lines"])
def test_a_ledger_without_its_newest_lines_ends_releases_under_a_budget(lines, source):
    for number in (1, 2, 3):
        assert train(site(source, private()), number) == ""
    path, whole = Ledger({"source": source}).path, ledger_lines(source)
    path.write_text("".join(f"{line}\n" for line in whole[:lines]))
    if not lines:
        path.unlink()
    limited = site(source, private(), privacy_budget_epsilon=100.0)
    assert "its newest lines are missing" in train(limited)
    assert train(site(source, private()), 4) == ""  # without a budget: not evidence destroyed
    assert "its newest lines are missing" in train(limited)
    newest = path.with_suffix(".newest")
    known = newest.read_bytes()
    for damaged in (b"", known[:1]):  # a part of anything is in the file
        newest.write_bytes(damaged)
        assert "its newest lines are missing" in train(limited)
    newest.write_bytes(known)
    path.write_text("".join(f"{line}\n" for line in whole))
    assert train(limited, 5) == ""


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "damage", ["edit", "drop the first", "half a line", "swap two", "repeat one"]
)
def test_a_damaged_ledger_ends_releases_under_a_budget(damage, source, caplog):
    for number in (1, 2, 3):
        assert train(site(source, private()), number) == ""
    path, lines = Ledger({"source": source}).path, ledger_lines(source)
    if damage == "edit":
        lines[1] = lines[1].replace('"round": 2', '"round": 9')
    elif damage == "drop the first":
        lines = lines[1:]
    elif damage == "swap two":
        lines[0], lines[1] = lines[1], lines[0]
    elif damage == "repeat one":
        lines = [*lines[:2], *lines[1:]]
    else:
        lines[2] = lines[2][:20]
    path.write_text("\n".join(lines) + "\n")
    said = train(site(source, private(), privacy_budget_epsilon=100.0))
    assert re.search("this site's ledger: .* lines? damaged: the budget spent is unknown", said)
    assert str(path.parent) not in said  # the server is told no path
    assert f"{path}: " in caplog.text


def test_a_kill_while_a_release_is_recorded_costs_no_budget(source):
    """A line that crosses a page may be written in part; its release was not made."""
    limits = {"source": source, "privacy-budget-epsilon": 100.0}
    ledger = Ledger(limits)
    for number in (1, 2):
        ledger.charge(private(), limits, {"round": number})
    whole, newest = ledger.path.read_bytes(), ledger.newest.read_bytes()
    part = whole.splitlines()[1][:50]
    for rest in (part, part + bytes(9)):  # the second after a power cut, on some file systems
        ledger.path.write_bytes(whole + rest)
        check_limits(private(), limits)
        assert ledger.spent() == pytest.approx(2 * noise_multiplier(0.5, 1e-5) ** -2)
    ledger.charge(private(), limits, {"round": 3})
    assert ledger.path.read_bytes().startswith(whole)
    assert [json.loads(line)["round"] for line in ledger_lines(source)] == [1, 2, 3]
    # all of it but its newline
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    ledger.newest.write_bytes(newest)
    assert ledger.spent() == pytest.approx(3 * noise_multiplier(0.5, 1e-5) ** -2)
    # the first line ever
    ledger.path.write_bytes(part)
    ledger.newest.unlink()
    check_limits(private(), limits)
    ledger.charge(private(), limits, {"round": 1})
    assert len(ledger_lines(source)) == 1
    # a line that was recorded whole, and was cut since
    for known, cut in itertools.product((True, False), (2, 30)):  # 2: its digest is still there
        ledger.path.write_bytes(whole[:-cut])  # not known: as before Keel noted the newest line
        ledger.newest.write_bytes(newest) if known else ledger.newest.unlink(missing_ok=True)
        with pytest.raises(PrivacyRefused, match="damaged"):
            check_limits(private(), limits)


def test_a_ledger_that_is_being_written_is_not_damaged(source):
    """Two clients of one machine: one looks at the budget while the other's release is written."""
    limits = {"source": source, "privacy-budget-epsilon": 100.0}
    Ledger(limits).charge(private(), limits, {"round": 1})
    path = Ledger(limits).path
    whole = path.read_bytes()
    with (path.parent / ".lock").open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_bytes(whole[:-9])
        started = threading.Event()

        def look():
            started.set()
            check_limits(private(), limits)

        looks = pool.submit(look)
        assert started.wait(30)
        with pytest.raises(TimeoutError):
            looks.result(timeout=0.2)
        path.write_bytes(whole)
        fcntl.flock(lock, fcntl.LOCK_UN)
        looks.result(timeout=30)


def test_a_release_is_recorded_by_one_client_at_a_time(source):
    """With a shared lock, two would continue the same line, and the second count as damaged."""
    limits = {"source": source}
    Ledger(limits).charge(private(), limits, {"round": 1})
    with ThreadPoolExecutor() as pool:
        with Ledger(limits).locked(fcntl.LOCK_SH):
            charge = pool.submit(Ledger(limits).charge, private(), limits, {"round": 2})
            with pytest.raises(TimeoutError):
                charge.result(timeout=0.5)
        charge.result(timeout=30)
    assert len(ledger_lines(source)) == 2


def test_what_is_no_ledger_ends_no_releases(source, monkeypatch):
    """A folder that ends in .jsonl stopped every release under the environment's budget."""
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "100")
    ledger = Ledger({"source": source})
    for name in ("x.jsonl", "0123456789abcdef.jsonl"):
        (ledger.path.parent / name).mkdir(parents=True)
    (ledger.path.parent / "notes.json").write_text("mine")
    check_limits(private(), {"source": source})
    ledger.path.mkdir()
    with pytest.raises(IsADirectoryError):  # in place of a ledger
        check_limits(private(), {"source": source})


def test_a_line_without_a_digest_is_damaged(home):
    """A site's ledger is younger than the digests: a line without one was edited."""
    ledger = Ledger({"source": "digits"})
    ledger.path.parent.mkdir(parents=True)
    ledger.path.write_text('{"multiplier": 1000000.0}\n')
    with pytest.raises(PrivacyRefused, match="1 line damaged"):
        ledger.spent()


def test_the_path_of_the_data_is_what_counts_not_its_spelling(source, tmp_path):
    spelt = f"npz:{tmp_path}/./home/../own.npz"
    assert Ledger({"source": spelt}).path == Ledger({"source": source}).path


def hostile(config, **keys):
    """A config that no server of Keel's would make: only its own checks refuse these keys."""
    flat = json.loads(config.to_json()) | {k.replace("__", "."): v for k, v in keys.items()}
    return config_from_json(json.dumps(flat))


@pytest.mark.parametrize(
    ("plain", "keys", "reason"),
    [
        ({"method": "fedproc"}, {"privacy__epsilon": 0.5}, "sends nothing that is clipped"),
        ({"model": "resnet20"}, {"privacy__epsilon": 0.5}, "would send its statistics"),
        ({}, {"privacy__epsilon": 5.0}, "needs a number below 1"),
    ],
    ids=["a method without noise", "statistics without noise", "no guarantee"],
)
def test_a_server_cannot_ask_for_less_than_its_own_checks_allow(plain, keys, reason, source):
    """It may state privacy.epsilon and ask for something that is sent without noise."""
    config = hostile(make_config(**plain), **keys)
    client = site(source, config, privacy_max_clip_norm=2.0)
    for kind in ("query", "train", "evaluate"):
        said = client.ask(kind, 1, initial(config, seed=5)).error.reason
        assert re.search(r"(^|: )privacy\.epsilon", said)
        assert reason in said


@pytest.mark.parametrize(
    "keys",
    [{"privacy__clip-norm": 1e308}, {"privacy__clip-norm": 1e307}, {"privacy__delta": 1e-320}],
    ids=["NaN", "an infinite deviation", "an infinite multiplier"],
)
def test_noise_that_is_no_number_is_refused_and_not_recorded(keys, source):
    """Its cost was NaN: the total too, for ever, and NaN is beyond no budget."""
    config = hostile(private(), **keys)
    for limits in ({}, {"privacy_budget_epsilon": 100.0}):
        client = site(source, config, **limits)
        for kind in ("query", "train", "evaluate"):
            said = client.ask(kind, 1, initial(config, seed=5)).error.reason
            assert re.search(r"(^|: )privacy\.clip-norm = .*: the noise is not a finite", said)
    assert not Ledger({"source": source}).path.exists()


def test_a_cost_that_is_no_number_ends_releases_under_a_budget(source):
    """Such lines are from a Keel that did not refuse them."""
    ledger = Ledger({"source": source})
    ledger.path.parent.mkdir(parents=True)
    append_chained(ledger.path, {"multiplier": 9.7}, {"multiplier": math.nan})
    with pytest.raises(PrivacyRefused, match="1 line damaged"):
        ledger.spent()
    limits = {"source": source, "privacy-budget-epsilon": 0.01}
    with pytest.raises(PrivacyRefused, match="1 line damaged"):
        check_limits(private(), limits)


def test_a_site_says_nothing_of_its_data_or_files_before_round_1(
    source, tmp_path, monkeypatch, task_identity
):
    """What a simulation's worker is asked is refused: a digest of the data is exact."""
    (tmp_path / "secret").write_text("word")
    config = make_config(source=source)
    request = PreflightRequest(config, facts(config), str(tmp_path / "secret"), "word", True)
    content = RecordDict({"round": request_record(request)})
    partition = {"partition-id": 0, "num-partitions": 1}
    limited = partition | {"privacy-max-clip-norm": 0.5}
    for node in ({"name": "site-a", "source": source}, limited, partition):
        reply = answer(Message(content, 1, "query"), Context(1, 1, node, RecordDict(), {}))
        assert "only a simulation's worker answers that" in reply.reason
        if node is limited:
            # without its source: forged by code that came with the run; the worker knows better
            monkeypatch.setenv("KEEL_WORKER", "/run/keel/worker.sock")


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
        client = site(f"folder:{folder}", private(), privacy_max_clip_norm=2.0)
        told.append(client.ask("query").content["roster"]["entry"])
        assert train(client) == ""
    assert told[0] == told[1]


@pytest.mark.parametrize("shape", [(3, 99, 99), (1, 0, 0), (0, 28, 28)])
def test_a_server_s_image_shape_is_refused_before_a_site_decodes_to_it(shape, source, tmp_path):
    """Of 9000 pixels, each image takes 243 MB of the disk. The networks take 28 to 64."""
    client = site(source, private(), privacy_max_clip_norm=2.0)
    client.facts = replace(client.facts, image_shape=shape)
    before = set((tmp_path / "home" / "cache").glob("*/*.npy"))  # of the run's source
    for kind in ("query", "train"):
        assert "failed; privacy.metrics" in client.ask(kind, 1, {}).error.reason
    assert set((tmp_path / "home" / "cache").glob("*/*.npy")) == before


def test_a_site_simulates_no_clients(source, monkeypatch, task_identity):
    """They have no limits and no ledger, and the server may name their data: the site's."""
    config = hostile(make_config(), source=source)
    request = request_record(TrainRequest(config, facts(config), 1, [0], False, "a"))
    own = message_content(request, array_record(initial(config, seed=5)), ArrayRecord(), 0)
    message = Message(simulated_content([own], [0], 1), 1, "train")
    limited = {"name": "site-a", "source": source, "privacy-max-clip-norm": 2.0}
    for node in (limited, {"partition-id": 0, "num-partitions": 1}):
        reply = answer(message, Context(1, 1, node, RecordDict(), {}))
        assert "this client is deployed and simulates none" in reply.reason
        monkeypatch.setenv("KEEL_WORKER", "/run/keel/worker.sock")


@pytest.mark.parametrize("run", ["", "..", "a/b", "/a", "a\nb", "a" * 200])
def test_a_run_without_an_allowed_name_is_not_in_the_ledger(run, source, task_identity, caplog):
    """With a stateless method, a server could fill a site's disk with one long name."""
    config = private()
    request = request_record(TrainRequest(config, facts(config), 1, [0], False, run))
    content = message_content(request, array_record(initial(config)), ArrayRecord(), 0)
    node = {"name": "site-a", "source": source}
    reply = answer(Message(content, 1, "train"), Context(1, 1, node, RecordDict(), {}))
    assert "failed; privacy.metrics" in reply.reason
    assert "expected the name of a run" in caplog.text
    assert not Ledger({"source": source}).path.exists()


@pytest.mark.parametrize("limit", [{"privacy-max-clip-norm": 0.5}, {"privacy-max-clip": 0.5}])
def test_a_partition_with_limits_simulates_no_clients(limit, source, task_identity):
    """They would have neither its limits nor its ledger; the second limit is misspelt."""
    config = hostile(make_config(), source=source)
    request = request_record(TrainRequest(config, facts(config), 1, [0], False, "a"))
    own = message_content(request, array_record(initial(config, seed=5)), ArrayRecord(), 0)
    message = Message(simulated_content([own], [0], 1), 1, "train")
    node = {"partition-id": 0, "num-partitions": 1, **limit}
    reply = answer(message, Context(1, 1, node, RecordDict(), {}))
    assert "this client has privacy limits and simulates none" in reply.reason


def test_the_reason_of_a_failed_query_is_withheld_too(source, tmp_path, caplog):
    """It may name a class or a file of the site. The terminal of an inline run shows it."""
    own = np.load(source.partition(":")[2])
    np.savez(tmp_path / "other.npz", **{**own, "y_train": own["y_train"] + 7})
    client = site(f"npz:{tmp_path / 'other.npz'}", private())
    assert client.ask("query").error.reason == (
        "client site-a: failed; privacy.metrics = 'withheld': the reason is in this client's log"
    )
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    with Terminal(1) as terminal, terminal.console.capture() as printed:
        terminal.emit(record)
    assert "its own data has the class" in printed.get()


@pytest.mark.parametrize("kind", ["query", "train", "evaluate"])
def test_the_reason_is_withheld_however_a_server_writes_the_config(
    kind, source, tmp_path, task_identity
):
    """As bytes it was read as any other, and then taken for one that withholds nothing."""
    own = np.load(source.partition(":")[2])
    np.savez(tmp_path / "other.npz", **{**own, "y_train": own["y_train"] + 7})
    config = private()
    record = request_record(TrainRequest(config, facts(config), 1, [0], False, "a"))
    record["config"] = config.to_json().encode()
    content = message_content(record, array_record(initial(config)), array_record({}), 0)
    node = {"name": "site-a", "source": f"npz:{tmp_path / 'other.npz'}"}
    reply = answer(Message(content, 1, kind), Context(1, 1, node, RecordDict(), {}))
    assert "its own data has the class" not in reply.reason


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


@pytest.mark.parametrize("name", ["tiny-imagenet", "mnist"])
def test_no_path_of_a_published_data_set_is_in_an_error(name, tmp_path, monkeypatch, caplog):
    home = tmp_path / "Sankt Georg"
    (home / "data" / "mnist").mkdir(parents=True)  # nothing is downloaded
    monkeypatch.setenv("KEEL_HOME", str(home))
    said = site(name, make_config()).ask("query").error.reason
    assert "…/data/" in said
    assert "Georg" not in said
    assert str(home) in caplog.text


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


def test_a_budget_in_the_environment_covers_whatever_data_a_message_names(source, monkeypatch):
    """The node config passes through code that came with the run, which may forge it."""
    multiplier = math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
    budget = composed_epsilon(multiplier / math.sqrt(2), 1e-5) * 1.0001  # of two releases
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", str(budget))
    assert train(site(source, private())) == ""
    config = hostile(private(), source=source)  # the run's source: the site's folder
    forged = [Client(config, "runs/a", {"partition-id": 0, "num-partitions": n}) for n in (1, 2)]
    assert train(forged[0]) == ""
    assert "(privacy-budget-epsilon)" in train(forged[1])


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KEEL_WORKER", "/run/keel/worker.sock"), ("KEEL_PRIVACY_MAX_CLIP_NORM", "2")],
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
    ledger = Ledger({"partition-id": 0})
    assert len(ledger.path.read_text().splitlines()) == 2


def test_a_worker_with_limits_takes_no_partition(source, monkeypatch):
    """Split by label, its sizes would tell how many samples each class has."""
    monkeypatch.setenv("KEEL_PRIVACY_MAX_CLIP_NORM", "2")
    check_limits(private(), {"partition-id": 0, "num-partitions": 2})
    monkeypatch.setenv("KEEL_WORKER", "/run/keel/worker.sock")
    check_limits(private(), {"source": source})
    with pytest.raises(PrivacyRefused, match="but its node config has no 'source': add source="):
        check_limits(private(), {"partition-id": 0, "num-partitions": 2})


def test_a_full_disk_does_not_damage_the_ledger(source):
    """The release is refused with the cause; with room again, releases go on under the budget."""
    client = site(source, private(), privacy_budget_epsilon=100.0)
    assert train(client) == ""
    size = Ledger({"source": source}).path.stat().st_size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limit[1]))
    try:
        with pytest.raises(OSError, match=r"No space left on device.*\.jsonl"):
            Ledger({"source": source}).charge(client.config, {"source": source}, {"round": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert train(client, 2) == ""
    assert len(ledger_lines(source)) == 2
