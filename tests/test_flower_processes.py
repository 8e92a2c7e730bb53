"""What Keel's patches of SuperLink, SuperNode and SuperExec rest on, in the installed Flower.

A failure here means that Flower changed: read its message, and the patch in flower_adapter.
"""

import ast
import dataclasses
import errno
import functools
import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import flwr.supernode.start_client_internal as client_loop
import httpx
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from flwr.server.superlink.fleet.grpc_rere import fleet_servicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.supercore.constant import TaskType
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.exit import exit_handler
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.superlink import main
from flwr.superlink.servicer.runtime import runtime_handlers
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.runtime.run_clientapp import run_clientapp
from source_fixtures import imports_of, write_newer_app

import flower_adapter.superexec as superexec
import flower_adapter.supernode as supernode
from flower_adapter.app_install import install_whole
from flower_adapter.superexec import ForkingExecutor
from protocol.code import code_digest
from protocol.config import app_folder

packages = (
    "client_app",
    "data",
    "flower_adapter",
    "keel",
    "models",
    "protocol",
    "server_app",
    "strategies",
)
public = ("flwr.app", "flwr.serverapp", "flwr.clientapp")  # and what lies below them


def parameters(function):
    return set(inspect.signature(function).parameters)


def calls(module, name):
    """How often a module's source calls this dotted name."""
    tree = ast.parse(inspect.getsource(module))
    found = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return found.count(name)


def test_no_other_module_imports_flowers_internals():
    strangers = []
    for package in packages:
        for path in sorted((app_folder / package).rglob("*.py")):
            if (app_folder / "flower_adapter") in path.parents:
                continue
            for node in imports_of(path):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    names = [str(node.module)]
                strangers += [
                    f"{path.relative_to(app_folder)}: {name}"
                    for name in names
                    if name.startswith("flwr.") and not name.startswith(public)
                    if name != "flwr.simulation"  # public, but not what lies below it
                ]
    assert strangers == [], "import these through flower_adapter"


def test_superlink():
    for name in ("pull_messages", "push_messages"):
        assert calls(fleet_servicer, f"message_handler.{name}") == 1
    assert parameters(message_handler.pull_messages) == {"request", "state", "store"}
    assert parameters(message_handler.push_messages) == {"request", "state"}
    assert main._RUNTIME_HANDLERS is runtime_handlers, "the module that is patched"
    for name in ("pull_messages", "confirm_message_received"):
        assert parameters(getattr(runtime_handlers, name)) == {"request", "state", "task"}
    assert calls(runtime_handlers, "state.delete_messages") == 2  # the second: a reply's own id
    assert calls(runtime_handlers, "state.get_message_res") == 1
    columns = set(MessageIns.__table__.columns.keys())
    used = {"message_id", "run_id", "dst_node_id", "delivered_at", "created_at", "ttl"}
    assert used <= columns, "columns of Flower's table of messages"
    assert "reply_to_message_id" in MessageRes.__table__.columns


def test_supernode():
    assert calls(client_loop, "time.sleep") == 3, "waits that $KEEL_POLL_S shortens"
    assert calls(client_loop, "pull_objects") == 1
    state = InMemoryNodeState(InMemoryObjectStore())
    for name in ("lock_msg_store", "msg_store", "object_store", "time_store"):
        assert hasattr(state, name), f"InMemoryNodeState.{name}"
    for name in ("_store_error_replies", "delete_messages"):
        assert hasattr(state, name), f"InMemoryNodeState.{name}"


def test_superexec():
    used = {"task_type", "runtime_dependency_install", "parent_pid", "runtime_api_address"}
    used |= {"token", "insecure", "root_certificates_path", "task_id"}
    assert used <= {field.name for field in dataclasses.fields(ExecutionSpec)}
    given = {"runtime_api_address", "token", "insecure", "certificates", "parent_pid"}
    assert parameters(run_clientapp) >= given
    assert isinstance(exit_handler.registered_exit_handlers, list)


@pytest.fixture
def replaced(monkeypatch):
    """A function that runs the `main` of a process without Flower's; what it replaces, by name."""

    def run(module, flowers):
        made = {}

        def replace(where, name, replacement, expected):
            assert vars(where)[name] is expected, "another one in the installed Flower"
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
    monkeypatch.setattr(os, "kill", lambda *_: None)  # Flower interrupts the process
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


def test_registration():
    codes = ("FLEET_INVALID_HEARTBEAT_INTERVAL", "FLEET_NODE_ACTIVATION_FAILED")
    for code in codes:
        assert hasattr(ApiErrorCode, code), f"ApiErrorCode.{code}"
    assert FlowerError.from_json("no JSON") is None
    activate = inspect.getsource(fleet_servicer)
    assert "InvalidHeartbeatIntervalError" in activate, "the refusal that the doctor asks for"


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
@pytest.mark.parametrize("process", IN_EXECUTORS)
def test_a_process_runs_the_run_s_code_and_states_its_digest(process, tmp_path):
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
    script = AFTER_INSTALLATION.format(**IN_EXECUTORS[process])
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
