"""What makes a release private before it leaves the client: clip, then add Gaussian noise."""

import secrets

import torch
from torch import Tensor

from client_app.round import ClientRound
from protocol.privacy import noise_sigma

Arrays = dict[str, Tensor]


def clip_to_norm(arrays: Arrays, max_norm: float) -> Arrays:
    """The arrays scaled by min(1, max_norm / their joint 2-norm)."""
    norm = torch.linalg.vector_norm(torch.stack([a.norm() for a in arrays.values()]))
    scale = (max_norm / norm).clamp(max=1.0)  # a norm of 0 gives inf, clamped: nothing to clip
    return {name: a * scale for name, a in arrays.items()}


def privatise(arrays: Arrays, now: ClientRound) -> Arrays:
    """The release that the run's `privacy.*` asks for; the arrays as they are with epsilon 0.

    In simulation the noise comes from (seed, round, client), so a run repeats. A real site draws
    its seed from the operating system: the server knows the run's seed and could subtract it.
    """
    privacy = now.config.privacy
    if privacy.epsilon == 0:
        return arrays
    seed = now.seed("privacy") if now.is_simulated else secrets.randbits(63)
    generator = torch.Generator().manual_seed(seed)
    sigma = noise_sigma(privacy)
    return {
        name: a + sigma * torch.randn(a.shape, generator=generator).to(a.device)
        for name, a in clip_to_norm(arrays, privacy.clip_norm).items()
    }
