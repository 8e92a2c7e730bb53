"""Times `keel ui` on run directories, for docs/results/views.md.

python -m tests.tools.load_times DIRECTORY [--run]

Starts the server, opens the table of runs (with --run: the only run, with its clients' charts) in
Chromium until everything is drawn, and prints wall time, the CPU time of the server and of the
page's thread (on an idle machine their sum is about the wall time), and the server's peak memory.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


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
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})

            def page_seconds() -> float:
                found = session.send("Performance.getMetrics")["metrics"]
                return next(each["value"] for each in found if each["name"] == "TaskDuration")

            page.goto(f"{address.split('/?')[0]}/static/page.css?{address.split('?')[1]}")
            for visit in ("first", "again"):
                before = cpu_seconds(process)
                started = time.perf_counter()
                page.goto(address.split("/?")[0])
                table = time.perf_counter() - started
                print(f"{visit}: table of runs {table:.2f} s", end="")
                if given.run:
                    link = page.locator("td.name a").first.get_attribute("href")
                    started = time.perf_counter()
                    page.goto(address.split("/?")[0] + link)
                    page.wait_for_selector("[data-chart=accuracy] .main-svg")
                    curves = time.perf_counter() - started
                    page.wait_for_selector("[data-chart=clients-local_global] .main-svg")
                    clients = time.perf_counter() - started
                    print(f", the run's curves {curves:.2f} s, clients {clients:.2f} s", end="")
                print(f", CPU time: server {cpu_seconds(process) - before:.2f} s", end="")
                print(f", page {page_seconds():.2f} s")
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
