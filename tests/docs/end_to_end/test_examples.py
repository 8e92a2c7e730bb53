"""Commands in the pages that are run as they are written, and a table that one of them makes."""

import json
import re
import shlex
from pathlib import Path

import pytest

from keel.cli import main as command_line

repository = Path(__file__).parents[3]
docs = repository / "docs"


def test_the_diagnostics_example_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (docs / "how-to/diagnostics.md").read_text()
    [block] = re.findall(r"<!-- a test runs this -->\n```\n(.*?)```", text, re.S)
    run, diagnose = (shlex.split(line) for line in block.replace("\\\n", " ").splitlines())
    assert command_line.main([*run[1:], "--engine", "inline"]) == 0, capsys.readouterr().err
    [directory] = (home / "runs").iterdir()
    words = [str(directory) if word == "RUN" else word for word in diagnose[1:]]
    assert command_line.main(words) == 0, capsys.readouterr().err
    last = json.loads((directory / "history.jsonl").read_text().splitlines()[-1])
    for measure in re.findall(r"^\| `([a-z-]+)` \|", text, re.M):
        assert measure in last["diagnostics"]
    for place in ("diagnostics", "diagnostics-models"):
        for picture in ("cka.png", "features.png"):
            assert (directory / place / picture).read_bytes().startswith(b"\x89PNG")


def test_the_pages_table_of_methods_is_the_generated_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["methods", "--markdown"]) == 0
    generated = capsys.readouterr().out.strip()
    page = (docs / "how-to/choose-a-method.md").read_text()
    [table] = re.findall(r"with the registries -->\n(.*?)\n<!-- end of the table -->", page, re.S)
    assert table == generated
