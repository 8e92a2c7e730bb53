"""The pages of `keel ui` in Chromium, over HTTP, as a person uses them."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from browser_fixtures import (
    SIZES,
    browser,  # noqa: F401 (used by being here)
    faults_of,
    in_chromium,
    scrolls_sideways,
    serious_findings,
)

from keel.views.charts import static_file
from tests.tools.run_directories import append_round, line_of, make_run

pytestmark = in_chromium
NUM_LATER = 3  # rounds that the live run writes while it is watched


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with three seeds, a run under way, and one with clients by name."""
    base = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "moon"):
        for seed in range(3):
            keys = {"method": method, "seed": seed, "source": "digits"}
            make_run(base / f"{method}-{seed}", keys, 20)
    make_run(base / "live", {"method": "fedintr"}, 10, num_written=2, status="running")
    clients = [f"site-{letter}" for letter in "abcdefgh"]
    make_run(base / "clients", {"method": "fedcka", "lr": 0.3}, 10, clients)
    return base


@pytest.fixture(scope="module")
def address(base: Path) -> Iterator[str]:
    """The link that `keel ui` prints."""
    command = [sys.executable, "-m", "keel", "ui", str(base), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:  # noqa: F811
    """The table of runs; errors in the console and foreign requests fail the test."""
    context = browser.new_context(viewport={"width": 1366, "height": 900}, accept_downloads=True)
    page = context.new_page()
    host = address.split("/?")[0]
    faults = faults_of(page, (host, "data:", "blob:"))
    page.goto(address)
    page.base = host
    yield page
    context.close()
    assert faults == []


def names(page: Any) -> list[str]:
    return [cell.inner_text() for cell in page.locator("tr:not([hidden]) td.name").all()]


def open_run(page: Any, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()
    page.wait_for_selector("[data-chart=accuracy] .main-svg")


def scroll_to(page: Any, chart: str) -> None:
    page.locator(f"[data-chart={chart}]").scroll_into_view_if_needed()
    page.wait_for_selector(f"[data-chart={chart}] .main-svg")


def open_comparison(page: Any, *runs: str) -> None:
    for name in runs:
        page.get_by_label(f"Select {name}", exact=True).check()
    page.click("#compare")
    page.wait_for_selector("[data-chart=compare] .main-svg")


def traces(page: Any, chart: str) -> list[dict[str, Any]]:
    found = page.evaluate(f"document.querySelector('[data-chart={chart}]').data")
    return [trace for trace in found if trace.get("showlegend") is not False]


def test_the_address_keeps_no_token_and_the_cookie_is_for_no_script(page):
    assert "token" not in page.url
    assert page.evaluate("document.cookie") == ""
    other = page.context.browser.new_context().new_page()
    assert other.goto(page.base).status == 403
    other.context.close()


def test_a_heading_sorts_by_its_numbers(page):
    heading = page.get_by_role("columnheader", name="accuracy")
    shown = {}
    for direction in ("descending", "ascending"):
        heading.get_by_role("button").click()
        assert heading.get_attribute("aria-sort") == direction
        cells = page.locator("tbody td:nth-child(9)").all()
        shown[direction] = [float(cell.inner_text()) for cell in cells]
    assert shown["ascending"] == sorted(shown["ascending"])
    assert shown["descending"] == sorted(shown["ascending"], reverse=True)


def test_the_filter_leaves_rows_that_have_all_words(page):
    page.fill("#filter", "MOON digits")
    assert sorted(names(page)) == ["moon-0", "moon-1", "moon-2"]
    assert page.inner_text("#count") == "3 of 8"
    page.fill("#filter", "nothing like this")
    assert page.locator("#empty").is_visible()
    assert not page.locator("#none-yet").is_visible()


def test_the_same_runs_are_selected_after_back_and_reload(page, base):
    """The browser restored the boxes by position: those of other runs once rows had moved."""
    chosen = {"fedavg-1", "moon-2"}
    page.get_by_role("columnheader", name="run").get_by_role("button").click()
    open_comparison(page, *chosen)
    for move in (page.go_back, page.reload):
        os.utime(base / "moon-0" / "history.jsonl")  # now the first row
        move()
        page.wait_for_selector("#compare:enabled")
        boxes = page.locator("tbody input:checked").all()
        assert {box.get_attribute("aria-label") for box in boxes} == {f"Select {c}" for c in chosen}


def test_seeds_become_one_curve_with_a_band_and_a_value_under_the_mouse(page):
    page.get_by_label("Select fedavg-0", exact=True).check()
    page.click("#seeds")
    assert page.inner_text("#count") == "8 of 8, 3 selected"
    open_comparison(page, "moon-0", "moon-1")
    assert sorted(trace["name"] for trace in traces(page, "compare")) == ["fedavg", "moon"]
    assert page.locator("#results tbody tr").count() == 2
    assert page.inner_text("#differences tbody th") == "method"
    box = page.locator("[data-chart=compare] .nsewdrag").bounding_box()
    for offset in (0, 3):
        page.mouse.move(box["x"] + box["width"] / 2 + offset, box["y"] + box["height"] / 2)
    page.wait_for_selector("[data-chart=compare] .hoverlayer text", state="attached")
    assert "(3 seeds)" in page.locator("[data-chart=compare] .hoverlayer").text_content()


def test_axis_smoothing_and_curve_change_the_chart_and_the_address(page):
    open_comparison(page, "fedavg-0", "moon-0")
    before = traces(page, "compare")[0]
    page.select_option("[name=x]", "bytes")
    page.check("[name=logx]")
    page.locator("[name=smooth]").fill("0.9")
    page.wait_for_function(
        "() => document.querySelector('[data-chart=compare]').layout.xaxis.type === 'log'"
    )
    page.wait_for_function(
        f"() => document.querySelector('[data-chart=compare]').data[0].y[9] !== {before['y'][9]}"
    )
    after = traces(page, "compare")[0]
    assert after["x"][:2] == pytest.approx([1.9, 3.8])
    assert "x=bytes" in page.url
    page.select_option("[name=curve]", "loss.contrastive")
    page.wait_for_function(
        "() => document.querySelector('[data-chart=compare]').layout.yaxis.title.text === 'loss'"
    )
    page.reload()
    page.wait_for_selector("[data-chart=compare] .main-svg")
    assert page.input_value("[name=curve]") == "loss.contrastive"


def test_curves_that_go_leave_the_chart(page):
    open_comparison(page, "fedavg-0", "clients")
    legend = page.locator("[data-chart=compare] .legendtext")
    together = sorted(legend.all_text_contents())
    assert page.get_by_text("Mean over the seeds").is_visible()
    assert [name.split(",")[0] for name in together] == ["fedavg", "fedcka"]
    assert all("num-rounds" in name for name in together)
    page.check("[name=single]")
    legend.filter(has_text="fedavg-0").wait_for()
    apart = [f"{together[0]}, fedavg-0", f"{together[1]}, clients"]
    assert sorted(legend.all_text_contents()) == apart
    page.get_by_text("One curve for each run.").wait_for()  # it was called a mean
    assert page.get_by_text("Mean over the seeds").count() == 0


def test_the_selection_is_exported_as_csv_latex_and_png(page, tmp_path):
    open_comparison(page, "fedavg-0", "moon-0")
    for click, name in (("text=CSV", "a.csv"), ("text=LaTeX", "a.tex"), ("#png", "a.png")):
        with page.expect_download() as download:
            page.click(click)
        download.value.save_as(tmp_path / name)
    rows = list(csv.reader((tmp_path / "a.csv").open()))
    assert {row[1] for row in rows[rows.index([]) + 2 :]} == {"fedavg-0", "moon-0"}
    assert r"\toprule" in (tmp_path / "a.tex").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_shows_who_is_served_badly(page):
    open_run(page, "clients")
    scroll_to(page, "clients-local_global")
    heat = page.evaluate("document.querySelector('[data-chart=clients-local_global]').data[0]")
    last = [row[-1] for row in heat["z"]]
    assert len(heat["y"]) == 8
    assert last == sorted(last)
    scroll_to(page, "labels")


def test_a_chart_is_drawn_when_it_comes_near_the_screen_or_is_printed(page, tmp_path):
    page.set_viewport_size({"width": 390, "height": 844})
    open_run(page, "clients")
    page.wait_for_load_state("networkidle")
    drawn, shown = "[data-chart] .main-svg:first-child", ".panel:not([hidden]) [data-chart]"
    assert 0 < page.locator(drawn).count() < page.locator(shown).count()
    scroll_to(page, "traffic")
    page.pdf(path=tmp_path / "run.pdf")
    assert page.locator(drawn).count() == page.locator(shown).count()


def test_each_chart_is_seen_before_the_next_is_drawn(page):
    page.add_init_script("""
        window.seen = [];
        const look = () => {
          seen.push(document.querySelectorAll("[data-chart] .main-svg:first-child").length);
          requestAnimationFrame(look);
        };
        requestAnimationFrame(look);
    """)
    open_run(page, "clients")
    scroll_to(page, "labels")
    seen = page.evaluate("seen")
    assert seen[-1] > 2
    assert max(after - before for before, after in pairwise(seen)) == 1


def test_a_page_whose_token_is_old_says_what_to_do(browser, address):  # noqa: F811
    """As after `keel ui` was started again: it was "error 403"."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    context.clear_cookies()
    page.locator("#link", has_text="refused: open the new link of keel ui").wait_for(timeout=9000)
    context.close()


def test_a_phone_shows_how_runs_ended_that_did_not_finish(page):
    assert "live" in names(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert "live\ninterrupted" in names(page)
    assert "moon-0" in names(page)


@pytest.mark.parametrize("width", [1366, 1024, 800])
def test_a_smaller_window_leaves_columns_out_and_cuts_none_off(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    box = page.locator("#runs").locator("xpath=..")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    for name in ("accuracy (%)", "state"):
        assert page.get_by_role("columnheader", name=name).is_visible()
    assert page.get_by_role("columnheader", name="split").is_visible() == (width > 1100)


def test_without_javascript_a_page_is_not_called_live(page):
    assert page.inner_text("#link") == "live"
    context = page.context.browser.new_context(
        storage_state=page.context.storage_state(), java_script_enabled=False
    )
    other = context.new_page()
    for path in ("/", "/nothing"):
        other.goto(page.base + path)
        assert "live" not in other.inner_text("header")
        assert other.locator("noscript p").is_visible()
    context.close()


def test_long_lines_of_the_log_are_wrapped(page, base):
    run = make_run(base / "long-lines", {"method": "fedavg", "lr": 0.9}, 1)
    (run / "run.log").write_text("client-0000: " + "values that are not finite " * 14)
    page.reload()
    open_run(page, "long-lines")
    page.wait_for_selector(".log")
    assert page.locator(".log").evaluate("log => log.scrollWidth <= log.clientWidth")
    shutil.rmtree(run)


def test_a_page_follows_the_run_while_it_writes(page, base):
    open_run(page, "live")
    assert "round 2 of 10" in page.inner_text("#run")
    with (base / "live" / "history.jsonl").open("a") as file:
        for number in range(3, 3 + NUM_LATER):
            file.write(json.dumps(line_of(number, Random(number))) + "\n")
            file.flush()
            page.wait_for_function(
                "n => document.querySelector('[data-chart=accuracy]').data[0].x.length === n",
                arg=number,
                timeout=10_000,
            )
    assert f"round {2 + NUM_LATER} of 10" in page.inner_text("#run")


def test_a_new_run_appears_in_the_table_and_a_selection_stays(page, base):
    page.get_by_label("Select moon-0", exact=True).check()
    page.fill("#filter", "moon")
    make_run(base / "moon-9", {"method": "moon", "seed": 9, "source": "digits"}, 2)
    page.wait_for_selector("text=moon-9", timeout=10_000)
    assert page.get_by_label("Select moon-0", exact=True).is_checked()
    assert page.inner_text("#count") == "4 of 9, 1 selected"
    shutil.rmtree(base / "moon-9")


def test_the_focus_outlasts_news_and_ages_go_on_without_any(page, base):
    box = page.get_by_label("Select moon-0", exact=True)
    box.focus()
    make_run(base / "moon-8", {"method": "moon", "seed": 8, "source": "digits"}, 2)
    page.wait_for_selector("text=moon-8", timeout=10_000)
    assert box.evaluate("box => box === document.activeElement")
    age = page.locator("tbody tr", has_text="moon-8").locator("td").last
    before = age.inner_text()
    changed = "([cell, text]) => cell.innerText !== text"
    page.wait_for_function(changed, arg=[age.element_handle(), before])
    shutil.rmtree(base / "moon-8")


def test_a_zoom_a_hidden_curve_and_the_focus_outlast_news_of_the_run(page, base):
    run = make_run(base / "watched", {"method": "fedavg", "lr": 0.7}, 10, num_written=4)
    page.reload()
    open_run(page, "watched")
    page.wait_for_selector("[data-chart=loss] .main-svg")
    box = page.locator("[data-chart=accuracy] .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 160, steps=5)
    page.mouse.up()
    page.locator("[data-chart=loss] .legendtoggle").first.click()
    hidden = "() => document.querySelector('[data-chart=loss]').data[0].visible === 'legendonly'"
    page.wait_for_function(hidden)
    page.locator(".log").focus()
    look = "document.querySelector('[data-chart=accuracy]').layout.xaxis.range"
    before = page.evaluate(look)
    assert before[1] < 4
    append_round(run, line_of(5, Random(5)))
    for chart in ("accuracy", "loss"):
        page.wait_for_function(
            "name => document.querySelector(`[data-chart=${name}]`).data[0].x.length === 5",
            arg=chart,
        )
    assert page.evaluate(look) == before
    assert page.evaluate(hidden)
    assert page.locator(".log").evaluate("log => log === document.activeElement")
    shutil.rmtree(run)


def test_the_log_follows_its_end_until_the_reader_scrolls_up(page, base):
    run = make_run(base / "logged", {"method": "fedavg", "lr": 0.8}, 3)
    (run / "run.log").write_text("".join(f"line {i}\n" for i in range(100)))
    page.reload()
    open_run(page, "logged")
    log = page.locator(".log")
    left = "log => log.scrollHeight - log.clientHeight - log.scrollTop"

    def write(text):
        with (run / "run.log").open("a") as file:
            file.write(text + "\n")
        page.wait_for_function("text => find('.log').innerText.includes(text)", arg=text)

    assert log.evaluate("log => log.scrollTop") > 100
    assert log.evaluate(left) < 2
    write("another line")
    assert log.evaluate(left) < 2
    log.evaluate("log => { log.scrollTop = 50; }")
    write("one line more")
    assert log.evaluate("log => log.scrollTop") == 50
    shutil.rmtree(run)


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_finding_of_axe_or_scrolls_sideways(page, width, scheme):
    page.set_viewport_size({"width": width, "height": SIZES[width]})
    page.emulate_media(color_scheme=scheme)
    runs = [box.get_attribute("value") for box in page.locator("tbody input").all()]
    compared = "&".join(f"run={run}" for run in runs)
    for path in ("/", f"/run/{runs[0]}", f"/compare?{compared}", "/deployment"):
        page.goto(page.base + path)
        if page.locator(".chart").count():
            page.wait_for_selector(".main-svg")
        assert serious_findings(page) == [], path
        assert not scrolls_sideways(page), path


def test_plotlys_script_is_the_installed_one(page):
    text = page.request.get(page.base + "/static/plotly.js").text()
    assert text == static_file("plotly.js").read_text()
