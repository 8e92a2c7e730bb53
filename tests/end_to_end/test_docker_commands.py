"""The commands in the compose files have the options that these give them."""

import re
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec

import pytest
import yaml

from protocol.config import app_folder

docker = app_folder / "docker"
files = {name: yaml.safe_load((docker / f"compose.{name}.yml").read_text())
         for name in ("server", "client", "local")}  # fmt: skip


@lru_cache
def options_of(program):
    command = [f"{sys.prefix}/bin/{program}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return set(re.findall(r"--[a-z-]+", done.stdout))


programs = {
    "keel.deployment.supernode": "flower-supernode",
    "keel.deployment.executor": "flower-superexec",
    "keel.deployment.superlink_server": "flower-superlink",
}


@pytest.mark.parametrize("name", files)
def test_every_option_is_one_that_its_command_has(name):
    used: dict[str, set[str]] = {}
    for service in files[name]["services"].values():
        words = [*service.get("entrypoint", []), *service["command"]]
        if words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), words[2]
            if words[2] not in programs:
                assert words[2:] == ["client_app.worker_server"]
                continue
            words = [programs[words[2]], *words[3:]]
        options = {re.split("[= ]", w)[0] for w in words[1:] if w.startswith("--")}
        used.setdefault(words[0], set()).update(options)
    for program, options in used.items():
        assert options <= options_of(program), program
