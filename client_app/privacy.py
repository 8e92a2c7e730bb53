"""Differential privacy on the client: clip an update, then add Gaussian noise."""

import numpy as np
import torch
from torch import Tensor

from client_app.round import RoundContext
from protocol.privacy import noise_sigma

Arrays = dict[str, Tensor]


def clip_to_norm(arrays: Arrays, max_norm: float) -> Arrays:
    """The arrays scaled by min(1, max_norm / their joint 2-norm)."""
    norm = torch.linalg.vector_norm(torch.stack([a.norm() for a in arrays.values()]))
    scale = (max_norm / norm).clamp(max=1.0)  # a norm of 0 gives inf, which is clamped
    return {name: a * scale for name, a in arrays.items()}


def privatise(arrays: Arrays, ctx: RoundContext) -> Arrays:
    """The arrays clipped and noised as `privacy.*` says; unchanged with epsilon 0.

    In simulation the noise comes from (seed, round, client), so that a run is repeatable. At a real
    site it comes from the operating system, because the server knows the run's seed and could
    subtract the noise. torch's generator uses 32 bits of its seed: few enough to try them all.
    """
    privacy = ctx.config.privacy
    if privacy.epsilon == 0:
        return arrays
    generator = np.random.default_rng(ctx.seed("privacy") if ctx.is_simulated else None)
    sigma = noise_sigma(privacy)
    return {
        name: a + torch.as_tensor(sigma * generator.standard_normal(a.shape)).to(a)
        for name, a in clip_to_norm(arrays, privacy.clip_norm).items()
    }
