"""Arrays by name: what is wrong with those of an update, and how they are packed.

The bytes are those of the package safetensors, in pieces, so that no second copy is made; a test
compares them.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from protocol.text import num_of

Arrays = dict[str, Tensor]
# what reading a damaged safetensors file raises
UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
MAX_INTEGER = 2**40  # of a counter
Shape = tuple[str, torch.dtype, torch.Size]  # of an array: its name, dtype and shape
Shapes = tuple[Shape, ...]
Pieces = list[Any]  # bytes and NumPy arrays of bytes: what `bytes.join` and `write` take
# Names of the format, in the order in which it stores tensors: from the last to the first.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES)}
PACKED = "keel.safetensors"  # `Array.stype` of what `array_record` makes
MAX_HEADER_BYTES = 2**22  # names, shapes and offsets of some ten thousand tensors


def all_finite(arrays: Arrays) -> bool:
    """Whether no array holds a NaN or an infinity."""
    return all(is_finite(a) for a in arrays.values() if a.is_floating_point())


def is_finite(array: Tensor) -> bool:
    """Whether a floating array holds no NaN and no infinity."""
    return all(map(math.isfinite, extremes(array)))


def extremes(array: Tensor) -> tuple[float, float]:
    """(smallest, largest) value, both NaN if one is; (0, 0) of none. One pass over the memory."""
    if not array.numel():
        return 0.0, 0.0
    low, high = array.detach().aminmax()
    return float(low), float(high)


def limit_of(name: str, array: Tensor, limits: Mapping[str, float]) -> float:
    """The largest magnitude of a value in this array, of which `limits` has the floating ones."""
    return limits[name] if array.is_floating_point() else MAX_INTEGER


def out_of_range(arrays: Arrays, limits: Mapping[str, float]) -> str:
    """The array with a value above its limit, or a negative variance or count; "" for none."""
    for name, array in arrays.items():
        if not array.numel():
            continue
        low, high = extremes(array)
        if name.endswith("running_var") and low < 0:
            return f"array {name!r} holds negative variances"
        if name.endswith("num_batches_tracked") and low < 0:
            return f"array {name!r} holds negative counts"
        largest = max(high, -low)
        bound = limit_of(name, array, limits)
        if not largest <= bound:
            return (
                f"array {name!r} holds {largest:.4g}: the bound on values is {bound:.4g}; lower lr "
                "or the method's own learning rates if training diverges"
            )
    return ""


def mismatch(arrays: Arrays, expected: Arrays, with_values: bool = True) -> str:
    """What is wrong with these arrays; "" if names, shapes and dtypes agree and all are finite.

    with_values: also check that the values are finite.
    """
    missing = sorted(expected.keys() - arrays.keys())
    if missing:
        return f"array {missing[0]!r} is missing ({len(missing)} of {len(expected)})"
    unknown = sorted(arrays.keys() - expected.keys())
    if unknown:
        return f"array {unknown[0]!r} is unknown ({len(unknown)} too many)"
    for name, like in expected.items():
        got = arrays[name]
        if got.shape != like.shape:
            return f"array {name!r} is {list(got.shape)}, expected {list(like.shape)}"
        if got.dtype != like.dtype:
            return f"array {name!r} is {got.dtype}, expected {like.dtype}"
        if with_values and got.is_floating_point() and not is_finite(got):
            num = int((~got.isfinite()).sum())
            is_or_are = "is" if num == 1 else "are"
            return f"array {name!r} holds {num_of('value', num)} that {is_or_are} not finite"
    return ""


def packed_pieces(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Pieces:
    """The header, then each tensor's memory; joined, a safetensors file.

    A tensor on the CPU and contiguous is not copied: do not modify it before the pieces are used.
    """
    tensors = {name: array.detach().cpu().contiguous() for name, array in arrays.items()}
    shapes = in_order((name, array.dtype, array.shape) for name, array in tensors.items())
    return [
        header(shapes, tuple(metadata.items())),
        *(tensors[name].reshape(-1).view(torch.uint8).numpy() for name, *_ in shapes),
    ]


def in_order(shapes: Iterable[Shape]) -> Shapes:
    """In the order in which the format stores them."""
    return tuple(sorted(shapes, key=lambda each: (-RANKS[each[1]], each[0].encode())))


@lru_cache(maxsize=16)  # the same in every message of a run
def header(shapes: Shapes, metadata: Sequence[tuple[str, str]]) -> bytes:
    """The file's first bytes: the length of what follows, names, dtypes, shapes and places."""
    about: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in shapes:
        start, end = end, end + shape.numel() * dtype.itemsize
        about[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def names_of(names: Iterable[str]) -> dict[str, str]:
    """The metadata of packed arrays: their names in order, which safetensors changes."""
    return {"names": json.dumps([*names])}


@lru_cache(maxsize=16)  # the same in every message of a run
def packed_size(shapes: Shapes) -> int:
    """Bytes of packed arrays of these names, dtypes and shapes."""
    metadata = names_of(name for name, *_ in shapes)
    num_bytes = sum(shape.numel() * dtype.itemsize for _, dtype, shape in shapes)
    return len(header(in_order(shapes), tuple(metadata.items()))) + num_bytes


def unpacked(content: bytes) -> tuple[Arrays, dict[str, str]]:
    """(arrays, metadata) in bytes of the safetensors format. Raises UNREADABLE for others."""
    length = int.from_bytes(content[:8], "little")
    return load(content), json.loads(content[8 : 8 + length])["__metadata__"]
