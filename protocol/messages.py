"""The layout of every message between server and clients.

server -> client   query     round: see `TrainRequest`
                   train     round; client: counted-round; arrays; extra
                   evaluate  round; client: counted-round; arrays; extra
client -> server   query     roster: see `RosterEntry`
                   train     reply: client, round; arrays; extra; metrics
                   evaluate  reply: client, round; metrics

`counted-round` is the last round whose reply of this client the server used, 0: none.
`extra` holds what a method sends beside the model (control variates, prototypes) and may be empty.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, get_type_hints

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.numpy import load, save
from torch import Tensor

from protocol.config import RunConfig, config_from_json, keel_version

Arrays = dict[str, Tensor]
packed = "keel.safetensors"  # how Flower's `Array.stype` calls what `array_record` makes
longest_header = 2**22  # bytes: of names, shapes and places of some ten thousand tensors
protocol_version = 3  # of the layout below: another one cannot be talked to


@dataclass(frozen=True)
class DatasetSpec:
    """What a client has to know of the run's source, which it need not have.

    image_shape: (C, H, W). class_names: a label is a place in them. mean, std: of each channel, by
    which every client normalises.
    """

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Labels go from 0 to this, exclusive."""
        return len(self.class_names)


@dataclass(frozen=True)
class TrainRequest:
    """What the server asks of a client, beside the arrays.

    checkpoint_round: the newest round that the server could still resume from; whatever a client
    kept for it must not be pruned. run_dir: the run's folder, which in simulation holds the
    clients' state too. evaluate: answer with the accuracies on the local test part as well.
    """

    config: RunConfig
    data: DatasetSpec
    round: int
    checkpoint_round: int
    evaluate: bool
    run_dir: str


@dataclass(frozen=True)
class RosterEntry:
    """What a client says of itself before round 1. Counts are samples per class.

    num_partitions: how many clients the simulation has; 0 for a real site. versions: of flwr and
    torch; keel and protocol: of what runs on the client.
    """

    client: str
    label_counts: list[int]
    test_label_counts: list[int]
    image_shape: list[int]
    model: str
    representation_width: int
    versions: str
    num_partitions: int
    keel: str = field(default_factory=keel_version)
    protocol: int = protocol_version

    @property
    def num_examples(self) -> int:
        """Training samples."""
        return sum(self.label_counts)


@dataclass(frozen=True)
class TrainReply:
    """A client's answer to train (or to evaluate: then without arrays)."""

    client: str
    round: int
    arrays: Arrays
    extra: Arrays
    metrics: dict[str, float]


def request_record(request: TrainRequest) -> ConfigRecord:
    """The record that `read_request` reads back."""
    return ConfigRecord(
        {
            "config": request.config.to_json(),
            "data": json.dumps(asdict(request.data)),
            "round": request.round,
            "checkpoint-round": request.checkpoint_round,
            "evaluate": request.evaluate,
            "run-dir": request.run_dir,
        }
    )


def read_request(message: Message) -> TrainRequest:
    """What the message asks for; ValueError if it is not one of Keel's."""
    record = message.content.config_records.get("round")
    if record is None:
        raise ValueError("a message without the record 'round': not sent by Keel's ServerApp")
    if "data" not in record:
        raise ValueError(
            f"the server speaks another protocol, this Keel version {protocol_version}"
        )
    return TrainRequest(
        config=config_from_json(str(record["config"])),
        data=data_from_json(str(record["data"])),
        round=int(record["round"]),  # type: ignore[arg-type]  # a scalar in every Keel message
        checkpoint_round=int(record["checkpoint-round"]),  # type: ignore[arg-type]
        evaluate=bool(record["evaluate"]),
        run_dir=str(record["run-dir"]),
    )


@lru_cache(maxsize=4)  # it is the same in every message of a run
def data_from_json(text: str) -> DatasetSpec:
    """What `request_record` made of the run's data."""
    shape, *others = (tuple(json.loads(text)[f.name]) for f in fields(DatasetSpec))
    return DatasetSpec(shape, *others)


def message_content(
    request: ConfigRecord, arrays: ArrayRecord, extra: ArrayRecord, last_accepted_round: int
) -> RecordDict:
    """The content of a train or evaluate message; `instruction` is `request_record`'s."""
    own = ConfigRecord({"counted-round": last_accepted_round})
    return RecordDict({"round": request, "client": own, "arrays": arrays, "extra": extra})


def counted_round_of(message: Message) -> int:
    """The last round whose reply of this client the server used; 0: none."""
    return int(message.content.config_records["client"]["counted-round"])  # type: ignore[arg-type]


def array_record(arrays: Arrays, name: str = "arrays") -> ArrayRecord:
    """Tensors as one array of Flower's, called `name`: their names and values in safetensors.

    A SuperLink takes two objects for each of Flower's arrays, at ten or more database statements
    an object: one by one, a network's arrays are most of what a round in deployment costs.
    """
    if not arrays:
        return ArrayRecord()
    values = {key: a.detach().cpu().contiguous().numpy() for key, a in arrays.items()}
    content = save(values, {"names": json.dumps([*values])})
    return ArrayRecord({name: Array("uint8", (len(content),), packed, content)})


def tensors(record: ArrayRecord | None) -> Arrays:
    """The tensors in a record, of their own memory, in their order; {} for none.

    A client's bytes may raise anything here, not only ValueError.
    """
    found: Arrays = {}
    for name, array in (record or {}).items():
        length = int.from_bytes(array.data[:8], "little")
        if array.stype != packed or length > longest_header:
            raise ValueError(f"{name!r} holds no arrays packed by Keel")
        names = json.loads(json.loads(array.data[8 : 8 + length])["__metadata__"]["names"])
        values = load(array.data)
        if set(names) != values.keys() or values.keys() & found.keys():
            raise ValueError(f"{name!r} holds other arrays than it names")
        found |= {key: torch.from_numpy(values[key]) for key in names}
    return found


def reply_content(reply: TrainReply) -> RecordDict:
    """The content of an answer to train or evaluate."""
    return RecordDict(
        {
            "reply": ConfigRecord({"client": reply.client, "round": reply.round}),
            "arrays": array_record(reply.arrays),
            "extra": array_record(reply.extra),
            "metrics": MetricRecord({name: float(v) for name, v in reply.metrics.items()}),
        }
    )


def read_reply(message: Message) -> TrainReply:
    """The answer in a message; ValueError naming the record that is missing."""
    content = message.content
    for name, records in (
        ("reply", content.config_records),
        ("metrics", content.metric_records),
        ("arrays", content.array_records),
    ):
        if name not in records:
            raise ValueError(f"the reply has no record {name!r}")
    about = content.config_records["reply"]
    return TrainReply(
        client=str(about["client"]),
        round=int(about["round"]),  # type: ignore[arg-type]  # a scalar, written by reply_content
        arrays=tensors(content.array_records["arrays"]),
        extra=tensors(content.array_records.get("extra")),
        metrics={k: float(v) for k, v in content.metric_records["metrics"].items()},  # type: ignore[arg-type]
    )


def roster_content(entry: RosterEntry) -> RecordDict:
    """The content of an answer to query."""
    return RecordDict({"roster": ConfigRecord({"entry": json.dumps(asdict(entry))})})


def read_roster(message: Message) -> RosterEntry:
    """The roster entry in a reply to query; ValueError if there is none that we understand."""
    record = message.content.config_records.get("roster")
    if record is None:
        raise ValueError("the reply to the query has no record 'roster'")
    said = json.loads(str(record["entry"]))
    spoken = said.get("protocol", 0)  # what an old client does not say must not be filled in here
    if spoken != protocol_version:
        raise ValueError(
            f"client {said.get('client')} speaks version {spoken} of the protocol, this server "
            f"{protocol_version}: install the same Keel on both (the client's is "
            f"{said.get('keel', 'unknown')}, the server's {keel_version()})"
        )
    return roster_entry(said)


def is_of(kind: object, value: object) -> bool:
    """A text, a count, or a list of counts, as `kind` says."""
    if kind is str:
        return isinstance(value, str)
    counts = value if isinstance(value, list) else [value]
    are_counts = all(type(n) is int and n >= 0 for n in counts)
    return are_counts and isinstance(value, list) == (kind is not int)


def roster_entry(said: dict[str, Any]) -> RosterEntry:
    """The entry in decoded JSON; ValueError, naming the client, unless it holds what it should."""
    odd = sorted(said.keys() ^ {f.name for f in fields(RosterEntry)})
    for name, kind in get_type_hints(RosterEntry).items():
        value = said.get(name)
        if not is_of(kind, value):
            odd.append(name)
    if not odd and len(said["label_counts"]) != len(said["test_label_counts"]):
        odd.append("test_label_counts")
    if odd:
        client = in_one_line(said.get("client"), 60)
        raise ValueError(f"client {client}: its roster entry is odd: {odd[0]!r}")
    return RosterEntry(**said)


def in_one_line(said: object, most: int = 300) -> str:
    """What a client says, fit for a log: one line of `most` characters, all of them printable."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(str(said).split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def payload_bytes(message: Message) -> int:
    """Bytes of the records in a message: what travels, less Flower's envelope."""
    return sum(record.count_bytes() for record in message.content.values())


def all_finite(arrays: Arrays) -> bool:
    """No array holds a NaN or an infinity."""
    return all(bool(a.isfinite().all()) for a in arrays.values() if a.is_floating_point())
