"""The documentation site: it builds without warnings, and loads nothing from another host."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
repository = Path(__file__).parents[3]
loading = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
no_request = {"canonical", "next", "prev"}  # relations of <link> that browsers do not fetch


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(target)],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return target


class Requests(HTMLParser):
    """The addresses that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("rel") not in no_request:
            self.found.append(values.get(loading.get(tag, ""), "") or "")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    html_files = list(site.rglob("*.html"))
    assert len(html_files) > 20
    for page in html_files:
        parser = Requests()
        parser.feed(page.read_text())
        outside = [url for url in parser.found if url.startswith(("http:", "https:", "//"))]
        assert outside == [], page


def test_no_style_sheet_loads_anything_from_another_host(site: Path) -> None:
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert "url(http" not in text, sheet
        assert "@import" not in text, sheet


def test_the_generated_pages_have_their_content(site: Path) -> None:
    for page, word in (
        ("config", "train-fraction"),
        ("methods", "fedcka.mu"),
        ("commands", "keel resume"),
        ("method-api", "without which a client cannot take part again"),  # is_stateful
        ("method-api", "reads the arrays of single replies"),  # needs_updates
    ):
        assert word in (site / "reference" / f"{page}.html").read_text()
