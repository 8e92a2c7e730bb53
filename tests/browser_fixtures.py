"""Chromium for the tests that look at pages as a person does; else these tests skip.

Needs Chromium (Debian's package, or $CHROMIUM) and the extra `browser`.
"""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
SIZES = {1366: 900, 390: 844}  # of a laptop and of a phone
in_chromium = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def faults_of(page: Any, own: tuple[str, ...]) -> list[str]:
    """Filled from now on: errors in the console, and requests to addresses that are not `own`."""
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith(own) else faults.append(r.url))
    return faults


def serious_findings(page: Any) -> list[tuple[str, str]]:
    """(rule, element) of axe-core's serious and critical findings."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    return [
        (each["id"], each["nodes"][0]["html"][:200])
        for each in axe.Axe().run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def scrolls_sideways(page: Any) -> bool:
    """Whether the page as a whole is wider than the window."""
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))
