"""Sends a message from the short-lived ClientApp process to the resident worker; imports no torch.

Whatever happens to the worker, the message is answered within the run's `round-timeout`: with the
worker's reply, or with an error of one line.
"""

import json
import logging
import time
from pathlib import Path

from flwr.app import Context, Error, Message, MessageType, RecordDict

from client_app.worker_socket import exchange, wait_until_ready
from flower_adapter import CLIENT_FAILED, from_bytes, to_bytes
from protocol.code import code_digest
from protocol.text import in_one_line

log = logging.getLogger("keel.client")
max_timeout_s = 30 * 86400.0
START_TIMEOUT_S = 600.0  # for the answer to the query before round 1
refusal_s = 60.0  # for a message that states no time limit


def send_to_worker(path: str, message: Message, context: Context) -> RecordDict | Error:
    """The worker's answer to a message, which is sent once more if the worker dies on it."""
    limit_s = answer_timeout_s(message)
    deadline = time.monotonic() + limit_s
    request = [
        json.dumps({"kind": "message", "code": code_digest(), "limit_s": limit_s}).encode(),
        to_bytes(message),
        to_bytes(context),
    ]
    for attempt in range(2):
        try:
            if attempt:
                wait_until_ready(path, deadline)
            header, *rest = exchange(path, request, deadline)
            if error := json.loads(header).get("error"):
                return Error(int(error["code"]), str(error["reason"]))
            return from_bytes(RecordDict, rest[0])
        except TimeoutError as late:
            reason = str(late)
            break
        except ConnectionError as death:
            reason = f"the worker at {path} died on this message twice ({death or 'no answer'})"
            log.warning("the worker at %s died on a message", path)
        except Exception as error:  # no permission, or another program listens there
            reason = in_one_line(f"the worker at {path}: {type(error).__name__}: {error}")
            break
    node = context.node_config
    client = node.get("name", f"of partition {node.get('partition-id')}")
    log.error("%s: client %s: %s", run_and_round(message), client, reason)
    return Error(CLIENT_FAILED, reason)


def run_and_round(message: Message) -> str:
    """The run and round that a message belongs to, for the log."""
    record = message.content.config_records.get("round")
    if not record or not record.get("run-dir"):
        return "the roster query"
    run = Path(str(record["run-dir"])).name
    return in_one_line(f"run {run}, round {record.get('round')!r}", 200)


def answer_timeout_s(message: Message) -> float:
    """How long the server waits for the reply: the run's `round-timeout`.

    Before round 1, a client may have to decode all its data: `START_TIMEOUT_S`.
    """
    if message.metadata.message_type == MessageType.QUERY:
        return START_TIMEOUT_S
    record = message.content.config_records.get("round")
    try:
        stated_s = float(json.loads(str(record["config"]))["round-timeout"]) if record else 0.0
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        stated_s = 0.0
    # <= 0 or NaN: the message is not from Keel's server, and the handlers refuse it at once
    return min(stated_s, max_timeout_s) if stated_s > 0 else refusal_s
