"""Screenshots of the pages of `keel ui` and of a report, for docs/results/views.md.

python -m tools.screenshots RUNS REPORT.html DIRECTORY

Takes each page at two widths, light and dark, as PNGs of 256 colours. Needs the extra `browser`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

WIDTHS, HEIGHTS = (1366, 390), (900, 844)
SCHEMES = ("light", "dark")
NUM_COLOURS = 256
SEEDS = "tr:has(td.name:has-text('seed')) input"  # the runs that are compared


def take(page: Any, path: Path, full_page: bool) -> None:
    """Save what the page shows, with few colours."""
    page.wait_for_timeout(1200)  # everything has been loaded
    page.evaluate("typeof waiting === 'object' && [...waiting.keys()].forEach(drawWaiting)")
    page.wait_for_timeout(300)
    page.screenshot(path=path, full_page=full_page)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(
            NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(path, optimize=True)


def visit(page: Any, base: str, runs: list[str], name: str) -> bool:
    """Open a page by its name; whether all of it is shown, and not the first screen only."""
    if name == "compare":
        page.goto(f"{base}/compare?{'&'.join(f'run={run}' for run in runs)}")
        page.wait_for_selector(".main-svg")
    elif name == "run":
        page.goto(base)
        page.get_by_role("link", name="fedrep-personal", exact=True).click()
        page.wait_for_selector(".main-svg")
        return True
    else:
        page.goto(base)
    return False


def main() -> None:
    """The command line."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "keel", "ui", str(given.runs), "--port", "0"]
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for width, height in zip(WIDTHS, HEIGHTS, strict=True):
                for scheme in SCHEMES:
                    size: Any = {"width": width, "height": height}
                    page = browser.new_page(viewport=size, color_scheme=scheme)
                    page.goto(address)
                    runs = [box.get_attribute("value") for box in page.locator(SEEDS).all()]
                    for name in ("runs", "run", "compare"):
                        whole = visit(page, address.split("/?")[0], runs, name)
                        take(page, given.directory / f"{name}-{width}-{scheme}.png", whole)
                    page.goto(given.report.absolute().as_uri())
                    take(page, given.directory / f"report-{width}-{scheme}.png", False)
                    page.evaluate(
                        "document.querySelector('table.numbers').closest('section').scrollIntoView()"
                    )
                    take(page, given.directory / f"table-{width}-{scheme}.png", False)
                    page.close()
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
