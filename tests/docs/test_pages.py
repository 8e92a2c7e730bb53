"""What the pages say is there: files that they link, commands and config keys that they show."""

import ast
import itertools
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import flower_adapter
from keel.cli import main as command_line
from keel.deployment import credentials
from protocol import arrays, discrete_gaussian, messages, privacy
from protocol.config import default_config
from server_app import exchange, record, sites
from strategies import validation

repository = Path(__file__).parents[2]
docs = repository / "docs"
root_pages = [
    repository / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
]
pages = root_pages + sorted(docs.rglob("*.md"))
public_pages = [page for page in pages if docs / "development" not in page.parents]
generated = {docs / "reference" / f"{name}.md" for name in ("commands", "methods", "config")}
tutorial_methods = {"feddyn", "fedproto", "fedpull"}


def named(page: Path) -> str:
    return str(page.relative_to(repository))


def prose_of(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages, ids=named)
def test_relative_links_exist(page: Path) -> None:
    targets = re.findall(r'(?:\]\(|src=")([^)\s"]+)', prose_of(page))
    for target in targets:
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found in generated or found.exists(), f"{named(page)} links {target}"
        if anchor and found not in generated:
            assert anchor in headings(found), f"{named(page)} links {target}"


def test_files_that_the_code_mentions_exist() -> None:
    suffixes = {".py", ".yaml", ".toml", ".yml", ""}
    folders = (
        "keel",
        "server_app",
        "client_app",
        "strategies",
        "models",
        "data",
        "protocol",
        "flower_adapter",
        "docker",
    )
    files = [p for folder in folders for p in (repository / folder).rglob("*") if p.is_file()]
    for file in [*files, repository / "Makefile", repository / "pyproject.toml"]:
        if file.suffix in suffixes:
            for name in re.findall(r"docs/[\w/-]+\.md", file.read_text()):
                assert (repository / name).exists(), f"{named(file)} mentions {name}"


def test_tests_that_the_pages_name_exist() -> None:
    defined = {
        name
        for file in (repository / "tests").rglob("*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.M)
    }
    for page in public_pages:
        found = set(re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)`", prose_of(page)))
        assert found <= defined, (named(page), found - defined)


# --- commands -----------------------------------------------------------------------------------


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of every `keel ...` line in the code blocks of a page."""
    for block in re.findall(
        r"^ *```(?:sh|bash|console)?\n(.*?)^ *```", page.read_text(), re.S | re.M
    ):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^([A-Z_]+=\S+ +)*", "", line.strip())  # environment variables
            if line.startswith("keel "):
                yield shlex.split(line, comments=True)[1:]


all_lines = [(named(page), line) for page in public_pages for line in command_lines(page)]


@pytest.mark.parametrize(
    ("page", "words"), all_lines, ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_commands_options_and_keys_are_known(page: str, words: list[str]) -> None:
    name, *rest = words
    if name == "COMMAND":
        return
    assert name in command_line.COMMANDS
    command = command_line.load(name)
    while isinstance(command, click.Group):
        assert rest[0] in command.commands, rest
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert options <= known, (options - known, known)
    if name in ("run", "resume") or "--set" in options:
        keys = [w.partition("=")[0] for w in rest if "=" in w and not w.startswith("--")]
        keys = [
            key for key in keys if key != "KEY" and key.partition(".")[0] not in tutorial_methods
        ]
        assert set(keys) <= default_config().keys()


# --- bounds -------------------------------------------------------------------------------------

MIB, log2 = 2**20, math.log2
MAX_OBJECT = flower_adapter.MAX_OBJECT_BYTES / MIB
RECORD, ARRAY = validation.RECORD_BYTES / MIB, validation.ARRAY_BYTES / 2**10
bounds = {
    "concepts/privacy.md": [
        ("the expected arrays, plus {} KiB for each and {} MiB", ARRAY, RECORD),
        ("each with up to {} MiB of memory", 2 * MAX_OBJECT),
        ("at most {} times the largest of the same array", validation.MAX_VALUE_RATIO),
        ("integer arrays up to 2^{}", log2(arrays.MAX_INTEGER)),
        ("at most 2^{} away from what was sent", log2(validation.MAX_COUNTER_CHANGE)),
        ("| metrics | {}, with names of 1 to 64", messages.MAX_METRICS),
        ("records at most {} loss terms", record.MAX_LOSS_TERMS),
        ("at most 10^{} a class", math.log10(messages.MAX_COUNT)),
        ("also {} times the cohort's median norm", validation.EXTRA_FACTOR),
        ("| roster entry | 2^{} characters", log2(messages.MAX_ROSTER_CHARACTERS)),
        ("device {} characters each", messages.MAX_TEXT),
        ("lists {} entries", messages.MAX_COUNTS),
        ("g is at most sigma / 2^{}", log2(privacy.STEPS_PER_DEVIATION)),
        ("at most clip-norm / (2^{} sqrt(entries))", log2(privacy.STEPS_PER_ENTRY)),
        ("within 2^{} of the exact distribution", log2(discrete_gaussian.SAMPLER_DISTANCE)),
    ],
    "concepts/failures.md": [
        ("costs the round up to {} s", sites.QUERY_S),
        ("it waits {} seconds for all clients", sites.GATHER_S),
    ],
    "concepts/architecture.md": [
        ("again if it returns within {} seconds", exchange.RETURN_S),
    ],
    "how-to/deployment.md": [("will expire within {} days", credentials.min_validity.days)],
}


@pytest.mark.parametrize(("page", "sentences"), bounds.items(), ids=bounds)
def test_bounds_on_the_pages_are_those_of_the_code(
    page: str, sentences: list[tuple[str, float]]
) -> None:
    text = " ".join((docs / page).read_text().split())
    for sentence, *values in sentences:
        assert sentence.format(*(f"{value:,.10g}" for value in values)) in text


# --- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "class_name"),
    [
        ("client_app/method.py", "Method"),
        ("client_app/objective.py", "LocalObjective"),
        ("strategies/average.py", "Average"),
    ],
)
def test_the_reference_shows_every_flag(file: str, class_name: str) -> None:
    """mkdocstrings shows an attribute that a docstring follows."""
    tree = ast.parse((repository / file).read_text())
    [body] = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    flags = [
        (node.target.id, after)
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert flags
    silent = [
        name
        for name, after in flags
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    inherited = ["is_local_objective", "training_keys"]  # Method has their docstrings
    assert silent == [flag for flag in inherited if class_name == "LocalObjective"]
