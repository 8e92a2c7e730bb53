"""What goes through a message comes out the same; what is missing is named."""

import json
import pickle

import pytest
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from run_fixtures import FACTS

from flower_adapter import begin_task, from_bytes, to_bytes
from protocol.array_records import array_record, tensors
from protocol.arrays import DTYPES, packed_pieces
from protocol.config import resolve_config
from protocol.messages import (
    RosterRequest,
    TrainReply,
    TrainRequest,
    payload_bytes,
    read_reply,
    read_request,
    reply_content,
    request_record,
)


@pytest.fixture(autouse=True)
def _identity():
    begin_task(1)


def message(content):
    return Message(content, dst_node_id=2, message_type="train")


def arrays():
    """Floats, a 0-d counter (as batch norms have), whole numbers, bools, nothing, odd memory."""
    generator = torch.Generator().manual_seed(1)
    return {
        "stages.conv1.weight": torch.randn(2, 3, 4, 4, generator=generator).to(
            memory_format=torch.channels_last
        ),
        "stages.bn.num_batches_tracked": torch.tensor(7),
        "scalar": torch.tensor(0.25),
        "counts": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "double": torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_(),
        "transposed": torch.randn(3, 2, generator=generator).T,
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def assert_equal(received, sent):
    assert list(received) == list(sent)
    for name, array in sent.items():
        got = received[name]
        assert (got.dtype, got.shape) == (array.dtype, array.shape), name
        assert not got.requires_grad
        torch.testing.assert_close(got, array.detach(), rtol=0, atol=0, equal_nan=True)


def test_arrays_come_out_as_they_went_in():
    assert_equal(tensors(array_record(arrays())), arrays())
    assert tensors(array_record({})) == {}
    assert tensors(None) == {}


def test_arrays_are_handed_over_in_process_and_packed_to_leave_it():
    sent = torch.zeros(3)
    record = array_record({"a": sent})
    assert tensors(record)["a"].data_ptr() == sent.data_ptr()
    received = pickle.loads(pickle.dumps(record))  # as for Ray
    assert type(received["arrays"]) is Array
    assert "plain" not in vars(record["arrays"])  # its bytes, of which Ray holds its own copy
    first = tensors(received)["a"]
    first += 1
    assert tensors(received)["a"].tolist() == sent.tolist() == [0, 0, 0]


def test_flower_stores_packed_arrays_as_its_own():
    record = array_record(arrays())
    array = record["arrays"]
    plain = ArrayRecord({"arrays": Array("uint8", array.shape, array.stype, array.data)})
    assert record.object_id == plain.object_id
    assert record.deflate() == plain.deflate()
    restored = from_bytes(RecordDict, to_bytes(RecordDict({"arrays": record})))
    assert_equal(tensors(restored.array_records["arrays"]), arrays())
    size = payload_bytes(message(RecordDict({"arrays": record})))
    assert size == plain.count_bytes() == record.count_bytes()


def test_packed_bytes_are_those_of_safetensors():
    packed = {name: array.detach().contiguous() for name, array in arrays().items()}
    packed |= {f"{t}": torch.tensor([1, 0]).to(t) for t in DTYPES} | {'"é': torch.ones(2)}
    about = {"about": json.dumps({"round": 1, "é": "\n"})}
    assert b"".join(packed_pieces(packed, about)) == safetensors.torch.save(packed, about)


def test_a_request_of_another_version_names_the_field_that_is_missing():
    record = request_record(RosterRequest(resolve_config({}), FACTS))
    with pytest.raises(ValueError, match="'round'"):
        read_request(message(RecordDict({"round": record})), TrainRequest)


@pytest.mark.parametrize("missing", ["reply", "arrays", "metrics"])
def test_a_reply_that_lacks_a_record_is_refused_by_its_name(missing):
    content = reply_content(TrainReply("a", 1, {}, {}, {"num-examples": 1}))
    del content[missing]
    with pytest.raises(ValueError, match=f"'{missing}'"):
        read_reply(message(content))
