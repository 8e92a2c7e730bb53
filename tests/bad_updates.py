"""Every kind of bad update, from one of four clients, for tests and for the table of results:

PYTHONPATH=. python tests/bad_updates.py       prints docs/results/update-validation.md's table
"""

import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import Error, Message, MessageType

import client_app.app
from flower_adapter import CLIENT_FAILED
from protocol.messages import Arrays, TrainReply, read_reply, reply_content, tensors
from protocol.options import OptionValue
from server_app.federation import run_federation
from server_app.inline import InlineGrid, simulated_nodes

BAD_CLIENT, BAD_NODE = "client-0001", 3  # nodes are 2, 3, ... in the order of the clients


def with_value(reply: TrainReply, value: float) -> TrainReply:
    """One weight is `value`."""
    name = min(reply.arrays)
    array = reply.arrays[name].clone()
    array.view(-1)[7] = value
    return replace(reply, arrays=reply.arrays | {name: array})


def with_array(reply: TrainReply, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainReply:
    """The first array is another."""
    name = min(reply.arrays)
    return replace(reply, arrays=reply.arrays | {name: change(reply.arrays[name])})


def without_array(reply: TrainReply) -> TrainReply:
    """The first array is missing."""
    return replace(reply, arrays={k: a for k, a in reply.arrays.items() if k != min(reply.arrays)})


def thousandfold(reply: TrainReply, sent: Arrays) -> TrainReply:
    """The update is a thousand times as long."""
    arrays = {name: sent[name] + 1000 * (a - sent[name]) for name, a in reply.arrays.items()}
    return replace(reply, arrays=arrays)


def miscounted(reply: TrainReply) -> TrainReply:
    """It says that it trained on ten times its samples, and would weigh so much."""
    count = {"num-examples": 10 * reply.metrics["num-examples"]}
    return replace(reply, metrics=reply.metrics | count)


@dataclass(frozen=True)
class Kind:
    """A kind of bad update: what it makes of the reply, and the reason it is left out for."""

    spoil: Callable[[TrainReply, Arrays], TrainReply] | None
    reason: str


KINDS = {
    "NaN": Kind(lambda r, sent: with_value(r, torch.nan), "holds 1 value that is not finite"),
    "infinity": Kind(lambda r, sent: with_value(r, torch.inf), "holds 1 value that is not finite"),
    "wrong shape": Kind(lambda r, sent: with_array(r, lambda a: a[None]), "expected ["),
    "wrong dtype": Kind(
        lambda r, sent: with_array(r, torch.Tensor.double), "is torch.float64, expected"
    ),
    "extra key": Kind(
        lambda r, sent: replace(r, arrays=r.arrays | {"backdoor": torch.ones(3)}),
        "array 'backdoor' is unknown",
    ),
    "missing key": Kind(lambda r, sent: without_array(r), "is missing (1 of "),
    "norm x 1000": Kind(thousandfold, "times the round's median of"),
    "wrong count": Kind(lambda r, sent: miscounted(r), "the roster says "),
    "replay": Kind(None, "it answers round "),
    "late": Kind(None, "no answer within round-timeout"),
    "no reply": Kind(None, "no power"),  # what the others are compared with
}


class FaultyGrid(InlineGrid):
    """An inline grid in which one client's replies to `rounds` are spoilt in one way."""

    def __init__(self, kind: str, rounds: Iterable[int]) -> None:
        super().__init__(client_app.app.app, simulated_nodes(4))
        self.kind, self.rounds = kind, set(rounds)
        self.before: Message | None = None  # its last good reply
        self.round = 0  # of the newest message
        self.withheld: dict[str, tuple[Message, int]] = {}  # reply, and the round that it is of

    def answer(self, message: Message) -> Message:
        """What comes back: spoilt, if it is the turn of that."""
        about = message.metadata
        if (about.dst_node_id, about.message_type) != (BAD_NODE, MessageType.TRAIN):
            return super().answer(message)
        number = int(message.content.config_records["round"]["round"])  # type: ignore[arg-type]
        if number not in self.rounds:
            self.before = super().answer(message)
            return self.before
        if self.kind == "no reply":
            return Message(Error(CLIENT_FAILED, "OSError: no power"), reply_to=message)
        if self.kind == "replay":
            assert self.before is not None
            return Message(self.before.content, reply_to=message)
        reply = super().answer(message)
        spoil = KINDS[self.kind].spoil
        if spoil is None:  # late
            return reply
        bad = spoil(read_reply(reply), tensors(message.content.array_records["arrays"]))
        return Message(reply_content(bad), reply_to=message)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As ever; a late reply is there once a later round has begun."""
        messages = list(messages)
        rounds = [message.content.config_records.get("round") or {} for message in messages]
        self.round = max([self.round, *(int(r.get("round", 0)) for r in rounds)])
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there."""
        asked = set(message_ids)
        there = [i for i in asked & self.withheld.keys() if self.withheld[i][1] < self.round]
        replies = [self.withheld.pop(i)[0] for i in there]
        for message_id in [i for i in self.waiting if i in asked]:
            [message] = [self.waiting[message_id]]
            [reply] = super().pull_messages([message_id])
            rounds = message.content.config_records["round"]
            is_bad = message.metadata.dst_node_id == BAD_NODE and rounds.get("round") in self.rounds
            if self.kind == "late" and is_bad:
                self.withheld[message_id] = (reply, self.round)
            else:
                replies.append(reply)
        return replies


def run_with(kind: str, rounds: Iterable[int], overrides: dict[str, OptionValue]) -> Path:
    """The folder of a run on `digits` in which a client's update is bad in these rounds."""
    own: dict[str, OptionValue] = {"norm-bound": "median"}
    if kind == "late":
        own["round-timeout"] = 1.0
    return run_federation(FaultyGrid(kind, rounds), overrides | own).path


def main() -> int:
    """Print the table."""
    logging.getLogger("keel").setLevel(logging.ERROR)
    rounds, bad = 10, (3, 6, 9)
    with tempfile.TemporaryDirectory() as base:
        keys: dict[str, OptionValue] = {
            **{"source": "digits", "model": "cnn-fedreco", "alpha": 5.0, "lr": 0.05},
            **{"num-rounds": rounds, "batch-size": 32, "output-dir": base},
        }
        rows = [
            "| bad update | reason in the log and in `history.jsonl` | left out | run | accuracy |"
        ]
        rows.append("| --- | --- | --- | --- | --- |")
        undisturbed = run_with("no reply", (), keys)
        for kind, folder in [("none", undisturbed)] + [(k, run_with(k, bad, keys)) for k in KINDS]:
            lines = [json.loads(text) for text in (folder / "history.jsonl").open()]
            reasons = [line["left_out"].get(BAD_CLIENT) for line in lines]
            summary = json.loads((folder / "summary.json").read_text())
            named = [reason for reason in reasons if reason]
            accuracy = 100 * summary["results"]["global.accuracy"]["final"]
            row = (kind, named[0] if named else "", f"{len(named)} of {len(bad) if named else 0}")
            rows.append(f"| {' | '.join(row)} | {summary['status']} | {accuracy:.2f} % |")
    sys.stdout.write("\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
