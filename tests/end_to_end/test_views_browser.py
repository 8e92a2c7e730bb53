"""The pages of `keel ui` in Chromium, over HTTP, as a person uses them."""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
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

from tests.tools.run_directories import append_round, line_of, make_run

pytestmark = in_chromium
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with three seeds, an interrupted run, one with clients by name, and two bad."""
    base = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "moon"):
        for seed in range(3):
            keys = {"method": method, "seed": seed, "source": "digits"}
            make_run(base / f"{method}-{seed}", keys, 20)
    make_run(base / "live", {"method": "fedintr"}, 10, num_written=2, status="running")
    clients = [f"site-{letter}" for letter in "abcdefgh"]
    make_run(base / "clients", {"method": "fedcka", "lr": 0.3}, 10, clients)
    hostile = make_run(base / HOSTILE.replace("/", ""), {"model": HOSTILE}, 3, [HOSTILE, "b"])
    (hostile / "run.log").write_text(HOSTILE)
    half = make_run(
        base / "half-written", {"method": "fedprox"}, 3, num_written=1, status="running"
    )
    with (half / "history.jsonl").open("a") as file:
        file.write('{"round": 2, "los')
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
    return [cell.inner_text() for cell in page.locator("tr:not([hidden]) td.name a").all()]


def open_run(page: Any, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()
    page.wait_for_selector("[data-chart=accuracy] .main-svg")


def open_comparison(page: Any, *runs: str) -> None:
    for name in runs:
        page.get_by_label(f"Select {name}", exact=True).check()
    page.click("#compare")
    page.wait_for_selector("[data-chart=compare] .main-svg")


def traces(page: Any, chart: str) -> list[dict[str, Any]]:
    found = page.evaluate(f"document.querySelector('[data-chart={chart}]').data")
    return [trace for trace in found if trace.get("showlegend") is not False]


# --- the guard and escaping ----------------------------------------------------------------------


def test_only_who_opened_the_link_sees_the_pages(page):
    assert "token" not in page.url
    assert page.evaluate("document.cookie") == ""  # no script reads it
    other = page.context.browser.new_context().new_page()
    assert other.goto(page.base).status == 403
    other.context.close()


def test_another_host_name_and_another_site_are_refused(page):
    port = page.base.rpartition(":")[2]
    rebound = page.context.browser.browser_type.launch(
        executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"),
        args=["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"],
    )
    other = rebound.new_page()
    assert other.goto(f"http://evil.example:{port}/").status == 403
    rebound.close()
    foreign = {"origin": "http://evil.example"}  # with the cookie of this context
    assert page.request.get(f"{page.base}/rows", headers=foreign).status == 403
    assert page.request.get(f"{page.base}/rows").status == 200


def test_hostile_names_and_half_written_runs_are_shown(page):
    hostile = next(name for name in names(page) if "onerror" in name)
    for name in (hostile, "half-written"):
        open_run(page, name)
        assert page.inner_text("h1") == name
        page.wait_for_selector(".log")
        page.go_back()
    open_comparison(page, hostile, "half-written")
    assert page.locator("main img").count() == 0
    assert page.title() == "Compare · Keel"


def test_a_page_whose_token_is_old_says_what_to_do(browser, address):  # noqa: F811
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    context.clear_cookies()
    page.locator("#link", has_text="refused: open the new link of keel ui").wait_for(timeout=9000)
    context.close()


# --- runs ----------------------------------------------------------------------------------------


def test_a_heading_sorts_by_its_numbers_and_the_filter_leaves_rows_that_have_all_words(page):
    heading = page.get_by_role("columnheader", name="accuracy")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    shown = [float(cell.inner_text()) for cell in page.locator("tbody td:nth-child(9)").all()]
    assert shown == sorted(shown, reverse=True)
    page.fill("#filter", "MOON digits")
    assert sorted(names(page)) == ["moon-0", "moon-1", "moon-2"]
    assert page.inner_text("#count") == "3 of 10"
    page.fill("#filter", "nothing like this")
    assert page.locator("#empty").is_visible()


def test_the_same_runs_are_selected_after_back(page, base):
    chosen = {"fedavg-1", "moon-2"}
    open_comparison(page, *chosen)
    os.utime(base / "moon-0" / "history.jsonl")  # now the first row
    page.go_back()
    page.wait_for_selector("#compare:enabled")
    boxes = page.locator("tbody input:checked").all()
    assert {box.get_attribute("aria-label") for box in boxes} == {f"Select {c}" for c in chosen}


# --- compare -------------------------------------------------------------------------------------


def test_seeds_become_one_curve_with_a_band_and_a_value_under_the_mouse(page):
    page.get_by_label("Select fedavg-0", exact=True).check()
    page.click("#seeds")
    assert page.inner_text("#count") == "10 of 10, 3 selected"
    open_comparison(page, "moon-0", "moon-1")
    assert [trace["name"] for trace in traces(page, "compare")] == ["fedavg", "moon"]
    assert page.locator("#results tbody tr").count() == 2
    assert page.inner_text("#differences tbody th") == "method"
    box = page.locator("[data-chart=compare] .nsewdrag").bounding_box()
    for offset in (0, 3):
        page.mouse.move(box["x"] + box["width"] / 2 + offset, box["y"] + box["height"] / 2)
    page.wait_for_selector("[data-chart=compare] .hoverlayer text", state="attached")
    assert "(3 of 3 seeds)" in page.locator("[data-chart=compare] .hoverlayer").text_content()


def test_axis_smoothing_and_curve_change_the_chart_and_the_address(page):
    open_comparison(page, "fedavg-0", "moon-0")
    before = traces(page, "compare")[0]
    page.select_option("[name=x]", "MB")
    page.check("[name=logx]")
    page.locator("[name=smooth]").fill("0.9")
    chart = "document.querySelector('[data-chart=compare]')"
    page.wait_for_function(f"() => {chart}.layout.xaxis.type === 'log'")
    page.wait_for_function(f"() => {chart}.data[0].y[9] !== {before['y'][9]}")
    assert traces(page, "compare")[0]["x"][:2] == pytest.approx([1.9, 3.8])
    assert "x=MB" in page.url
    page.select_option("[name=curve]", "losses/contrastive")
    page.wait_for_function(f"() => {chart}.layout.yaxis.title.text === 'loss'")
    page.reload()
    page.wait_for_selector("[data-chart=compare] .main-svg")
    assert page.input_value("[name=curve]") == "losses/contrastive"
    page.check("[name=single]")
    legend = page.locator("[data-chart=compare] .legendtext")
    legend.filter(has_text="fedavg, fedavg-0").wait_for()


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


# --- a run ---------------------------------------------------------------------------------------


def test_a_run_shows_who_is_served_badly_and_is_printed_whole(page):
    page.set_viewport_size({"width": 390, "height": 844})
    open_run(page, "clients")
    drawn, shown = "[data-chart] .main-svg:first-child", ".panel:not([hidden]) [data-chart]"
    assert 0 < page.locator(drawn).count() < page.locator(shown).count()
    page.pdf()
    assert page.locator(drawn).count() == page.locator(shown).count()
    heat = page.evaluate("document.querySelector('[data-chart=clients-local_global]').data[0]")
    last = [row[-1] for row in heat["z"]]
    assert len(heat["y"]) == 8
    assert last == sorted(last)


def test_a_page_follows_a_run_and_keeps_what_a_viewer_chose(page, base):
    run = make_run(base / "followed", {"method": "fedavg", "lr": 0.7}, 10, num_written=4)
    (run / "summary.json").write_text('{"status": "stopped"}')
    page.reload()
    open_run(page, "followed")
    page.locator("[data-chart=loss] .legendtoggle").first.click()
    hidden = "() => document.querySelector('[data-chart=loss]').data[0].visible === 'legendonly'"
    page.wait_for_function(hidden)
    page.get_by_text("Log, last").click()
    append_round(run, line_of(5, Random(5)))
    for chart in ("accuracy", "loss"):
        page.wait_for_function(
            "name => document.querySelector(`[data-chart=${name}]`).data[0].x.length === 5",
            arg=chart,
        )
    assert page.evaluate(hidden)
    assert not page.locator(".log").is_visible()
    shutil.rmtree(run)


# --- every page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_finding_of_axe_or_scrolls_sideways(page, width, scheme):
    page.set_viewport_size({"width": width, "height": SIZES[width]})
    page.emulate_media(color_scheme=scheme)
    runs = [box.get_attribute("value") for box in page.locator("tbody input").all()]
    compared = "&".join(f"run={run}" for run in runs)
    for path in ("/", f"/run/{runs[0]}", f"/compare?{compared}"):
        page.goto(page.base + path)
        if page.locator(".chart").count():
            page.wait_for_selector(".main-svg")
        assert serious_findings(page) == [], path
        assert not scrolls_sideways(page), path


@pytest.mark.parametrize("width", [1366, 800])
def test_a_smaller_window_leaves_columns_out_and_cuts_none_off(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    box = page.locator("#runs").locator("xpath=..")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert page.get_by_role("columnheader", name="accuracy (%)").is_visible()
    assert page.get_by_role("columnheader", name="split").is_visible() == (width > 1100)
    assert page.locator("tbody", has_text="interrupted").is_visible()


def test_without_javascript_a_page_is_not_called_live(page):
    page.locator("#link", has_text="live").wait_for()
    context = page.context.browser.new_context(
        storage_state=page.context.storage_state(), java_script_enabled=False
    )
    other = context.new_page()
    other.goto(page.base)
    assert "live" not in other.inner_text("header")
    assert other.locator("noscript p").is_visible()
    context.close()
