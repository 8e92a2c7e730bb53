"""What the page of one run shows."""

import fcntl
import json
from random import Random

import numpy as np
import pytest

from keel.views import run_page
from keel.views.store import ShownRun
from tests.tools.run_directories import append_round, line_of, make_large, make_run


def client_charts(run):
    return run_page.client_charts(run_page.of_clients(run))


def test_clients_are_listed_worst_first_and_spread_by_their_quantiles(tmp_path):
    run = ShownRun(make_large(tmp_path, 11, 3))
    expected = list(run.clients())[-1]["local_global"]
    charts = client_charts(run)
    heat = charts["clients-local_global"]["data"][0]
    assert heat["y"] == sorted(expected, key=expected.get)
    assert heat["x"] == ["1", "2", "3"]
    values = [100 * each for each in expected.values()]
    assert [row[-1] for row in heat["z"]] == pytest.approx(sorted(values), 1e-5)
    shares = {"worst client": 0, "1st decile": 0.1, "median": 0.5, "9th decile": 0.9}
    quantiles = {name: np.quantile(values, share) for name, share in shares.items()}
    quantiles["best client"] = max(values)
    spread = charts["spread-local_global"]["data"]
    assert {trace["name"]: trace["y"][-1] for trace in spread} == pytest.approx(quantiles, rel=1e-5)


def test_many_clients_and_rounds_become_a_small_chart(tmp_path):
    heat = client_charts(ShownRun(make_large(tmp_path, 60, 100)))["clients-local_global"]["data"]
    assert (len(heat[0]["z"]), len(heat[0]["z"][0])) == (40, 34)
    assert heat[0]["x"][-1] == "100"


def test_the_charts_have_the_historys_numbers(tmp_path):
    run = ShownRun(make_run(tmp_path / "a", {"method": "moon"}, 4))
    more = {"evaluation_bytes_down": 500_000, "evaluation_bytes_up": 400}
    append_round(run.directory, line_of(5, Random(0)) | more)
    charts = run_page.main_charts(run)
    [accuracy] = charts["accuracy"]["data"]
    assert accuracy["x"] == [1, 2, 3, 4, 5]
    values = [100 * line["global"]["accuracy"] for line in run.history]
    assert accuracy["y"] == pytest.approx(values, rel=1e-5)
    assert [trace["name"] for trace in charts["loss"]["data"]] == [
        "supervised", "contrastive", "global model, test set"
    ]  # fmt: skip
    sent, *_ = charts["traffic"]["data"]
    assert sent["y"] == [1.0] * 5
    now = run_page.status(run)
    assert (now["sent"], now["received"]) == ("5.5 MB", "4.5 MB")


def test_clients_left_out_are_listed_with_the_reason_and_counted_by_kind(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    line = line_of(2, Random(0)) | {
        **{"left_out": {"b": "norm 9 > 5", "c": "ValueError: no power"}, "rejected": 1},
        "backed_off": ["e", "f"],
    }
    append_round(run, line)
    events = run_page.of_clients(ShownRun(run)).events
    assert len(events) == 4
    assert (2, "b", "left out", "norm 9 > 5") in events
    bars = run_page.main_charts(ShownRun(run))["trouble"]["data"]
    assert {trace["name"]: trace["y"] for trace in bars} == {
        **{"rejected": [0, 1], "failed or no reply": [0, 1]},
        **{"away or in backoff": [0, 2]},
    }


def test_the_time_left_is_told_of_a_running_run_only(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 10, num_written=4, status="running")
    assert run_page.status(ShownRun(run))["left"] is None
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        seconds = [sum(line["seconds"].values()) for line in ShownRun(run).history]
        assert run_page.status(ShownRun(run))["left"] == f"{round(6 * sum(seconds) / 4)} s"


def test_a_run_before_its_first_round_has_a_page(tmp_path):
    path = make_run(tmp_path / "a", {"method": "fedavg"}, 3, num_written=0, status="running")
    run = ShownRun(path)
    assert run_page.status(run)["accuracies"] == []
    assert run_page.main_charts(run) | client_charts(run) == {}


def test_the_label_distribution_is_the_rosters(tmp_path):
    run = ShownRun(make_run(tmp_path / "a", {"method": "fedavg"}, 1))
    roster = json.loads((run.directory / "roster.json").read_text())
    [trace] = run_page.label_chart(run)["labels"]["data"]
    assert np.array(trace["z"]).T.tolist() == [row["label_counts"] for row in roster]
    for row in roster:
        row["label_counts"] = []  # withheld
    (run.directory / "roster.json").write_text(json.dumps(roster))
    assert run_page.label_chart(run) == {}


def test_sites_show_who_takes_part_who_is_away_and_whose_state_is_lost(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 0, ["here", "away", "lost", "silent"])
    manifest = json.loads((run / "manifest.json").read_text()) | {"simulated": False}
    (run / "manifest.json").write_text(json.dumps(manifest))
    names = ["away", "lost", "silent"]
    append_round(run, line_of(1, Random(0)) | {"participants": names})
    line = {"participants": ["here"], "backed_off": ["away"], "reset_needed": ["lost"]}
    reasons = {"lost": "state is lost", "silent": "no reply within 60 s"}
    append_round(run, line_of(2, Random(0)) | line | {"left_out": reasons})

    def column(name, online=None):
        saved = ShownRun(run)
        rows = run_page.site_rows(saved, run_page.of_clients(saved), online)
        return [row[name] for row in rows]

    left_out = "left out in round 2"
    assert column("site") == ["here", *names]
    assert column("connected") == ["yes", "away or in backoff", left_out, left_out]
    assert column("last round") == ["2", "1", "1", "1"]
    assert column("pending reset") == ["no", "no", "yes", "no"]
    assert column("last problem")[2:] == [f"round 2: {reason}" for reason in reasons.values()]
    asked = column("connected", {2: "online", 3: "offline"})
    assert asked == ["online", "offline", "not registered", "not registered"]
    append_round(run, line_of(3, Random(0)) | {"participants": ["lost"]})
    assert column("pending reset") == ["no", "no", "no", "no"]


def test_the_tail_of_a_log_has_no_control_characters(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    (run / "run.log").write_text("one\n\x1b[31mtwo\x07\n" + "x" * 1000 + "\n")
    lines = run_page.log_tail(ShownRun(run))
    assert lines[:2] == ["one", "two"]
    assert len(lines[2]) == 400
