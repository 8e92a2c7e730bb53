"""What the page of one run shows."""

import json
import os
from random import Random

import numpy as np
import pytest
from views_fixtures import Pages

from keel.views import run_page
from keel.views.charts import static_file
from keel.views.store import Store
from server_app.history import duration
from tests.tools.run_directories import append_round, line_of, make_large, make_run


def only_run(base):
    store = Store([base])
    (entry,) = store.runs().values()
    return entry, store.history(entry)


def test_clients_are_listed_worst_first_with_their_accuracies(tmp_path):
    run = make_large(tmp_path, 5, 3)
    _, reader = only_run(tmp_path)
    last = json.loads((run / "clients.jsonl").read_text().splitlines()[-1])
    expected = last["local_global"]
    heat = run_page.client_charts(reader)["clients-local_global"]["data"][0]
    assert heat["y"] == sorted(expected, key=expected.get)
    assert heat["x"] == [1, 2, 3]
    values = [100 * value for value in sorted(expected.values())]
    assert [row[-1] for row in heat["z"]] == pytest.approx(values, rel=1e-5)


def test_privacy_is_stated_in_words_with_four_digits(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    summary = json.loads((run / "summary.json").read_text())
    covers = "the clipped and noised arrays of every reply, " * 3
    summary["privacy"] = {
        **{"per_release": {"epsilon": 0.5, "delta": 1e-05}, "releases": 6},
        "composed": {"epsilon": 1.0250546003407701, "delta": 1e-05},
        "guarantee": {"covers": covers, "withheld": ["losses", "label counts"], "exempt": []},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    assert run_page.privacy_rows(only_run(tmp_path)[0]) == [
        ("per release", "epsilon: 0.5; delta: 1e-05"),
        ("releases", "6"),
        ("composed", "epsilon: 1.025; delta: 1e-05"),
        ("guarantee", f"covers: {covers.strip()}; withheld: losses, label counts; exempt: none"),
    ]


def test_traffic_includes_the_evaluations(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    for number in (2, 3):
        more = {"evaluation_bytes_down": 500_000, "evaluation_bytes_up": 400}
        append_round(run, line_of(number, Random(0)) | more)
    now = run_page.progress(*only_run(tmp_path))
    assert (now["sent"], now["received"]) == (3 * 1_000_000 + 2 * 500_000, 3 * 900_000 + 2 * 400)


def test_a_heat_map_of_few_clients_fills_its_panel(tmp_path):
    make_large(tmp_path, 3, 2)
    _, reader = only_run(tmp_path)
    layout = run_page.client_charts(reader)["clients-local_global"]["layout"]
    assert f".chart {{ min-height: {layout['height']}px" in static_file("page.css").read_text()


def test_many_clients_and_rounds_become_a_small_chart(tmp_path):
    make_large(tmp_path, 300, 100)
    _, reader = only_run(tmp_path)
    heat = run_page.client_charts(reader)["clients-local_global"]["data"][0]
    assert (len(heat["z"]), len(heat["z"][0])) == (40, 34)
    assert heat["x"][-1] == 100


@pytest.mark.parametrize("num_clients", [1, 2, 4, 5, 10, 12])
def test_median_and_deciles_of_the_clients_are_those_of_numpy(num_clients, tmp_path):
    """Of two clients the median was the worse one."""
    run = make_large(tmp_path, num_clients, 1)
    line = json.loads((run / "clients.jsonl").read_text())
    values = [100 * value for value in line["local_global"].values()]
    _, reader = only_run(tmp_path)
    lines = run_page.client_charts(reader)["spread-local_global"]["data"]
    found = {trace["name"]: trace["y"][0] for trace in lines}
    shares = {"worst client": 0, "1st decile": 0.1, "median": 0.5, "9th decile": 0.9}
    expected = {name: np.quantile(values, share) for name, share in shares.items()}
    assert found == pytest.approx(expected | {"best client": max(values)}, rel=1e-5)


def test_room_is_left_for_the_charts_of_clients_that_will_come(tmp_path):
    make_large(tmp_path, 5, 2)
    _, reader = only_run(tmp_path)
    assert run_page.coming_charts(reader) == list(run_page.client_charts(reader))


def test_clients_left_out_are_listed_with_the_reason_and_counted_by_kind(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    line = line_of(2, Random(0)) | {
        **{"left_out": {"b": "norm 9 > 5", "c": "ValueError: no power"}, "rejected": 1},
        **{"late": ["d, 3 s late"], "backed_off": ["e", "f"]},
    }
    append_round(run, line)
    entry, reader = only_run(tmp_path)
    found, total = run_page.events(entry, reader.lines)
    assert total == 5
    assert (2, "b", "left out", "norm 9 › 5") in found
    assert (2, "", "late", "d, 3 s late") in found
    bars = {trace["name"]: trace["y"] for trace in run_page.trouble(reader.lines)["data"]}
    assert bars == {
        **{"rejected": [0, 1], "failed or no reply": [0, 1]},
        **{"late replies": [0, 1], "away or in backoff": [0, 2]},
    }


def test_the_time_left_is_told_of_a_running_run_only(tmp_path, monkeypatch):
    make_run(tmp_path / "a", {"method": "fedavg"}, 10, num_written=4, status="running")
    entry, reader = only_run(tmp_path)
    assert run_page.progress(entry, reader)["left"] is None
    monkeypatch.setattr("keel.views.store.is_locked", lambda path: True)
    seconds = [sum(line["seconds"].values()) for line in reader.lines]
    expected = round(6 * sum(seconds) / 4)
    assert run_page.progress(entry, reader)["left"] == f"{expected} s"


def test_the_time_left_after_a_resume_is_that_of_the_rounds_to_come(tmp_path, monkeypatch):
    """A resume drops the rounds after its checkpoint, may add some, and was away for hours."""
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 10, num_written=5, status="stopped")
    store = Store([tmp_path])
    (entry,) = store.runs().values()
    assert len(store.history(entry).lines) == 5
    path = run / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.with_name("new").write_text("".join(lines[:3]))
    path.with_name("new").replace(path)
    config = json.loads((run / "config.json").read_text())
    config["config"]["num-rounds"] = 20
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("keel.views.store.is_locked", lambda path: True)
    append_round(run, line_of(4, Random(0)) | {"seconds": {"training": 100.0}})
    entry = store.find(entry.id)
    reader = store.history(entry)
    assert [line["round"] for line in reader.lines] == [1, 2, 3, 4]
    seconds = [sum(line["seconds"].values()) for line in reader.lines]
    now = run_page.progress(entry, reader)
    assert (now["done"], now["total"]) == (4, 20)
    assert now["left"] == duration(16 * sum(seconds) / 4)


def test_many_clients_share_columns_in_the_order_of_their_most_frequent_class(tmp_path):
    make_large(tmp_path, 1200, 1)
    entry, _ = only_run(tmp_path)
    roster = json.loads((entry.directory / "roster.json").read_text())
    charts = run_page.label_chart(entry)
    assert len(charts["labels"]["data"][0]["x"]) == 240
    total = sum(sum(r["label_counts"]) for r in roster)
    assert 5 * sum(charts["totals"]["data"][0]["y"]) == pytest.approx(total, rel=1e-4)
    main = [r["label_counts"].index(max(r["label_counts"])) for r in roster]
    first = charts["labels"]["data"][0]["z"][0][: main.count(0) // 5]  # whose main class is 0
    others = charts["labels"]["data"][0]["z"][0][main.count(0) // 5 + 1 :]
    assert sum(first) / len(first) > 1.5 * sum(others) / len(others)
    assert len(charts["totals"]["data"][0]["x"]) == len(charts["totals"]["data"][0]["y"])


def test_sites_show_who_takes_part_who_is_away_and_whose_state_is_lost(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    sites = [
        {"node": i, "client": name, "num_partitions": 0, "keel": "0.2.0", "versions": "flwr 1.39",
         "label_counts": [3, 4], "model": "cnn-fedavg"}
        for i, name in enumerate(("here", "away", "lost"))
    ]  # fmt: skip
    (run / "roster.json").write_text(json.dumps(sites))
    line = line_of(2, Random(0)) | {
        **{"participants": ["here"], "backed_off": ["away"], "reset_needed": ["lost"]},
        "left_out": {"lost": "withheld", "here": "the word reset-state means nothing"},
    }
    append_round(run, line)
    entry, reader = only_run(tmp_path)
    rows = {row["site"]: row for row in run_page.site_rows(entry, reader, None)}
    assert (rows["here"]["connected"], rows["here"]["last round"]) == ("yes", "2")
    assert rows["away"]["connected"] == "away or in backoff"
    assert {site: row["pending reset"] for site, row in rows.items()} == {
        **{"here": "no", "away": "no", "lost": "yes"}
    }
    assert rows["here"]["samples"] == "7"
    online = run_page.site_rows(entry, reader, {0: "online", 1: "offline"})
    assert [row["connected"] for row in online] == ["online", "offline", "not registered"]
    sites[0]["node"] = 14950884137768953985  # as a SuperLink's: no float has this value
    (run / "roster.json").write_text(json.dumps(sites))
    online = run_page.site_rows(entry, reader, {14950884137768953985: "online", 1: "offline"})
    assert [row["connected"] for row in online] == ["online", "offline", "not registered"]
    assert "away or in backoff" in Pages(tmp_path).get("/deployment").text
    append_round(run, line_of(3, Random(0)) | {"participants": ["lost"]})
    for i in range(6):  # newer simulations do not hide it
        make_run(tmp_path / f"simulation-{i}", {"method": "fedavg"}, 1)
    (tmp_path / "simulation-0" / "roster.json").write_text('{"simulated": 20000}')
    for name in ("config.json", "history.jsonl"):
        os.utime(run / name, (0, 0))
    page = Pages(tmp_path).get("/deployment").text
    assert "Sites of a" in page
    assert "Sites of simulation" not in page
    reader.update()
    assert {row["pending reset"] for row in run_page.site_rows(entry, reader, None)} == {"no"}


def made_of_sites(base, names, lines):
    """A deployment's run with these lines in its history: (entry, reader)."""
    run = make_run(base / "a", {"method": "fedavg"}, 0)
    sites = [{"node": i, "client": name} for i, name in enumerate(names)]
    (run / "roster.json").write_text(json.dumps(sites))
    for number, line in enumerate(lines, start=1):
        append_round(run, line_of(number, Random(0)) | line)
    return only_run(base)


def test_a_site_that_failed_in_the_newest_round_is_not_shown_as_connected(tmp_path):
    names = ["silent", "back"]
    lost = {"participants": ["silent"], "left_out": {"back": "no reply within 60 s"}}
    later = {"participants": ["back"], "left_out": {"silent": "no reply within 60 s"}}
    entry, reader = made_of_sites(tmp_path, names, [lost, later])
    rows = {row["site"]: row["connected"] for row in run_page.site_rows(entry, reader, None)}
    assert rows == {"silent": "left out in round 2", "back": "yes"}


def test_what_happened_to_a_site_long_ago_is_still_shown(tmp_path):
    lines = [
        {"participants": ["gone", "lost"]},
        {"participants": [], "reset_needed": ["lost"], "left_out": {"lost": "state is lost"}},
        *[{"participants": ["here"], "backed_off": ["gone", "lost"]}] * 60,
    ]
    entry, reader = made_of_sites(tmp_path, ["here", "gone", "lost"], lines)
    rows = {row["site"]: row for row in run_page.site_rows(entry, reader, None)}
    assert {site: row["last round"] for site, row in rows.items()} == {
        **{"here": "62", "gone": "1", "lost": "1"}
    }
    assert {site: row["pending reset"] for site, row in rows.items()} == {
        **{"here": "no", "gone": "no", "lost": "yes"}
    }
    assert rows["lost"]["last problem"] == "round 2: state is lost"


def test_every_site_in_backoff_is_shown_so(tmp_path):
    names = [f"site-{i}" for i in range(150)]
    entry, reader = made_of_sites(tmp_path, names, [{"participants": []}, {"backed_off": names}])
    rows = run_page.site_rows(entry, reader, None)
    assert {row["connected"] for row in rows} == {"away or in backoff"}


def test_clients_whose_names_begin_alike_have_a_column_each(tmp_path):
    names = [f"st-josephs-hospital-department-of-radiology-{i}" for i in range(4)]
    make_run(tmp_path / "a", {"method": "fedavg"}, 1, names)
    entry, reader = only_run(tmp_path)
    charts = run_page.label_chart(entry) | run_page.client_charts(reader)
    assert charts["labels"]["data"][0]["x"] == charts["totals"]["data"][0]["x"] == names
    assert sorted(charts["clients-local_global"]["data"][0]["y"]) == names
    assert len(set(charts["totals"]["layout"]["xaxis"]["labelalias"].values())) == 4
    assert not charts["totals"]["layout"]["showlegend"]
