"""The commands of docs/how-to/deployment.md that back up and restore, as they are written there.

`docker` here runs a container's command on this machine, with a directory in place of its volume.
"""

import os
import shutil
import subprocess
import sys

import pytest
from deployment_fixtures import documented_commands

pytestmark = pytest.mark.skipif(not shutil.which("gzip"), reason="there is no gzip here")
SERVER = [f"keel-server_{name}" for name in ("superlink", "registry", "runs")]
SITE = "keel-site-a_client"
DOCKER = """
import os, sys
if sys.argv[1:3] == ["volume", "inspect"]:
    sys.exit(not os.path.isdir("volumes/" + sys.argv[3]))
assert sys.argv[1] == "run"
[volume] = [w.removesuffix(":ro") for w in sys.argv if ":/volume" in w]
folder = os.path.abspath("volumes/" + volume.removesuffix(":/volume"))
os.makedirs(folder, exist_ok=True)  # as Docker does
at = sys.argv.index("keel")  # the image, whose own entrypoint writes a banner, as NVIDIA's do
command = [w.replace("/volume", folder) for w in sys.argv[at + 1:]]
if "--entrypoint" in sys.argv:
    command.insert(0, sys.argv[sys.argv.index("--entrypoint") + 1])
else:
    print("banner", flush=True)
os.execvp(command[0], command)
"""


@pytest.fixture
def machine(tmp_path):
    """(A directory with volumes and credentials, a function that runs commands there)."""
    (tmp_path / "bin").mkdir()
    for name, text in {"make": "#!/bin/sh\n", "docker": f"#!{sys.executable}\n{DOCKER}"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("ca", "server"):
        (tmp_path / "credentials" / name).mkdir(parents=True)
        (tmp_path / "credentials" / name / "key").write_text(name)
    for volume in (*SERVER, SITE):
        write(tmp_path / "volumes" / volume, "old")

    def run(commands):
        env = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", "-c", commands], cwd=tmp_path, env=env, text=True, timeout=60, check=False,
            capture_output=True,
        )  # fmt: skip
        return [line for line in done.stdout.splitlines() if line != "banner"]

    return tmp_path, run


def write(folder, content):
    for name in ("superlink.db", "superlink.db-wal", ".hidden/x", f"keel/clients/run/{content}",
                 "keel/privacy/ledger.jsonl", "keel/cache/images"):  # fmt: skip
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o600)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): (p.read_text(), p.stat().st_mode) for p in files}


def of_site(commands):
    return commands.replace(" ".join(SERVER), SITE)


def test_what_is_restored_is_what_was_backed_up_and_nothing_else(machine):
    folder, run = machine
    before = contents(folder / "volumes" / SERVER[0])
    assert run(documented_commands("NOT BACKED UP")) == []
    assert (folder / "backup").stat().st_mode & 0o777 == 0o700
    assert contents(folder / "backup/server") == contents(folder / "credentials/server")
    write(folder / "volumes" / SERVER[0], "new")
    shutil.rmtree(folder / "volumes" / SERVER[1])
    assert run(documented_commands("NOT RESTORED")) == []
    for volume in SERVER:
        assert contents(folder / "volumes" / volume) == {
            name: about for name, about in before.items() if not name.startswith("keel/cache")
        }


def test_a_volume_whose_name_is_misspelt_is_named(machine):
    folder, run = machine
    commands = documented_commands("NOT BACKED UP").replace("server_runs", "server_run")
    assert run(commands) == ["keel-server_run: NOT BACKED UP"]
    assert not (folder / "volumes/keel-server_run").exists()


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_archive_changes_nothing_and_is_named(machine, damage):
    folder, run = machine
    commands = documented_commands("NOT BACKED UP")
    run(commands + of_site(commands))
    for volume in (SERVER[2], SITE):
        write(folder / "volumes" / volume, "new")
        archive = folder / "backup" / f"{volume}.tar.gz"
        if damage == "missing":
            archive.unlink()
        else:
            archive.write_bytes(archive.read_bytes()[:-20])
    now = contents(folder / "volumes" / SITE)
    lines = run(documented_commands("NOT RESTORED"))
    assert lines == [f"{SERVER[2]}: NOT RESTORED"]
    run(documented_commands("xz ./keel/clients"))
    assert contents(folder / "volumes" / SERVER[2]) == contents(folder / "volumes" / SITE) == now


def test_a_site_s_state_is_restored_without_its_record_of_the_budget(machine):
    folder, run = machine
    assert run(of_site(documented_commands("NOT BACKED UP"))) == []
    write(folder / "volumes" / SITE, "new")
    run(documented_commands("xz ./keel/clients"))
    found = {name: content for name, (content, _) in contents(folder / "volumes" / SITE).items()}
    assert found["keel/privacy/ledger.jsonl"] == "new"
    assert found["keel/clients/run/old"] == "old"
    assert "keel/clients/run/new" not in found
