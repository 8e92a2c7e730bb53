"""Tensors as one Flower array in the safetensors format, packed when they leave the process.

Within the process the receiver gets the sender's tensors.
"""

import json
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any

from flwr.app import Array, ArrayRecord
from safetensors.torch import load

from protocol.arrays import Arrays
from protocol.packing import Pieces, Shapes, packed_pieces, packed_size

PACKED = "keel.safetensors"  # `Array.stype` of what `array_record` makes
MAX_HEADER_BYTES = 2**22  # names, shapes and offsets of some ten thousand tensors


def of_plain(name: str) -> Any:
    """This attribute of a `LazyArray`, which is that of its plain array."""
    return property(lambda array: getattr(array.plain, name))


class LazyArray(Array):
    """An array whose bytes are made from `pieces` when they are first read.

    Flower reads them to send a message (`deflate`, `children`, `object_id`, protobuf) or to pickle
    it for Ray; each then has an `Array` with these bytes, because Flower writes the name of the
    class down. Public, except for the names of these methods.
    """

    def __init__(self, dtype: str, stype: str) -> None:
        self.__dict__.update(dtype=dtype, stype=stype)

    def pieces(self) -> list[Any]:
        """The bytes in pieces, as `bytes.join` takes them."""
        raise NotImplementedError

    @cached_property
    def plain(self) -> Array:
        """The array with its bytes, made once."""
        data = b"".join(self.pieces())
        return Array(self.dtype, (len(data),), self.stype, data)

    data, shape = of_plain("data"), of_plain("shape")
    children, object_id = of_plain("children"), of_plain("object_id")
    slice_array, deflate = of_plain("slice_array"), of_plain("deflate")

    def __reduce__(self) -> Any:
        if "plain" in self.__dict__:
            return Array, (self.dtype, self.shape, self.stype, self.data)
        data = b"".join(self.pieces())  # not cached: Ray holds its own copy from here on
        return Array, (self.dtype, (len(data),), self.stype, data)


def names_of(names: Iterable[str]) -> dict[str, str]:
    """The metadata of packed arrays: their names in order, which safetensors changes."""
    return {"names": json.dumps([*names])}


@lru_cache(maxsize=16)  # the same in every message of a run
def size_of(shapes: Shapes) -> int:
    """Bytes of packed arrays of these names, dtypes and shapes."""
    return packed_size(shapes, names_of(name for name, *_ in shapes))


class HandedArrays(LazyArray):
    """Tensors as one Flower array; it makes its bytes once they are read, to leave the process."""

    def __init__(self, arrays: Arrays) -> None:
        self.__dict__["arrays"] = {
            name: (array.detach() if array.requires_grad else array).cpu().contiguous()
            for name, array in arrays.items()
        }
        super().__init__("uint8", PACKED)

    def pieces(self) -> Pieces:
        """The bytes in pieces: the tensors' own memory."""
        arrays: Arrays = self.__dict__["arrays"]
        return packed_pieces(arrays, names_of(arrays))

    @cached_property
    def size_bytes(self) -> int:
        """The number of bytes, without making them."""
        arrays: Arrays = self.__dict__["arrays"]
        return size_of(tuple((name, a.dtype, a.shape) for name, a in arrays.items()))


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
        names = json.loads(json.loads(array.data[8 : 8 + length])["__metadata__"]["names"])
        values = load(array.data)
        if set(names) != values.keys() or values.keys() & found.keys():
            raise ValueError(f"{name!r} holds other arrays than it names")
        found |= {key: values[key] for key in names}
    return found
