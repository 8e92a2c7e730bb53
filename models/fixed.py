"""A module whose weights are set and read quickly, as one client after the other uses it."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn


class FixedModule(nn.Module):
    """A module that finds its submodules and tensors once.

    torch looks for them at each call, which for a small network takes longer than copying its
    weights. Assigning a submodule to it, or moving it, makes it look again; assigning one to a
    submodule does not.
    """

    @cached_property
    def _submodules(self) -> list[nn.Module]:
        return list(self.modules())

    @cached_property
    def weights(self) -> list[nn.Parameter]:
        """What `parameters` returns, outside `torch.func.functional_call`."""
        return list(self.parameters())

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers themselves, in the order and by the names of `state_dict`."""
        return dict(self.state_dict(keep_vars=True))

    def _forget(self) -> None:
        for name in ("_submodules", "weights", "tensors"):
            self.__dict__.pop(name, None)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module | Tensor):
            self._forget()
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._forget()  # buffers are replaced
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def train(self, mode: bool = True) -> Self:
        """As in `nn.Module`."""
        for module in self._submodules:
            if module.training is not mode:
                vars(module)["training"] = mode  # `__setattr__` looks for submodules first
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in `nn.Module`."""
        for parameter in self.weights:
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in `nn.Module`."""
        own = self.tensors
        is_whole = state_dict.keys() == own.keys()
        if assign or not is_whole or any(state_dict[k].shape != own[k].shape for k in own):
            self._forget()
            return super().load_state_dict(state_dict, strict, assign)  # names what is wrong
        give_back(self.weights)
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), [state_dict[name] for name in own])
        return nn.modules.module._IncompatibleKeys([], [])

    def borrow(self, arrays: Mapping[str, Tensor]) -> None:
        """`load_state_dict` for a model that is only read, with fewer copies.

        A parameter shares the memory of an array that is laid out and aligned like its own (matrix
        products of other alignment may have other last bits); others are copied unless the same
        array was copied there last. `load_state_dict` gives the model memory of its own again.
        """
        own = self.tensors
        if arrays.keys() != own.keys() or any(arrays[k].shape != own[k].shape for k in own):
            self.load_state_dict(arrays)  # names what is wrong
        new: dict[str, Tensor] = {}
        for name, tensor in own.items():
            array = arrays[name]
            if not isinstance(tensor, nn.Parameter):  # statistics, which change unnoticed
                new[name] = array
            elif is_laid_out_like(array, tensor):
                tensor.data = array.detach()
                tensor.is_borrowed = True  # type: ignore[attr-defined]
                tensor.borrowed_at = tensor._version  # type: ignore[attr-defined]
                vars(tensor).pop("copied_from", None)  # its _version stays the same
            elif not is_copy_of(array, tensor):
                new[name] = array
        give_back(own[name] for name in new)
        with torch.no_grad():
            if new:  # torch refuses empty lists
                torch._foreach_copy_([own[name] for name in new], list(new.values()))
        for name, array in new.items():
            versions = array._version, own[name]._version
            own[name].copied_from = (weakref.ref(array), versions)  # type: ignore[attr-defined]

    def hand_over(self) -> dict[str, Tensor]:
        """The tensors in contiguous memory, by name, as of now: parameters lend theirs.

        They have memory of their own again after `load_state_dict` or `own_memory`; do not change
        them before.
        """
        arrays = {}
        for name, tensor in self.tensors.items():
            if isinstance(tensor, nn.Parameter) and tensor.is_contiguous():
                arrays[name] = tensor.data
                tensor.is_borrowed = True  # type: ignore[attr-defined]
                vars(tensor).pop("borrowed_at", None)
            else:
                arrays[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return arrays


def is_borrowed(parameter: Tensor) -> bool:
    """Whether its memory belongs to somebody else too."""
    return getattr(parameter, "is_borrowed", False)


def is_overwritten(parameter: Tensor) -> bool:
    """Whether it was changed in place in the memory that `borrow` took from an array."""
    version = parameter._version
    return is_borrowed(parameter) and getattr(parameter, "borrowed_at", version) != version


def give_back(parameters: Iterable[Tensor]) -> None:
    """Replace the memory of those that are borrowed by new memory without values."""
    for parameter in parameters:
        if is_borrowed(parameter):
            parameter.data = torch.empty_like(parameter.data)
            parameter.is_borrowed = False  # type: ignore[attr-defined]


def own_memory(parameters: Iterable[Tensor]) -> None:
    """Copy those that are borrowed, so that they may be changed."""
    for parameter in parameters:
        if is_borrowed(parameter):
            parameter.data = parameter.data.clone()
            parameter.is_borrowed = False  # type: ignore[attr-defined]


def is_laid_out_like(array: Tensor, parameter: Tensor) -> bool:
    """Whether it could be the parameter's memory, aligned as torch aligns it."""
    is_alike = array.dtype == parameter.dtype and array.device == parameter.device
    return is_alike and array.stride() == parameter.stride() and array.data_ptr() % 64 == 0


def is_copy_of(array: Tensor, parameter: Tensor) -> bool:
    """Whether `borrow` copied this array there, and neither has changed since."""
    source, versions = getattr(parameter, "copied_from", (lambda: None, ()))
    return source() is array and versions == (array._version, parameter._version)
