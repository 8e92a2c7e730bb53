"""A Flower array that makes its bytes when they are first read."""

from functools import cached_property
from typing import Any

from flwr.app import Array


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
