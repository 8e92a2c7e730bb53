"""What Keel's patches of SuperLink, SuperNode and SuperExec rest on, in the installed Flower.

A failure here means that Flower changed: read its message, and the patch in flower_adapter.
"""

import errno
import functools
import hashlib
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from source_fixtures import write_newer_app

from flower_adapter import serverapp, superexec, superlink, supernode
from flower_adapter.app_install import install_whole
from flower_adapter.superexec import ForkingExecutor
from protocol.code import code_digest
from protocol.config import app_folder

# What each patch replaces or builds on, and the digest of its source in Flower 1.39.0. On another
# version: read the change and the patch beside it, then note the new digest.
PATCHED = {
    # superlink.py: Redelivery, push_own
    "flwr.server.superlink.fleet.message_handler.message_handler:pull_messages": "63c87f5e7a6ca054",
    "flwr.server.superlink.fleet.message_handler.message_handler:push_messages": "0ff408f15ed2fec2",
    "flwr.server.superlink.fleet.grpc_rere.fleet_servicer:FleetServicer": "06f286588871d2c6",
    # superlink.py: pull_complete_replies, confirm_and_delete, errors_but_expiry
    "flwr.superlink.servicer.runtime.runtime_handlers:pull_messages": "8c998d6d197c09e4",
    "flwr.superlink.servicer.runtime.runtime_handlers:push_messages": "03b2ea647465c032",
    "flwr.superlink.servicer.runtime.runtime_handlers:confirm_message_received": "ff47366421910371",
    "flwr.server.utils.validator:validate_message": "c3328f0cf0b717da",
    # superlink.py: PatientLinkState, task_patience
    "flwr.server.superlink.linkstate.linkstate_factory:LinkStateFactory": "9a019d15600620f0",
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState": "2d7ea6ae59befdd1",
    "flwr.supercore.corestate.sql_corestate:SqlCoreState": "52e08e4359b11ed6",
    # superlink.py: max_request_bytes; objects.py
    "flwr.superlink.cli.flower_superlink": "b5345d2526c9fd7c",
    "flwr.supercore.object_store.sql_object_store:SqlObjectStore": "4c553d469e5fb89c",
    # supernode.py: default_poll_s, arrays_timeout_s, AnsweringNodeState
    "flwr.supernode.start_client_internal": "9e59e28da0c191da",
    "flwr.supercore.inflatable.inflatable_utils": "077b26d921aa8638",
    "flwr.supernode.nodestate.nodestate_factory": "8bed5cbf8d91f4b0",
    "flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState": "1d3429f4ddd8f142",
    # superexec.py: ForkingExecutor, executor_invoker; serverapp.py; app_install.py
    "flwr.supercore.superexec.run_superexec": "c75d36b8bef1b6fb",
    "flwr.supercore.superexec.executor:get_executor": "891abfc53747803d",
    "flwr.supercore.superexec.executor.subprocess_executor:SubprocessExecutor": "9c58435eb28cd789",
    "flwr.supercore.superexec.executor.types": "cabeeee83c44aae3",
    "flwr.supercore.retry": "9e210e6cdb3bff10",
    "flwr.supernode.runtime.run_clientapp": "5dd2e68b89b8e318",
    "flwr.superlink.runtime.run_serverapp": "57f08c24d5d4fd00",
    "flwr.cli.install:install_from_fab": "481bd04cde582322",
    # flower_adapter: bound_pulls, bound_superlink_retries, on_process_exit, begin_task
    "flwr.superlink.grid.http_grid": "0d9d37602a0b37e3",
    "flwr.supercore.exit.exit_handler": "a13675bf24732586",
    "flwr.supercore.task_identity": "5c6b5ac44068f7ca",
    # registration.py
    "flwr.server.superlink.fleet.message_handler.message_handler:activate_node": "e215802302460a91",
    "flwr.supercore.control.control_http_client": "4e17a66697510419",
}


@pytest.mark.parametrize("name", PATCHED)
def test_what_a_patch_rests_on_is_as_in_flower_1_39(name):
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    source = inspect.getsource(getattr(found, attribute) if attribute else found)
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    assert digest == PATCHED[name], f"{name} has changed: read its patch in flower_adapter"


@pytest.fixture
def replaced(monkeypatch):
    """A function that runs the `main` of a process without Flower's; what it replaces, by name."""

    def run(module, flowers):
        made = {}

        def replace(where, name, replacement, expected):
            assert vars(where)[name] is expected, "another one in the installed Flower"
            assert where.__name__ in {each.partition(":")[0] for each in PATCHED}
            made[name] = replacement

        main = functools.wraps(getattr(module, flowers))(lambda: None)
        monkeypatch.setattr(module, flowers, main)
        monkeypatch.setattr(module, "replace", replace)
        module.main()
        return made

    return run


def test_an_executor_waits_for_a_superlink_that_hangs(replaced):
    made = replaced(superexec, "flower_superexec")
    assert isinstance(made["get_executor"](), ForkingExecutor)
    invoker = made["make_simple_http_retry_invoker"]()
    assert not invoker.should_giveup(TimeoutError("the TLS handshake timed out"))


def test_an_executor_says_that_its_secret_is_refused(replaced, monkeypatch, capsys):
    invoker = replaced(superexec, "flower_superexec")["make_simple_http_retry_invoker"]()
    monkeypatch.setattr(os, "kill", lambda *_: None)  # Flower interrupts the process,
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # and waits
    request = httpx.Request("POST", "https://superlink")
    for status, is_secret in ((503, False), (401, True)):
        response = httpx.Response(status, request=request)
        invoker.should_giveup(httpx.HTTPStatusError("", request=request, response=response))
        assert ("--superexec-auth-secret-file" in capsys.readouterr().err) == is_secret


def test_a_supernode_polls_quickly_and_waits_half_a_minute_for_arrays(replaced, monkeypatch):
    made, slept = replaced(supernode, "flower_supernode"), []
    monkeypatch.setattr(time, "sleep", slept.append)
    made["time"].sleep(3.0)
    assert slept == [0.25]
    assert made["pull_objects"].func is pull_objects
    assert made["pull_objects"].keywords == {"max_time": 30.0}


def test_a_serverapp_has_longer_to_start_than_the_superlink_s_30_seconds(monkeypatch):
    events = []
    monkeypatch.setattr(superexec, "server_app_command", lambda spec: ["its command"])
    monkeypatch.setattr(
        superexec,
        "subprocess",
        SimpleNamespace(Popen=lambda c: events.append(c) or SimpleNamespace(pid=7)),
    )
    monkeypatch.setattr(superexec, "send_heartbeat", events.append)
    spec = SimpleNamespace(task_type=TaskType.SERVER_APP, runtime_dependency_install=False)
    ForkingExecutor().launch(spec)
    assert events == [["its command"], spec]


@pytest.mark.parametrize(
    ("module", "flowers"),
    [
        (superexec, "flower_superexec"),
        (superlink, "flower_superlink"),
        (supernode, "flower_supernode"),
        (serverapp, "flwr_serverapp"),
    ],
)
def test_what_a_process_replaces_is_as_in_flower_1_39(replaced, module, flowers):
    assert replaced(module, flowers)


# --- installed apps -------------------------------------------------------------------------------


@pytest.fixture
def fab(tmp_path, monkeypatch):
    """A FAB of a small app; Flower's home is empty."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    app = tmp_path / "app"
    (app / "code").mkdir(parents=True)
    (app / "code" / "server.py").write_text("number = 1\n" * 1000)
    (app / "code" / "client.py").write_text("number = 2\n")
    (app / "LICENSE").write_text("Apache-2.0\n")
    (app / "pyproject.toml").write_text(
        '[project]\nname = "small"\nversion = "1.0.0"\nlicense = {text = "Apache-2.0"}\n'
        '[tool.flwr.app]\npublisher = "someone"\n[tool.flwr.app.components]\n'
        'serverapp = "code.server:app"\nclientapp = "code.client:app"\n'
    )
    return build_fab_from_disk(app)


def contents(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("code/client.py", "number = 3\n"),
        ("code/client.py", None),  # it is removed
        ("json.py", "raise ValueError\n"),
    ],
)
def test_an_app_that_was_poisoned_is_installed_again(file, text, fab):
    path = install_whole(fab)
    whole = contents(path)
    assert "code/client.py" in whole
    (path / file).unlink() if text is None else (path / file).write_text(text)
    assert install_from_fab(fab, skip_prompt=True) == path
    assert contents(path) != whole  # Flower takes it as it is
    assert install_whole(fab) == path
    assert contents(path) == whole


AFTER_INSTALLATION = """
import sys
from flwr.supercore.object_ref import load_app
from flower_adapter import {executor}

def run(*_, **__):  # what Flower's process does with an app
    fab = open(sys.argv[1], "rb").read()
    folder = sys.modules[run.__module__].install_from_fab(fab, skip_prompt=True)
    load_app("client_app.app:app", Exception, folder)
    from protocol.code import code_digest
    print(code_digest())

run.__module__ = {executor}.{replaced}.__module__
{executor}.{called} = run
{start}
"""
IN_EXECUTORS = {
    "ClientApp": {
        "executor": "superexec",
        "replaced": "run_clientapp",
        "called": "run_clientapp",
        "start": "import os; from types import SimpleNamespace; "
        "superexec.run_in_child(SimpleNamespace(parent_pid=os.getppid(), runtime_api_address='', "
        "token='', insecure=True, root_certificates_path=None))",
    },
    "ServerApp": {
        "executor": "serverapp",
        "replaced": "run_serverapp",
        "called": "flwr_serverapp",
        "start": "serverapp.main()",
    },
}


@pytest.mark.end_to_end
def test_a_process_runs_the_run_s_code_and_states_its_digest(tmp_path):
    app = write_newer_app(tmp_path / "other checkout")
    bundle = tmp_path / "app.fab"
    bundle.write_bytes(build_fab_from_disk(app))

    def printed(folder, code, *words):
        env = os.environ | {"PYTHONPATH": str(folder), "FLWR_HOME": str(tmp_path / "flwr")}
        command = [sys.executable, "-P", "-c", code, *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    digest = printed(app, "from protocol.code import code_digest; print(code_digest())")
    assert digest != code_digest()
    for process in IN_EXECUTORS.values():
        script = AFTER_INSTALLATION.format(**process)
        assert printed(app_folder, script, str(bundle)) == digest


def test_an_installation_that_a_full_disk_cuts_short_leaves_nothing(fab, monkeypatch):
    copied = []

    def full(source, target, **_):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_bytes(b"")
        copied.append(target)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", full)
        with pytest.raises(OSError, match="No space"):
            install_whole(fab)
    assert copied
    assert "code/client.py" in contents(install_whole(fab))
