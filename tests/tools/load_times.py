"""Times `keel ui` on run directories, for docs/results/views.md.

python -m tests.tools.load_times DIRECTORY [--run]

Starts the server, opens the table of runs (with --run: then the only run) in Chromium, 1366 x 768,
until the screen is drawn and nothing is loading; with --run, then scrolls through all charts.
Prints the wall time until the screen is drawn, the CPU time of the server and of the page's thread
(on an idle machine the wall time is below their sum), and the server's peak memory.

Playwright traces every request to its caller, for which V8 needs source positions. It would parse
the 4.8 MB of Plotly's script again to find them, which takes 0.5 s that no user waits; an option
makes V8 record them in the first pass.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

BROWSER_ARGS = ["--no-sandbox", "--js-flags=--no-enable-lazy-source-positions"]


def main() -> None:
    """The command line."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--run", action="store_true")
    given = parser.parse_args()
    command = [sys.executable, "-m", "keel", "ui", str(given.directory), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        process = Path(f"/proc/{server.pid}")
        with sync_playwright() as driver:
            chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
            browser = driver.chromium.launch(executable_path=chromium, args=BROWSER_ARGS)
            page = browser.new_page(viewport={"width": 1366, "height": 768})
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})

            def page_seconds() -> float:
                found = session.send("Performance.getMetrics")["metrics"]
                return next(each["value"] for each in found if each["name"] == "TaskDuration")

            page.goto(f"{address.split('/?')[0]}/static/page.css?{address.split('?')[1]}")

            def opened(what: str, path: str, drawn: str = "") -> None:
                server_before, page_before = cpu_seconds(process), page_seconds()
                started = time.perf_counter()
                if path:
                    page.goto(address.split("/?")[0] + path)
                    page_before = 0.0  # counted anew
                if drawn:
                    page.locator(drawn).scroll_into_view_if_needed()
                    page.wait_for_selector(f"{drawn} .main-svg")
                wall = time.perf_counter() - started
                page.wait_for_load_state("networkidle")
                server_s = cpu_seconds(process) - server_before
                page_s = page_seconds() - page_before
                print(
                    f"{what}: {wall:.2f} s; CPU time: server {server_s:.2f} s, page {page_s:.2f} s"
                )

            for visit in ("first", "again"):
                opened(f"{visit}, table of runs", "/")
                if given.run:
                    link = page.locator("td.name a").first.get_attribute("href")
                    opened(f"{visit}, the run", link, "[data-chart=loss]")
                    for chart in page.locator(".panel:not([hidden]) .chart").all():
                        name = chart.get_attribute("data-chart")
                        opened(f"{visit}, {name}", "", f"[data-chart={name}]")
            browser.close()
        status = (process / "status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        print(
            f"peak memory of the server {int(peak) / 1024:.0f} MiB; load {os.getloadavg()[0]:.1f}"
        )
    finally:
        server.terminate()


def cpu_seconds(process: Path) -> float:
    """User and system time of a process so far."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
