"""One message for several clients of a simulation, and the worker's one reply to it.

server -> worker   simulated: clients (their numbers), num-clients, counted-rounds; round, arrays
                   and extra of all; own-K: the arrays that only the K-th is sent
worker -> server   the records of the K-th client's reply with -K after their names, or error-K
"""

from collections.abc import Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, RecordDict

from protocol.array_records import array_record, joined, tensors
from protocol.messages import find_record, get_record, message_content

REPLY_RECORDS = ("reply", "arrays", "extra", "metrics")


def joined_content(
    contents: Sequence[RecordDict], clients: Sequence[int], num_clients: int
) -> RecordDict:
    """The content of one message from those of messages to several clients, given by number.

    They have the request, the arrays and `extra` in common, except arrays called "own".
    """
    accepted = [get_record(c, "client", ConfigRecord)["counted-round"] for c in contents]
    simulated: dict[str, Any] = {
        "clients": list(clients),
        "num-clients": num_clients,
        "counted-rounds": accepted,
    }
    shared = ArrayRecord()
    whole: dict[str, Any] = {
        "simulated": ConfigRecord(simulated),
        "round": get_record(contents[0], "round", ConfigRecord),
        "arrays": get_record(contents[0], "arrays", ArrayRecord),
        "extra": shared,
    }
    for k, content in enumerate(contents):
        for name, array in get_record(content, "extra", ArrayRecord).items():
            if name == "own":
                own = ArrayRecord()
                own[name] = array
                whole[f"own-{k}"] = own
            else:
                shared[name] = array
    return RecordDict(whole)


def split_content(whole: RecordDict) -> list[tuple[int, int, RecordDict]]:
    """(client's number, number of clients, content of its message): inverse of `joined_content`.

    What the clients have in common is decoded once.
    """
    simulated: dict[str, Any] = dict(get_record(whole, "simulated", ConfigRecord))
    num_clients = int(simulated["num-clients"])
    arrays = array_record(tensors(get_record(whole, "arrays", ArrayRecord)))
    extra = array_record(tensors(get_record(whole, "extra", ArrayRecord)))
    contents = []
    pairs = zip(simulated["clients"], simulated["counted-rounds"], strict=True)
    for k, (client, last) in enumerate(pairs):
        own = joined(extra, find_record(whole, f"own-{k}", ArrayRecord) or ArrayRecord())
        content = message_content(get_record(whole, "round", ConfigRecord), arrays, own, int(last))
        contents.append((int(client), num_clients, content))
    return contents


def joined_reply(replies: Sequence[RecordDict | Error]) -> RecordDict:
    """The content of one reply from those of several clients."""
    whole = RecordDict()
    for k, reply in enumerate(replies):
        if isinstance(reply, Error):
            whole[f"error-{k}"] = ConfigRecord({"code": reply.code, "reason": reply.reason or ""})
            continue
        for name, record in reply.items():
            whole[f"{name}-{k}"] = record
    return whole


def split_reply(whole: RecordDict, num_clients: int) -> list[RecordDict | Error]:
    """What `joined_reply` was made of."""
    replies: list[RecordDict | Error] = []
    for k in range(num_clients):
        error = find_record(whole, f"error-{k}", ConfigRecord)
        if error is not None:
            replies.append(Error(int(error["code"]), str(error["reason"])))  # type: ignore[arg-type]
            continue
        found = {n: whole[f"{n}-{k}"] for n in REPLY_RECORDS if f"{n}-{k}" in whole}
        replies.append(RecordDict(found))
    return replies
