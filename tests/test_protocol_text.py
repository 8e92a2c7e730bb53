"""The sanitiser and the reading of replies hold for any bytes a client can send."""

import json
import math
import unicodedata
from string import ascii_letters, digits

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_protocol_messages import message

from protocol.array_records import array_record
from protocol.arrays import PACKED
from protocol.messages import (
    MAX_METRICS,
    RosterEntry,
    TrainReply,
    payload_bytes,
    read_reply,
    read_roster,
    reply_content,
)
from protocol.text import check_client_name, in_one_line, is_client_name

pytestmark = pytest.mark.usefixtures("task_identity")
any_text = st.text(st.characters(exclude_categories=()), max_size=500)  # with surrogates


@given(any_text, st.integers(2, 400))
def test_what_the_sanitiser_leaves_is_one_short_printable_line(text, max_length):
    line = in_one_line(text, max_length)
    assert len(line) <= max_length
    assert {unicodedata.category(c) for c in line} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"} == set()
    assert not set(line) & set("<>\x1b\n\r")
    line.encode()  # no surrogates
    assert in_one_line(line, max_length) == line


@given(st.one_of(any_text, st.integers(), st.none()))
def test_a_client_name_is_safe_in_a_path_or_refused_in_one_line(name):
    if is_client_name(name):
        assert set(name) <= set(ascii_letters + digits + "._-")
        assert 1 <= len(name) <= 64
        assert name.strip(".")
        return
    with pytest.raises(ValueError) as caught:
        check_client_name(name)
    assert "\n" not in str(caught.value)


# --- replies --------------------------------------------------------------------------------------

scalars = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=20), st.binary()
)
names = st.one_of(
    st.sampled_from(["client", "round", "entry", "arrays", "extra", "metrics", "num-examples"]),
    st.text(max_size=80),
)
good = bytes(
    array_record({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)})["arrays"].data
)


@st.composite
def mutated(draw):
    """A packed array with some bytes changed, inserted or cut."""
    content = bytearray(good)
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(content)


arrays = st.builds(
    lambda stype, data: Array("uint8", (len(data),), stype, data),
    st.sampled_from([PACKED, "numpy.ndarray"]),
    st.one_of(mutated(), st.binary(max_size=60)),
)
records = st.one_of(
    st.builds(ConfigRecord, st.dictionaries(names, scalars, max_size=4)),
    st.builds(
        MetricRecord,
        st.dictionaries(
            names, st.one_of(st.floats(), st.lists(st.floats(), max_size=2)), max_size=4
        ),
    ),
    st.builds(ArrayRecord, st.dictionaries(names, arrays, max_size=3)),
)


@st.composite
def contents(draw):
    """A reply in which any record may be missing, of another kind, or anything."""
    content = reply_content(TrainReply("a", 1, {"a": torch.ones(3)}, {}, {"num-examples": 3.0}))
    for name in draw(st.sets(st.sampled_from(["reply", "metrics", "arrays", "extra", "roster"]))):
        content.pop(name, None)
        if record := draw(st.none() | records):
            content[name] = record
    return content


def outcome(read):
    """(what is read, why it is rejected): nothing but a ValueError may be raised."""
    try:
        return read(), ""
    except ValueError as error:
        return None, str(error)


any_time = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=25)  # 30 ms each


@any_time
@given(contents())
def test_any_reply_is_read_or_rejected_in_one_line(content):
    reply, reason = outcome(lambda: read_reply(message(content), 10_000))
    assert in_one_line(reason) == reason
    if reply:
        assert all(isinstance(value, float) for value in reply.metrics.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
entry = RosterEntry("site-a", [3, 4], [1, 2], [1, 28, 28], "cnn", 8, "flwr 1", 0)


@any_time
@given(
    st.dictionaries(st.sampled_from([*vars(entry)]), json_values, max_size=3), st.text(max_size=99)
)
@example({"label_counts": [1.5, 2]}, "")
@example({"label_counts": [-1, 2]}, "")
@example({"label_counts": [10]}, "")  # others than test_label_counts
@example({"image_shape": [10] * 100_000}, "")
@example({"num_partitions": "2"}, "")
@example({"representation_width": True}, "")
def test_any_roster_entry_is_read_or_rejected_in_one_line_that_names_what_is_odd(changes, text):
    def read(sent):
        asked = message(RecordDict({"roster": ConfigRecord({"entry": sent})}))
        found, reason = outcome(lambda: read_roster(asked))
        assert in_one_line(reason, 1000) == reason
        return found, reason

    found, reason = read(json.dumps(vars(entry) | changes))
    if found:
        assert is_client_name(found.client)
        assert in_one_line(found.versions) == found.versions
        assert isinstance(found.model, str)
        assert len(found.label_counts) == len(found.test_label_counts)
        assert len(found.image_shape) == 3
        counts = *found.label_counts, *found.test_label_counts, *found.image_shape
        counts = *counts, found.num_partitions, found.representation_width
        assert all(type(count) is int and count >= 0 for count in counts)
    else:
        assert any(name in reason for name in changes)
    for sent in (json.dumps(changes), text):
        read(sent)


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({f"m{i}": 1.0 for i in range(MAX_METRICS + 1)}, "257"),
        ({"x" * 65: 1.0}, "x{65}"),
        ({"loss\n": 1.0}, "loss"),
        ({"loss.": 1.0}, r"loss\."),  # as "loss/": MLflow takes none of the round's figures then
    ],
)
def test_metrics_over_their_bounds_are_rejected_by_name(metrics, named):
    with pytest.raises(ValueError, match=named):
        read_reply(message(reply_content(TrainReply("a", 1, {}, {}, metrics))))


def test_a_reply_over_its_size_is_rejected_before_its_arrays_are_read(monkeypatch):
    sent = message(reply_content(TrainReply("a", 1, {"a": torch.ones(3)}, {}, {"n": math.nan})))
    size = payload_bytes(sent)
    assert read_reply(sent, size).round == 1
    monkeypatch.setattr("protocol.messages.tensors", lambda record: pytest.fail("read"))
    with pytest.raises(ValueError, match=str(size)):
        read_reply(sent, size - 1)
