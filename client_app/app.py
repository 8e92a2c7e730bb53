"""The ClientApp that Flower calls; `handlers.answer` does the work.

In deployment Flower starts a fresh process for every message. Where $KEEL_WORKER names the socket
of a resident worker, that process sends its message there and never imports torch.
"""

import os

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.worker_client import send_to_worker, worker_variable
from flower_adapter.simulation_patches import replace_backend

app = ClientApp()
replace_backend()  # in Flower's simulation, which loads this before it starts Ray


def replied(message: Message, context: Context) -> Message:
    """The reply to a message of any kind, from the resident worker where there is one."""
    socket = os.environ.get(worker_variable)
    content: RecordDict | Error
    if socket:
        content = send_to_worker(socket, message, context)
    else:
        from client_app.handlers import answer  # imports torch

        content = answer(message, context)
    return Message(content, reply_to=message)


for register in (app.query(), app.train(), app.evaluate()):
    register(replied)
