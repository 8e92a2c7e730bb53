"""The checks of `keel check-method` of a local objective's loss, on one batch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm as total_norm

from client_app.methods import method_of
from client_app.objective import LocalObjective, ObjectiveLoss
from client_app.samples import Pixels, Step
from client_app.setup import model_for, open_source
from keel.method_subject import NotApplicable, Subject, require
from protocol.arrays import Arrays


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Networks built meanwhile have float64 weights."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


class Float64Pixels(Pixels):
    """Normalised images in float64."""

    def normalise(self, images: Tensor) -> Tensor:
        """[B, C, H, W] of pixels 0..255 as float64."""
        return super().normalise(images).double()


def objective_and_state(subject: Subject) -> tuple[LocalObjective, dict[str, Arrays]]:
    """The objective, and its client state after round 1. NotApplicable to a local procedure."""
    objective = method_of(subject.config())
    if not isinstance(objective, LocalObjective):
        raise NotApplicable("a local procedure is not one loss on one model")
    return objective, subject.trained(subject.config()).state if objective.is_stateful else {}


class Loss:
    """The loss of a local objective on one batch in round 2, in float64, as a function of w."""

    def __init__(self, subject: Subject) -> None:
        config = subject.config()
        objective, trained = objective_and_state(subject)
        state = {
            group: {n: a.double() if a.is_floating_point() else a for n, a in arrays.items()}
            for group, arrays in trained.items()
        }
        with in_float64():
            ctx = subject.round(config, 2, state)
            pixels = ctx.train_samples.pixels
            ctx.train_samples.pixels = Float64Pixels(pixels.mean, pixels.std)
            self.constants = [
                array.requires_grad_()
                for arrays in (ctx.received, *ctx.state.values())
                for array in arrays.values()
                if array.is_floating_point()
            ]
            self.model = ctx.model
            self.model.load_state_dict(model_for(config, open_source(config), seed=3).state_dict())
            self.model.train().requires_grad_(True)
            self.loss = ObjectiveLoss(objective, ctx, self.model)
            self.step = next(ctx.steps("check", 1))

    def value(self, step: Step | None = None) -> Tensor:
        """Sum of the loss terms, with the same dropout masks at every call."""
        torch.manual_seed(0)
        with in_float64():
            terms = self.loss(*self.loss.inputs(step or self.step)).values()
        self.is_float64 = all(term.dtype is torch.float64 for term in terms)
        return torch.stack([term.double() for term in terms]).sum()


def loss_terms_are_scalars(subject: Subject) -> None:
    """Layers have names of the network's, loss terms are scalars, and one has a gradient."""
    objective, state = objective_and_state(subject)
    ctx = subject.round(subject.config(), 2, state)
    name, model = type(objective).__name__, ctx.model.train().requires_grad_(True)
    model.load_state_dict(ctx.initial_weights() | ctx.received)
    layers = objective.layers(model)
    require(
        isinstance(layers, list | tuple) and set(layers) <= set(model.layer_names),
        f"{name}.layers returned {layers!r}: expected a list of {', '.join(model.layer_names)}",
    )
    loss = ObjectiveLoss(objective, ctx, model)
    terms: dict[str, Any] = dict(loss(*loss.inputs(next(ctx.steps("check", 1)))))
    for function, term in terms.items():
        found = list(term.shape) if isinstance(term, Tensor) else type(term).__name__
        require(
            isinstance(term, Tensor) and term.dim() == 0,
            f"{name}.{function} returned {found}: expected a scalar Tensor; for no penalty, "
            "batch.logits.new_zeros(())",
        )
    require(
        any(term.requires_grad for term in terms.values()),
        f"the loss ({' + '.join(terms)}) depends on no weight that is trained: compute it from the "
        "model's outputs, without detach",
    )


def gradient_is_correct(subject: Subject) -> None:
    """The gradient is finite and equals central differences along three directions."""
    loss = Loss(subject)
    detaches = loss.loss.objective.detaches
    parameters = list(loss.model.parameters())
    loss.value().backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    require(all(bool(g.isfinite().all()) for g in found), "the gradient is not finite")
    if detaches:
        raise NotApplicable("detaches = True: a part of the loss is a constant on purpose")
    start = [p.detach().clone() for p in parameters]
    # a method may compute in float32 whatever it is given
    step, tolerance = (1e-6, 1e-4) if loss.is_float64 else (1e-3, 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        random = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
        direction = [
            g / total_norm(found).clamp_min(1e-12) + r / total_norm(random)
            for g, r in zip(found, random, strict=True)
        ]
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, p_0, d in zip(parameters, start, direction, strict=True):
                    p.copy_(p_0 + sign * step * d)
            values.append(loss.value().item())
        expected = (values[0] - values[1]) / (2 * step)
        along = sum((g * d).sum().item() for g, d in zip(found, direction, strict=True))
        require(
            abs(along - expected) <= tolerance * max(abs(expected), 1e-3),
            f"autograd gives {along:.6g} along a direction, finite differences {expected:.6g}; "
            "if the loss detaches a part on purpose, set detaches: ClassVar[bool] = True",
        )


def frozen_models_get_no_gradient(subject: Subject) -> None:
    """Received arrays and client state get no gradient."""
    loss = Loss(subject)
    loss.value().backward()  # type: ignore[no-untyped-call]
    touched = [array for array in loss.constants if array.grad is not None]
    require(not touched, "a gradient reaches the received arrays or the client state: detach them")


def batch_order_is_irrelevant(subject: Subject) -> None:
    """The loss of a permuted batch is the same, up to rounding."""
    loss = Loss(subject)
    step = loss.step
    before = torch.get_rng_state()
    with torch.no_grad():
        loss.model(step.x)
    if not torch.equal(before, torch.get_rng_state()):
        raise NotApplicable("the network draws random numbers for each sample, as dropout does")
    order = torch.randperm(len(step.y), generator=torch.Generator().manual_seed(0))
    permuted = Step(step.x[order], step.y[order], step.index[order], step.variant[order])
    first, second = loss.value().item(), loss.value(permuted).item()
    require(
        abs(first - second) <= (1e-9 if loss.is_float64 else 1e-5) * abs(first),
        f"the loss is {first:.10g}, and {second:.10g} after permuting the batch",
    )
