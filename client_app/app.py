"""The ClientApp that Flower calls; `handlers.answer` does the work.

In deployment Flower starts a fresh process for every message. Where $KEEL_WORKER names the socket
of a resident worker, that process sends its message there and never imports torch.
"""

import os
import sys

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.worker_client import send_to_worker, worker_variable
from flower_adapter import GPU_LOST
from protocol.config import app_folder
from protocol.ray_start import require_token

app = ClientApp()
if "flwr.server.superlink.fleet.vce.vce_api" in sys.modules and "ray" not in sys.modules:
    # Flower's simulation loads this before it starts Ray, whose workers look for modules in the
    # folder of this process first: that is the one in which the SuperLink was started
    os.chdir(app_folder)
    if not os.environ.get("RAY_ADDRESS"):
        require_token()
        os.environ["RAY_ADDRESS"] = "local"  # not a Ray that `ray start` has left on this machine


def is_ray_actor() -> bool:
    """Whether this process is one that Ray has started for an actor."""
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def replied(message: Message, context: Context) -> Message:
    """The reply to a message of any kind, from the resident worker where there is one."""
    socket = os.environ.get(worker_variable)
    content: RecordDict | Error
    if socket:
        content = send_to_worker(socket, message, context)
    else:
        from client_app.handlers import answer  # imports torch

        content = answer(message, context)
        is_lost = isinstance(content, Error) and content.code == GPU_LOST
        if is_lost and is_ray_actor():  # a worker of a simulation, which Ray starts again
            os._exit(1)
    return Message(content, reply_to=message)


for register in (app.query(), app.train(), app.evaluate()):
    register(replied)
