"""The layout of every message between server and clients.

server -> client   query     round: `RosterRequest`
                   train     round: `TrainRequest`; client: counted-round; arrays; extra
                   evaluate  round: `EvaluateRequest`; client: counted-round; arrays; extra
client -> server   query     roster: `RosterEntry`
                   train     reply: client, round; arrays; extra; metrics
                   evaluate  reply: client, round; metrics

`counted-round` is the client's last accepted round: the last one whose update was aggregated, 0:
none. `extra` holds what a method sends alongside the model (control variates, prototypes) and may
be empty. Tensors are packed when they leave the process: within it the receiver gets the sender's.
A message for several clients of a simulation is in simulated.py.
"""

import json
import re
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from protocol.array_records import HandedArrays, array_record, tensors
from protocol.arrays import Arrays
from protocol.code import code_digest
from protocol.config import RunConfig, config_from_json, keel_version
from protocol.text import check_client_name, in_one_line

MAX_ROSTER_CHARACTERS = 2**20  # of a roster entry as JSON
MAX_METRICS = 256  # of a reply
METRIC_NAME = re.compile(r"(?!loss\.+\Z)[A-Za-z0-9._-]{1,64}")  # "loss/.." ends MLflow's round
MAX_TEXT = 200  # characters of a text in a roster entry
MAX_COUNTS = 100_000  # entries of a list in a roster entry
MAX_COUNT = 10**12  # samples of one class
# Types of a roster entry, which a client may have made up; a text is one line.
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Counts = Annotated[list[Count], Field(max_length=MAX_COUNTS)]
Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT), AfterValidator(in_one_line)]
# error code of a client whose state is lost or ahead of the server; Flower's own are below 100
RESET_NEEDED = 100
protocol_version = 5  # of the layout of messages; both sides need the same


@dataclass(frozen=True)
class DatasetSpec:
    """What every client has to know of the run's data source; a site has another source of its own.

    image_shape: (C, H, W). class_names: a label is an index into them; () where the server asks a
    site for its own. mean, std: per channel, for normalisation. window: values of images of 16 bits
    that become 0 and 255; (): images have 8.
    """

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    window: tuple[int, ...] = ()

    @property
    def num_classes(self) -> int:
        """Labels are 0 .. num_classes - 1."""
        return len(self.class_names)


@dataclass(frozen=True)
class RosterRequest:
    """What a client is asked before round 1: its `RosterEntry`."""

    config: RunConfig
    data: DatasetSpec


@dataclass(frozen=True)
class TrainRequest:
    """What a client is asked in a round, beside the arrays: to train.

    checkpoint_rounds: those that the server may resume from; the client state that such a resume
    reads is not pruned. evaluate: reply with the accuracies on the local test part as well.
    run_dir: the path of the run directory in simulation, where it holds the clients' state; its
        name in deployment.
    run_id: the run directory's id; a new directory of the same name has another one.
    """

    config: RunConfig
    data: DatasetSpec
    round: int
    checkpoint_rounds: list[int]
    evaluate: bool
    run_dir: str
    run_id: str = ""


@dataclass(frozen=True)
class EvaluateRequest:
    """What a client is asked after a round: the accuracies on its local test part."""

    config: RunConfig
    data: DatasetSpec
    round: int
    run_dir: str
    run_id: str = ""


@dataclass(frozen=True)
class PreflightRequest:
    """What a simulation's worker is asked before round 1, of its machine.

    token_path: a file that the server wrote beside the run directory, with `token` in it; a worker
    that reads it shares the directory. num_clients: over which a worker splits the data; 0 if it
    need not. host: the server's machine; on others a worker computes the digest of its data.
    """

    config: RunConfig
    data: DatasetSpec
    token_path: str = ""
    token: str = ""
    num_clients: int = 0
    host: str = ""


Request = TypeVar("Request", RosterRequest, PreflightRequest, TrainRequest, EvaluateRequest)
RoundRequest = TrainRequest | EvaluateRequest
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


@dataclass(frozen=True)
class RosterEntry:
    """A client's description of itself before round 1. Counts are samples per class.

    num_partitions: the number of clients of a simulation; 0 for a real site. versions: of flwr and
    torch on the client; keel, protocol: versions of Keel and of the messages there. num_train,
    num_test: of samples, where the counts of each class are withheld (`privacy.metrics`) and [].
    device: what a real site trains on; "" for a simulated client. own_labels: what a real site
    calls each class, "" for one that it lacks; [] of others, and where counts are withheld.
    """

    client: Annotated[str, Field(strict=True), AfterValidator(check_client_name)]
    label_counts: Counts
    test_label_counts: Counts
    image_shape: Annotated[list[Count], Field(min_length=3, max_length=3)]
    model: Text
    representation_width: Count
    versions: Text
    num_partitions: Count
    keel: Text = field(default_factory=keel_version)
    protocol: Count = protocol_version
    num_train: Count = 0
    num_test: Count = 0
    device: Text = ""
    own_labels: Annotated[list[Text], Field(max_length=MAX_COUNTS)] = field(default_factory=list)

    @property
    def num_examples(self) -> int:
        """Training samples."""
        return sum(self.label_counts) or self.num_train

    @property
    def num_test_examples(self) -> int:
        """Samples of the local test part."""
        return sum(self.test_label_counts) or self.num_test


@dataclass(frozen=True)
class TrainReply:
    """A client's answer to train (or to evaluate: then without arrays).

    metrics: "num-examples", in training "num-steps", and what `privacy.metrics` allows, such as
    "loss.NAME", the mean of a loss term. Clients state them; only "num-examples" is checked.
    """

    client: str
    round: int
    arrays: Arrays
    extra: Arrays
    metrics: dict[str, float]


def find_record(content: RecordDict, name: str, kind: type[Record]) -> Record | None:
    """The record of this name if it is of this kind; None otherwise.

    Flower's `config_records` and the like make a copy of the content at each access.
    """
    found = content.get(name)
    return found if isinstance(found, kind) else None


def get_record(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """`find_record`; ValueError if there is none."""
    if (found := find_record(content, name, kind)) is None:
        raise ValueError(f"the message has no record {name!r}")
    return found


def request_record(request: RosterRequest | PreflightRequest | RoundRequest) -> ConfigRecord:
    """The record that `read_request` reads back: one entry a field, and the code's digest."""
    values = {
        field.name.replace("_", "-"): getattr(request, field.name) for field in fields(request)
    }
    encoded = {"config": request.config.to_json(), "data": json.dumps(asdict(request.data))}
    return ConfigRecord(values | encoded | {"code": code_digest()})


def read_request(message: Message, kind: type[Request]) -> Request:
    """The request in a message of this kind.

    ValueError if it is not one of Keel's, or if the server that sent it runs other code.
    """
    record = get_record(message.content, "round", ConfigRecord)
    values: dict[str, Any] = {name.replace("-", "_"): value for name, value in record.items()}
    names: list[str] = [each.name for each in fields(kind)]
    if missing := [name for name in [*names, "code"] if name not in values]:
        raise ValueError(
            f"the message's record 'round' has no {missing[0]!r}: the server speaks another "
            f"version of the protocol, this Keel {protocol_version}; install the same Keel on both"
        )
    if values["code"] != code_digest():
        raise ValueError(
            f"this client runs code {code_digest()} of Keel, the server "
            f"{in_one_line(values['code'], 16)}: start the SuperLink, or Ray, from the checkout "
            "that the run is submitted from"
        )
    values["config"] = config_from_json(str(values["config"]))  # as `withholds_metrics` reads it
    values["data"] = dataset_spec_from_json(str(values["data"]))
    return kind(**{name: values[name] for name in names})


@lru_cache(maxsize=4)  # the same in every message of a run
def dataset_spec_from_json(text: str) -> DatasetSpec:
    """What `request_record` made of the run's data."""
    return DatasetSpec(**{name: tuple(value) for name, value in json.loads(text).items()})


def message_content(
    request: ConfigRecord, arrays: ArrayRecord, extra: ArrayRecord, last_accepted_round: int
) -> RecordDict:
    """The content of a train or evaluate message; `request` is made by `request_record`."""
    client = ConfigRecord({"counted-round": last_accepted_round})  # its name since version 1
    return RecordDict({"round": request, "client": client, "arrays": arrays, "extra": extra})


def last_accepted_round_of(message: Message) -> int:
    """The last round of this client whose update was aggregated; 0: none."""
    return int(get_record(message.content, "client", ConfigRecord)["counted-round"])  # type: ignore[arg-type]


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


def read_reply(message: Message, max_bytes: int | None = None) -> TrainReply:
    """The answer in a message; ValueError naming what is missing, unreadable or beyond its bound.

    max_bytes: of all records; checked, like the metrics, before arrays are decoded.
    """
    content = message.content
    size = payload_bytes(message)
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"the reply has {size} bytes, more than the bound of {max_bytes}")
    about = find_record(content, "reply", ConfigRecord)
    metrics = find_record(content, "metrics", MetricRecord)
    arrays = find_record(content, "arrays", ArrayRecord)
    if about is None or metrics is None or arrays is None:
        found = {"reply": about, "metrics": metrics, "arrays": arrays}
        missing = next(name for name, record in found.items() if record is None)
        raise ValueError(f"the reply has no record {missing!r}")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"the reply has {len(metrics)} metrics, more than {MAX_METRICS}")
    for name, value in metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise ValueError(
                f"metric {in_one_line(name, 80)!r}: expected 1 to 64 letters, digits, '.', '_', "
                "'-', and a loss with a name"
            )
        if isinstance(value, list):
            raise ValueError(f"unreadable: metric {name} is a list")
    try:
        return TrainReply(
            client=in_one_line(about["client"], 64),
            round=int(about["round"]),  # type: ignore[arg-type]  # a scalar, as reply_content wrote
            arrays=tensors(arrays),
            extra=tensors(find_record(content, "extra", ArrayRecord)),
            metrics={name: float(value) for name, value in metrics.items()},  # type: ignore[arg-type]
        )
    except Exception as error:  # a client's bytes may raise anything
        raise ValueError(in_one_line(f"unreadable: {type(error).__name__}: {error}")) from error


def error_reason(error: Error) -> str:
    """The reason in one line; the code if it holds nothing printable."""
    return in_one_line(error.reason or "") or f"error {error.code}"


@dataclass(frozen=True)
class MachineReport:
    """What a simulation's worker says of its machine.

    host, process: its name and the worker's process id. versions: of the packages that bits depend
    on. machine: the processor of its device, such as `cpu: NAME`. capability: of the CPU, and the
    name of the GPU or none. device: such as `cuda:0`. precision: used to train the run's network;
    under "auto" it depends on the device. has_directory: whether it shares the directory of the run
    directory. data, split: the digests of the data and of its split over the clients, or "".
    """

    host: str
    process: int
    versions: str
    machine: str
    capability: str
    device: str
    precision: str
    has_directory: bool
    data: str
    split: str = ""


def machine_content(report: MachineReport) -> RecordDict:
    """The content of the reply to a preflight."""
    return RecordDict({"machine": ConfigRecord(asdict(report))})


def machine_report(content: RecordDict) -> MachineReport:
    """The report in a worker's reply."""
    record: dict[str, Any] = dict(get_record(content, "machine", ConfigRecord))
    return MachineReport(**record)


def roster_content(entry: RosterEntry) -> RecordDict:
    """The content of an answer to query."""
    return RecordDict({"roster": ConfigRecord({"entry": json.dumps(vars(entry))})})


def read_roster(message: Message) -> RosterEntry:
    """The roster entry in a reply to query; ValueError if there is none, or one out of bounds."""
    text = str(get_record(message.content, "roster", ConfigRecord).get("entry"))
    if len(text) > MAX_ROSTER_CHARACTERS:
        raise ValueError(
            f"the roster entry has {len(text)} characters, more than {MAX_ROSTER_CHARACTERS}"
        )
    try:
        sent = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the roster entry is unreadable: {in_one_line(error)}") from error
    return roster_entry(sent)


def roster_entry(sent: Any) -> RosterEntry:
    """The entry in decoded JSON; ValueError naming the client and the field that is wrong."""
    if not isinstance(sent, dict):
        raise ValueError("the roster entry is unreadable: not an object")
    client, keel = (in_one_line(sent.get(name), 64) for name in ("client", "keel"))
    if sent.get("protocol") != protocol_version:
        raise ValueError(
            f"client {client} speaks version {in_one_line(sent.get('protocol'), 64)} of the "
            f"protocol, this server {protocol_version}: install the same Keel on both (the "
            f"client's is {keel}, the server's {keel_version()})"
        )
    try:
        entry = entries.validate_python(sent)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        reason = in_one_line(f"field {place!r} of its roster entry: {wrong['msg']}")
        raise ValueError(f"client {client}: {reason}") from error
    lengths = {len(entry.label_counts), len(entry.test_label_counts)}
    if len(lengths | {len(entry.own_labels or entry.label_counts)}) > 1:
        raise ValueError(
            f"client {client}: label_counts, test_label_counts and own_labels differ in length"
        )
    return entry


entries: TypeAdapter[RosterEntry] = TypeAdapter(
    with_config(ConfigDict(extra="forbid"))(RosterEntry)
)


def payload_bytes(message: Message) -> int:
    """Bytes of the records in a message, without Flower's envelope."""
    return sum(record_bytes(record) for record in message.content.values())


def record_bytes(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    """Bytes of a record; tensors are counted as if they were packed."""
    if not isinstance(record, ArrayRecord):
        return record.count_bytes()
    return sum(
        len(name) + (array.size_bytes if isinstance(array, HandedArrays) else len(array.data))
        for name, array in record.items()
    )
