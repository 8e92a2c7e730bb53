"""The report in Chromium, opened as a file, as a person reads it."""

import base64
import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
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

from keel.experiments.report import write_report
from tests.tools.run_directories import make_table

pytestmark = in_chromium
ROOT = Path(__file__).parent.parent.parent
DARK_BACKGROUND, LIGHT_BACKGROUND = "rgb(13, 17, 23)", "rgb(255, 255, 255)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedRCL's Table 1 in part, with a row that diverged, a sweep, and pictures of splits."""
    output = tmp_path_factory.mktemp("report")
    names = ["FedAvg", "MOON", "FedRCL", "CIFAR-10"]
    make_table(output, "fedrcl-table-1", names, diverging=["MOON"])
    make_table(output, str(ROOT / "docs" / "sweep.yaml"), seeds=2)
    make_table(output, "fedintr-figure-3", changes={"source": "digits"})
    return write_report(output)[0]


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:  # noqa: F811
    """The report; errors in the console and any other request fail the test."""
    context = browser.new_context(viewport={"width": 1366, "height": 900})
    page = context.new_page()
    faults = faults_of(page, (report.as_uri(), "data:", "blob:"))
    page.goto(report.as_uri())
    yield page
    context.close()
    assert faults == []


@pytest.fixture
def table(page: Any) -> Any:
    """FedRCL's table."""
    return page.locator("table.numbers").first


def test_claims_are_on_the_first_screen_and_tables_follow(page, table):
    claims = page.locator("table.claims").first.bounding_box()
    assert claims["y"] < 300
    assert claims["y"] < table.bounding_box()["y"]
    verdicts = page.locator("#claims td:nth-child(2)").all_inner_texts()
    assert verdicts
    assert all(re.match("holds|opposite|ahead|behind|undecided|not tested", v) for v in verdicts)


@pytest.mark.parametrize("width", SIZES)
def test_a_wide_table_scrolls_inside_itself_under_its_first_column(page, table, width):
    page.set_viewport_size({"width": width, "height": SIZES[width]})
    box = table.locator("xpath=..")
    assert not scrolls_sideways(page)
    assert box.evaluate("box => box.scrollWidth > box.clientWidth") or width == 1366
    first = table.locator("tbody th").first
    before = first.bounding_box()["x"]
    moved = box.evaluate("box => { box.scrollLeft = 200; return box.scrollLeft }")
    assert moved > 100 or width == 1366
    assert first.bounding_box()["x"] == before
    assert box.evaluate("box => box.getBoundingClientRect().right <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_light_and_dark_have_no_serious_finding_of_axe(page, width, scheme):
    page.set_viewport_size({"width": width, "height": SIZES[width]})
    page.emulate_media(color_scheme=scheme)
    page.locator("[data-figure]").first.scroll_into_view_if_needed()
    page.wait_for_selector(".main-svg")
    expected = DARK_BACKGROUND if scheme == "dark" else LIGHT_BACKGROUND
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == expected
    layout = page.evaluate("document.querySelector('.js-plotly-plot').layout.paper_bgcolor")
    assert layout == ("#0d1117" if scheme == "dark" else "#ffffff")
    assert serious_findings(page) == []


def test_a_chart_shows_the_value_under_the_mouse_and_fits_its_data(page):
    chart = page.locator("[data-figure]").first
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for()
    box = chart.locator(".nsewdrag").bounding_box()
    for offset in (0, 3):
        page.mouse.move(box["x"] + box["width"] / 2 + offset, box["y"] + box["height"] / 2)
    chart.locator(".hoverlayer text").first.wait_for(state="attached")
    text = chart.locator(".hoverlayer").text_content()
    assert re.search(r"FedRCL : \d+\.\d+ ± \d+\.\d+ \(3 seeds\)", text)
    low, high = chart.evaluate("chart => chart.layout.yaxis.range")
    shown = chart.evaluate("chart => chart.data.flatMap(trace => trace.y)")
    assert low <= min(shown)
    assert high >= max(shown)
    assert high - low < 1.25 * (max(shown) - min(shown))


def test_the_papers_numbers_differences_and_deviations_are_shown_on_demand(page, table):
    paper, sd = table.locator(".paper").first, table.locator(".sd").first
    difference = table.locator(".difference").first
    assert paper.is_visible()
    assert sd.is_visible()
    assert not difference.is_visible()
    page.get_by_label("difference").first.check()
    page.get_by_label("paper's number").first.uncheck()
    page.get_by_label("± sd").first.uncheck()
    assert difference.is_visible()
    assert not paper.is_visible()
    assert not sd.is_visible()


def test_links_hold_the_numbers_of_the_table(page, table):
    shown = [float(cell.get_attribute("data-value")) for cell in table.locator("tbody td").all()]
    texts = {}
    for kind in ("csv", "tex"):
        link = page.locator(f"a[download$='.{kind}']").first
        texts[kind] = base64.b64decode(link.get_attribute("href").partition(",")[2]).decode()
    rows = csv.DictReader(io.StringIO(texts["csv"]))
    assert sorted(float(row["mean"]) for row in rows) == pytest.approx(sorted(shown))
    assert r"\toprule" in texts["tex"]
    assert all(f"{value:.2f}" in texts["tex"] for value in shown)
    with page.expect_download() as download:
        page.locator("a[download$='.csv']").first.click()
    assert Path(download.value.path()).read_bytes() == texts["csv"].encode()


def test_a_heading_sorts_the_table(table):
    heads = table.locator("thead tr").last.locator("th")
    heads.nth(1).get_by_role("button").click()
    column = table.locator("tbody td:nth-child(2)").all()
    values = [float(cell.get_attribute("data-value")) for cell in column]
    assert values == sorted(values, reverse=True)


def test_print_shows_every_chart_and_picture_dark_on_white_and_cuts_no_table(page):
    page.emulate_media(color_scheme="dark")
    page.evaluate("""addEventListener("beforeprint", () => {
        window.printed = {
            charts: document.querySelectorAll("[data-figure] .main-svg:first-child").length,
            pictures: [...document.images].filter(image => image.complete).length,
            background: getComputedStyle(document.body).backgroundColor,
        };
    })""")
    page.pdf(print_background=True)
    printed = page.evaluate("printed")
    assert printed["charts"] == page.locator("[data-figure]").count() > 0
    assert printed["pictures"] == page.locator("img").count() > 0
    assert printed["background"] == LIGHT_BACKGROUND
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1030, "height": 700})
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    widths = page.locator(".wide table").evaluate_all(
        "found => found.map(each => each.getBoundingClientRect().right)"
    )
    assert max(widths) <= 1035
    assert not page.locator("nav").is_visible()
