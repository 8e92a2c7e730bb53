"""Arrays by name, and what is wrong with those of an update."""

import math
from collections.abc import Mapping

from safetensors import SafetensorError
from torch import Tensor

from protocol.text import num_of

Arrays = dict[str, Tensor]
# what reading a damaged safetensors file raises
UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
MAX_INTEGER = 2**40  # of a counter


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
