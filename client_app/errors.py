"""What the server is told of a client's error: one line, without what must not leave the site."""

import logging
import os
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message, MessageType

from client_app.gpu_errors import is_gpu_lost, is_out_of_memory
from client_app.node_config import client_name, is_deployed
from client_app.site_privacy import PrivacyRefused
from client_app.state import ResetNeeded
from client_app.worker_client import run_and_round
from data.decoding import ImageFileError
from flower_adapter import CLIENT_FAILED, GPU_LOST
from protocol.code import line_in_method
from protocol.config import config_from_json, keel_home
from protocol.messages import RESET_NEEDED, find_record, get_record
from protocol.options import ConfigError
from protocol.text import in_one_line

log = logging.getLogger("keel.client")
MAX_REASON = 2000  # characters of an error
# errors whose text says all, so they are sent without their type
REFUSALS = (ValueError, ConfigError, PrivacyRefused, ResetNeeded, ImageFileError)


def error_reply(error: Exception, message: Message, context: Context) -> Error:
    """What the server is told of an error; the log has it too."""
    reason = reason_of(error)
    is_withheld = not isinstance(error, PrivacyRefused) and withholds_metrics(message)
    try:
        client = client_name(context.node_config)
    except ValueError:
        client = "without a name"
    what = run_and_round(message)
    # the trace has the sanitised reason: the exception's own text may come from the server
    is_bug = not is_for_user(error)
    trace = (type(error), RuntimeError(reason), error.__traceback__) if is_bug else None
    extra = {"is_withheld": is_withheld}
    log.error("%s: client %s: %s", what, client, reason, exc_info=trace, extra=extra)
    if is_deployed(context.node_config):
        reason = without_file_names(reason, error, str(context.node_config.get("source", "")))
    if is_withheld:
        reason = "failed; privacy.metrics = 'withheld': the reason is in this client's log"
    is_query = message.metadata.message_type == MessageType.QUERY
    if is_query and not is_about_machine(message):  # the server does not know its name yet
        reason = f"client {client}: {reason}"
    if is_gpu_lost(error):
        return Error(GPU_LOST, reason)
    return Error(RESET_NEEDED if isinstance(error, ResetNeeded) else CLIENT_FAILED, reason)


def reason_of(error: Exception) -> str:
    """The error in one line: its type, the line in a method's file, its text, what to do."""
    place = line_in_method(error)
    is_refusal = type(error) in REFUSALS and not place and bool(str(error))
    reason = str(error) if is_refusal else f"{type(error).__name__}{place}: {error}"
    if is_out_of_memory(error):
        sentence, *_ = reason.splitlines()[0].partition(". ")
        reason = f"{sentence}: lower batch-size or cache-mb, or set precision=bf16"
    return in_one_line(reason, MAX_REASON)


def is_for_user(error: Exception) -> bool:
    """Whether the user can fix it, a full disk included, so that a traceback would not help."""
    if isinstance(error, OSError) or is_out_of_memory(error):
        return True
    return isinstance(error, ValueError) and not line_in_method(error)  # else a bug in a method


def without_file_names(reason: str, error: Exception, source: str) -> str:
    """The reason as the server gets it: paths and files of a site may name people.

    source: of the client's node config; its path is left out too, as are $KEEL_HOME and the user's
    folder.
    """
    log_has_it = "this client's log names the file"
    if nameless := getattr(error, "nameless", ""):
        return f"{nameless} ({log_has_it})"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{type(error).__name__}: {error.strerror} ({log_has_it})"
    # data-dir, cache and state lie there
    hidden = [(str(keel_home()), "…"), (os.path.expanduser("~"), "…")]
    kind, _, location = source.partition(":")
    if location:
        path = str(Path(os.path.expanduser(location)).absolute())  # with "..", as errors have it
        hidden = [(path, "…"), (source, f"{kind}:…"), *hidden]
    for name, shown in hidden:
        if name == os.sep:  # the root is in every path
            continue
        for spelt in (name, repr(name)[1:-1]):  # as text, and as an error quotes it
            reason = reason.replace(in_one_line(spelt, MAX_REASON), shown)
    return reason


def withholds_metrics(message: Message) -> bool:
    """Whether nothing measured on the data, an error's text included, may leave this client."""
    try:
        record = get_record(message.content, "round", ConfigRecord)
        return config_from_json(str(record["config"])).privacy.withholds_metrics
    except (KeyError, ValueError):
        return False


def is_about_machine(message: Message) -> bool:
    """Whether a query asks a simulation's worker about its machine."""
    record = find_record(message.content, "round", ConfigRecord)
    return record is not None and "token" in record
