"""A fixed module does what torch's does, and shares memory only until it is loaded or trained."""

import copy

import pytest
import torch
from torch import nn

from models import FixedModule, own_memory


class Network(FixedModule):
    """A convolution in channels-last memory, statistics, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 2)


def network() -> Network:
    return Network().to(memory_format=torch.channels_last)


def arrays(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    like = network().state_dict()
    return {
        name: (torch.rand(a.shape, generator=generator) * 9).to(a.dtype) for name, a in like.items()
    }


def assert_has(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert [*found] == [*expected]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tensors_are_those_of_the_state_dict_after_a_move_and_a_new_part():
    model = network()
    assert [*model.tensors] == [*model.state_dict()]
    model.double()
    model.extra = nn.Linear(1, 1)
    assert [*model.tensors] == [*model.state_dict()]
    assert all(model.tensors[k].data_ptr() == a.data_ptr() for k, a in model.state_dict().items())
    assert [id(p) for p in model.weights] == [id(p) for p in model.parameters()]
    model.train(False).requires_grad_(False)
    assert not any(m.training for m in model.modules())
    assert not any(p.requires_grad for p in model.parameters())


def test_a_copy_has_tensors_of_its_own():
    model = network()
    model.load_state_dict(arrays(1))
    other = copy.deepcopy(model)
    other.load_state_dict(arrays(2))
    assert_has(model, arrays(1))
    assert_has(other, arrays(2))


@pytest.mark.parametrize("load", ["load_state_dict", "borrow"])
def test_wrong_arrays_are_refused_by_name(load):
    model, right = network(), arrays(1)
    for wrong, text in (
        ({k: a for k, a in right.items() if k != "linear.bias"}, "linear.bias"),
        (right | {"another": torch.zeros(1)}, "another"),
        (right | {"norm.bias": torch.zeros(1)}, "norm.bias"),  # would be broadcast
    ):
        with pytest.raises(RuntimeError, match=text):
            getattr(model, load)(wrong)


def test_a_borrowing_model_shares_what_is_laid_out_alike_until_it_is_loaded():
    model, lent = network(), arrays(1)
    model.borrow(lent)
    assert_has(model, lent)
    shared = {k for k, t in model.tensors.items() if t.data_ptr() == lent[k].data_ptr()}
    assert "linear.weight" in shared
    assert not any("running" in k or k == "conv.weight" for k in shared)
    model.load_state_dict(arrays(2))
    assert_has(model, arrays(2))
    assert all(torch.equal(lent[k], a) for k, a in arrays(1).items())


def unaligned(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = torch.cat([torch.zeros(1), arrays["linear.weight"].flatten()])[1:].view(2, 4)
    return arrays | {"linear.weight": weight}


def test_an_array_that_is_not_aligned_is_copied():
    model, lent = network(), unaligned(arrays(1))
    model.borrow(lent)
    assert_has(model, lent)
    assert model.linear.weight.data_ptr() != lent["linear.weight"].data_ptr()


def test_an_array_of_another_type_is_copied():
    model, lent = network(), arrays(1)
    model.borrow({name: array.double() for name, array in lent.items()})
    assert_has(model, lent)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_array_is_copied_anew_after_another_was_borrowed_and_not_into_the_other():
    model, copied, lent = network(), unaligned(arrays(1)), arrays(2)
    for given, seed in ((copied, 1), (lent, 2), (copied, 1)):
        model.borrow(given)
        assert_has(model, arrays(seed))
    assert all(torch.equal(lent[k], a) for k, a in arrays(2).items())


def test_what_has_changed_is_borrowed_again():
    model, lent = network(), arrays(1)
    model.borrow(lent)
    before = model.conv.weight._version
    model.borrow(lent)
    assert model.conv.weight._version == before  # not copied again
    with torch.no_grad():
        model.conv.weight.zero_()
    model.train().norm(torch.randn(2, 4, 1, 1))  # changes its statistics
    model.borrow(lent)
    assert_has(model, arrays(1))
    lent["conv.weight"].zero_()
    model.borrow(lent)
    assert not model.conv.weight.any()


@pytest.mark.parametrize("then", ["load", "borrow", "train"])
def test_what_was_handed_over_stays_as_it_was(then):
    model = network()
    model.load_state_dict(arrays(1))
    given = model.hand_over()
    assert given["linear.weight"].data_ptr() == model.linear.weight.data_ptr()
    assert all(array.is_contiguous() for array in given.values())
    if then == "load":
        model.load_state_dict(arrays(2))
    elif then == "borrow":
        model.borrow(unaligned(arrays(2)))
        assert_has(model, arrays(2))
    else:
        own_memory(model.parameters())
        assert_has(model, arrays(1))
        with torch.no_grad():
            for tensor in model.tensors.values():
                tensor.zero_()
    assert all(torch.equal(given[k], a) for k, a in arrays(1).items())
