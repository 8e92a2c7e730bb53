"""`flower-superexec` for a client: ClientApp processes that start at once.

What replaces a part of Flower says which, and why; `main` puts it in place. Public way: none. Both
kinds of process, ClientApps and ServerApps, install the run's app only if it is whole:
app_install.py.
"""

import os
import random
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import Any

import flwr.supercore.superexec.run_superexec as run_superexec
from flwr.cli.install import install_from_fab
from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import exit_handler
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec.executor import get_executor
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import run_clientapp

from flower_adapter import replace, wait_out_time_outs
from flower_adapter.app_install import install_to_run
from protocol.processes import end_with_parent
from protocol.text import in_one_line


class ForkingExecutor(SubprocessExecutor):
    """Runs ClientApps in forks of this process, which has no threads; the rest as Flower's.

    Replaces what `get_executor` returns in the executor's loop. Why: Flower starts a Python for
    every message, which imports Flower again, a second of CPU; the kinds of executor are fixed.
    The child takes Keel's code from the run's app. A ServerApp is started as `keel.deployment
    serverapp`, and the executor sends its first heartbeat: if none arrives within 30 seconds, the
    SuperLink lets another ServerApp start, and on a busy machine each takes longer.
    """

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of one task."""
        own_types = (TaskType.SERVER_APP, TaskType.CLIENT_APP)
        if spec.runtime_dependency_install or spec.task_type not in own_types:
            return super().launch(spec)
        if spec.task_type == TaskType.SERVER_APP:
            subprocess.Popen(server_app_command(spec))
            send_heartbeat(spec)
            return LaunchResult.accepted()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = run_in_child(spec)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)  # never return into the parent's loop
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap the children that have ended."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def send_heartbeat(spec: ExecutionSpec) -> None:
    """The first heartbeat of a task, in its process's place; if it fails, the next may arrive."""
    client = RuntimeHttpClient.from_server_address(
        server_address=spec.runtime_api_address,
        insecure=spec.insecure,
        root_certificates=validate_and_resolve_root_certificates(
            spec.root_certificates_path, spec.insecure
        ),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            RuntimeTokenHttpInterceptor(spec.token),
        ],
    )
    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except Exception as error:
        print(f"heartbeat of task {spec.task_id}: {in_one_line(error)}", file=sys.stderr)
    finally:
        client.close()


def server_app_command(spec: ExecutionSpec) -> list[str]:
    """The command of a ServerApp's process."""
    command = [sys.executable, "-m", "keel.deployment", "serverapp"]
    command += ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
    if spec.insecure:
        command.append("--insecure")
    elif spec.root_certificates_path is not None:
        command += ["--root-certificates", str(spec.root_certificates_path)]
    if spec.parent_pid is not None:
        command += ["--parent-pid", str(spec.parent_pid)]
    return command


def run_in_child(spec: ExecutionSpec) -> int:
    """Do what `flwr-clientapp` does; its exit status."""
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Flower's own watchdog signals from a thread, which does not wake a main thread that waits for
    # a SuperNode that is gone too.
    assert spec.parent_pid is not None
    end_with_parent(spec.parent_pid)
    exit_handler.registered_exit_handlers.clear()  # they would close what belongs to the parent
    random.seed()
    module = sys.modules[run_clientapp.__module__]
    replace(module, "install_from_fab", install_to_run, install_from_fab)
    try:
        run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=validate_and_resolve_root_certificates(
                spec.root_certificates_path, spec.insecure
            ),
            parent_pid=spec.parent_pid,
        )
    except SystemExit as end:
        return int(end.code or 0) if isinstance(end.code, int | None) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def executor_invoker() -> Any:
    """Flower's retry invoker, which waits out time-outs and says that a secret is refused.

    Replaces `make_simple_http_retry_invoker`. Why: at a SuperLink that hangs, Flower's executor
    ends, and the ServerApp with it; and where a secret is refused, it ends without a word.
    """
    invoker = wait_out_time_outs(make_simple_http_retry_invoker())
    gives_up = invoker.should_giveup

    def should_give_up(error: Exception) -> bool:
        if getattr(getattr(error, "response", None), "status_code", 0) == 401:
            print(
                "error: --superexec-auth-secret-file: the secret is refused: expected that of the "
                "SuperLink or SuperNode, which reads it when it starts",
                file=sys.stderr,
                flush=True,
            )
        return bool(gives_up(error))

    invoker.should_giveup = should_give_up
    return invoker


def main() -> None:
    """Run `flower-superexec` with its options, and fork for every message."""
    replace(run_superexec, "get_executor", lambda *_, **__: ForkingExecutor(), get_executor)
    invoker = make_simple_http_retry_invoker
    replace(run_superexec, "make_simple_http_retry_invoker", executor_invoker, invoker)
    flower_superexec()
