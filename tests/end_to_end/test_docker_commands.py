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
         for name in ("server", "client")}  # fmt: skip


@lru_cache
def options_of(program):
    command = [f"{sys.prefix}/bin/{program}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return set(re.findall(r"--[a-z-]+", done.stdout))


programs = {
    "supernode": "flower-supernode",
    "executor": "flower-superexec",
    "superlink": "flower-superlink",
}


@pytest.mark.parametrize("name", files)
def test_every_option_is_one_that_its_command_has(name):
    for service in files[name]["services"].values():
        python, option, module, *words = service["command"]
        assert [python, option] == ["python", "-m"]
        if module == "client_app.worker_server":
            assert find_spec(module)
            continue
        assert module == "keel.deployment"
        options = {re.split("[= ]", word)[0] for word in words[1:] if word.startswith("--")}
        assert options <= options_of(programs[words[0]]), words
