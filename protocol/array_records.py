"""Tensors as one Flower array of a message, packed when they leave the process.

Within the process the receiver gets the tensors of the sender. Apart from `arrays`, so that the
options of a method are checked without importing Flower.
"""

import json
from functools import cached_property
from typing import Any

from flwr.app import Array, ArrayRecord

from protocol.arrays import (
    MAX_HEADER_BYTES,
    PACKED,
    Arrays,
    names_of,
    packed_pieces,
    packed_size,
    unpacked,
)


def of_plain(name: str) -> Any:
    """This attribute of `HandedArrays`, which is that of its plain array."""
    return property(lambda array: getattr(array.plain, name))


class HandedArrays(Array):
    """Tensors as one Flower array; it makes its bytes once they are read, to leave the process.

    Flower reads them to send a message (`deflate`, `children`, `object_id`, protobuf) or to pickle
    it for Ray; each then has an `Array` with these bytes, because Flower writes the name of the
    class down. Public, except for the names of these methods.
    """

    def __init__(self, arrays: Arrays) -> None:
        handed = {
            name: (array.detach() if array.requires_grad else array).cpu().contiguous()
            for name, array in arrays.items()
        }
        self.__dict__.update(dtype="uint8", stype=PACKED, arrays=handed)

    def packed(self) -> Array:
        """The array with its bytes."""
        arrays: Arrays = self.__dict__["arrays"]
        data = b"".join(packed_pieces(arrays, names_of(arrays)))
        return Array(self.dtype, (len(data),), self.stype, data)

    @cached_property
    def plain(self) -> Array:
        """The array with its bytes, made once."""
        return self.packed()

    data, shape = of_plain("data"), of_plain("shape")
    children, object_id = of_plain("children"), of_plain("object_id")
    slice_array, deflate = of_plain("slice_array"), of_plain("deflate")

    def __reduce__(self) -> Any:
        # not cached: Ray holds its own copy from here on
        array = self.plain if "plain" in self.__dict__ else self.packed()
        return Array, (array.dtype, array.shape, array.stype, array.data)

    @cached_property
    def size_bytes(self) -> int:
        """The number of bytes, without making them."""
        arrays: Arrays = self.__dict__["arrays"]
        return packed_size(tuple((name, a.dtype, a.shape) for name, a in arrays.items()))


def array_record(arrays: Arrays, name: str = "arrays") -> ArrayRecord:
    """Tensors as one Flower array called `name`, in the safetensors format; do not modify them.

    A SuperLink stores two objects for each Flower array, at ten or more database statements an
    object: sent one by one, a network's arrays would be most of the cost of a round in deployment.
    """
    record = ArrayRecord()
    if arrays:
        record[name] = HandedArrays(arrays)  # the constructor would make a copy of its bytes
    return record


def joined(*records: ArrayRecord) -> ArrayRecord:
    """One record with the arrays of all."""
    whole = ArrayRecord()
    for record in records:
        for name, array in record.items():
            whole[name] = array
    return whole


def tensors(record: ArrayRecord | None) -> Arrays:
    """The tensors in a record, in their order; {} for none. Do not modify them.

    A record that was made in this process has the sender's tensors. Bytes sent by a client may
    raise any exception here, not only ValueError.
    """
    found: Arrays = {}
    for name, array in (record or {}).items():
        if isinstance(array, HandedArrays):
            found |= array.__dict__["arrays"]
            continue
        length = int.from_bytes(array.data[:8], "little")
        if array.stype != PACKED or length > MAX_HEADER_BYTES:
            raise ValueError(f"{name!r} holds no arrays packed by Keel")
        values, about = unpacked(array.data)
        names = json.loads(about["names"])
        if set(names) != values.keys() or values.keys() & found.keys():
            raise ValueError(f"{name!r} holds other arrays than it names")
        found |= {key: values[key] for key in names}
    return found
