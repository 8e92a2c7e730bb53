"""Tensors as bytes in the safetensors format, in pieces, so that no second copy is made.

The bytes are those of the package safetensors, which reads them; a test compares them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

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


def packed_pieces(arrays: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Pieces:
    """The header, then each tensor's memory; joined, a safetensors file.

    A tensor on the CPU and contiguous is not copied: do not modify it before the pieces are used.
    """
    tensors = {name: array.detach().cpu().contiguous() for name, array in arrays.items()}
    shapes = in_order((name, array.dtype, array.shape) for name, array in tensors.items())
    return [
        header(shapes, None if metadata is None else tuple(metadata.items())),
        *(tensors[name].reshape(-1).view(torch.uint8).numpy() for name, *_ in shapes),
    ]


def packed_size(shapes: Iterable[Shape], metadata: Mapping[str, str]) -> int:
    """The number of bytes of `packed_pieces`, for arrays of these names, dtypes and shapes."""
    ordered = in_order(shapes)
    num_bytes = sum(shape.numel() * dtype.itemsize for _, dtype, shape in ordered)
    return len(header(ordered, tuple(metadata.items()))) + num_bytes


def in_order(shapes: Iterable[Shape]) -> Shapes:
    """In the order in which the format stores them."""
    return tuple(sorted(shapes, key=lambda each: (-RANKS[each[1]], each[0].encode())))


@lru_cache(maxsize=16)  # the same in every message of a run
def header(shapes: Shapes, metadata: Sequence[tuple[str, str]] | None) -> bytes:
    """The file's first bytes: the length of what follows, names, dtypes, shapes and places."""
    about: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in shapes:
        start, end = end, end + shape.numel() * dtype.itemsize
        about[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
