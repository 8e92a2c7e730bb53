"""keel new-method writes files that pass the checks, and nothing where it refuses."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from source_fixtures import copy_keel

from keel.cli import new_method
from keel.cli.main import main
from keel.cli.new_method import named, with_table


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of Keel to write methods in."""
    copy = copy_keel(tmp_path_factory.mktemp("checkout"))
    (copy / "tests").mkdir()
    return copy


def test_the_source_takes_the_place_of_its_placeholders():
    [path] = [p for p in new_method.method_files("fedpull", False) if p.parent.name == "methods"
              and p.parent.parent.name == "client_app"]  # fmt: skip
    without = new_method.method_files("fedpull", False)[path]
    assert all(each in without for each in new_method.placeholders())
    text = new_method.method_files("fedpull", False, "Ada et al. 1843 (FedPull)")[path]
    assert 'paper: ClassVar[str] = "Ada et al. 1843 (FedPull)"' in text
    assert "Source: Ada et al. 1843 (FedPull). Equation numbers" in text
    assert "<" not in text
    with pytest.raises(ValueError, match=r"--paper .*expected at most 60 characters"):
        new_method.method_files("fedpull", False, 'say "x"')


@pytest.mark.parametrize(
    "name",
    [
        *["fedprox", "fedavgm", "privacy", "average", "server-optimizers"],
        *["Fed", "fed_pull", "1fed", "class", "fed-", "../x"],
    ],
)
def test_taken_and_bad_names_are_refused_and_nothing_is_written(
    checkout, name, monkeypatch, capsys
):
    monkeypatch.setattr(new_method, "app_folder", checkout)
    before = {path: path.stat().st_mtime_ns for path in checkout.rglob("*.py")}
    config = (checkout / "pyproject.toml").read_bytes()
    assert main(["new-method", name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert (checkout / "pyproject.toml").read_bytes() == config
    assert {path: path.stat().st_mtime_ns for path in checkout.rglob("*.py")} == before


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_table_at_the_end_of_the_file_is_followed_by_the_new_one(end):
    before = f"[tool.flwr.app.config]\na = 1\n\n[tool.flwr.app.config.feddyn]\nalpha = 0.1{end}"
    table = new_method.named(new_method.TABLE, "fed-pull")
    found = tomllib.loads(new_method.with_table(before, table))["tool"]["flwr"]["app"]["config"]
    assert found == {"a": 1, "feddyn": {"alpha": 0.1}, "fed-pull": {"mu": 0.1}}


def test_a_word_of_python_is_refused_as_such(refusal):
    line = "error: 'class' is a keyword of Python: choose another name, such as fed-class\n"
    assert refusal("new-method", "class") == line
    assert "expected a lower-case letter, then" in refusal("new-method", "1fed")


def test_a_wheel_is_no_place_for_new_methods(monkeypatch, tmp_path):
    monkeypatch.setattr(new_method, "app_folder", tmp_path)
    with pytest.raises(ValueError, match="not a checkout"):
        new_method.method_files("fedpull", False)


def test_names_of_files_and_classes():
    template = "FedNew fednew fed-new"
    assert named(template, "fedpull") == "FedPull fedpull fedpull"
    assert named(template, "pull-hard") == "PullHard pull_hard pull-hard"


def test_the_table_follows_the_last_one():
    text = "[tool.x]\na = 1\n\n[tool.flwr.app.config.last]\nb = 2\n\n# ---\n[tool.ruff]\nc = 3\n"
    changed = with_table(text, "\n[tool.flwr.app.config.new]\nd = 4\n")
    config = tomllib.loads(changed)["tool"]
    assert config["flwr"]["app"]["config"] == {"last": {"b": 2}, "new": {"d": 4}}
    assert config["ruff"] == {"c": 3}


@pytest.mark.parametrize(
    ("folder", "use"),
    [
        ("client_app/methods", "from client_app.methods import method_class as use"),
        (
            "strategies",
            "from client_app.methods import method_class; from strategies import server_half; "
            "use = lambda name: server_half(method_class(name))",
        ),
    ],
)
def test_a_method_whose_file_is_broken_stops_no_other(checkout, folder, use):
    method = checkout / "client_app" / "methods" / "broken.py"
    shutil.copy(method.with_name("scaffold.py"), method)
    broken = checkout / folder / "broken.py"
    broken.write_text("class Broken(\n")
    try:
        found = subprocess.run(
            [sys.executable, "-c", f"{use}; print(use('scaffold').__name__); use('broken')"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        method.unlink()
        broken.unlink(missing_ok=True)
    assert found.returncode == 1
    assert found.stdout.startswith("Scaffold")
    assert f"{folder}/broken.py:1: " in found.stderr


def test_it_says_where_the_files_are_and_what_is_next(checkout, monkeypatch, printed, tmp_path):
    monkeypatch.setattr(new_method, "app_folder", checkout)
    monkeypatch.chdir(tmp_path)
    lines = printed("new-method", "fed-where").splitlines()
    assert lines[0] == str(checkout / "client_app" / "methods" / "fed_where.py")
    assert lines[-1].endswith("`keel check-method fed-where`")
    monkeypatch.chdir(checkout)
    assert printed("new-method", "fed-here").startswith("client_app/methods/fed_here.py\n")
