"""Makes a release private before it leaves the client: clips, rounds to a grid, adds noise."""

import math
import os
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from client_app.round import RoundContext
from protocol.arrays import Arrays
from protocol.discrete_gaussian import Words, discrete_gaussian
from protocol.privacy import granularity, noise_sigma


def random_words(num: int) -> npt.NDArray[np.uint64]:
    """`num` random 64-bit words from the operating system."""
    return np.frombuffer(os.urandom(8 * num), np.uint64)


def seeded_words(seed: int) -> Words:
    """A source of random 64-bit words that repeats with the seed, for simulation."""
    generator = np.random.default_rng(seed)
    return lambda num: generator.integers(0, 2**64, num, dtype=np.uint64)


def clip_to_grid(
    values: npt.NDArray[np.float64], max_norm: float, step: float
) -> npt.NDArray[np.int64]:
    """The values, scaled by min(1, max_norm / their 2-norm), in whole steps (a power of two).

    Rounded towards zero; that the norm is at most max_norm is checked in whole numbers. Values
    that are not finite make all values zero: a refusal would reveal something about the data.
    """
    if not np.isfinite(values).all():
        values = np.zeros_like(values)
    norm = float(np.linalg.norm(values))
    scale = min(1.0, max_norm / norm) if norm else 1.0
    limit = Fraction(max_norm / step) ** 2
    while True:
        steps = np.trunc(values * scale / step).astype(np.int64)
        if int(np.dot(steps, steps)) <= limit:
            return steps
        scale = min(scale * (1 - 2.0**-40), math.nextafter(scale, 0))  # a denormal rounds back


def privatise(arrays: Arrays, ctx: RoundContext) -> Arrays:
    """The arrays, clipped and noised as `privacy.*` specifies; unchanged with epsilon 0.

    One release: a method calls it once in a round, with all that it sends (`check_released`).
    Every value is a multiple of `granularity`; beyond 2^24 multiples it is rounded to the nearest
    float32, which is one too. In simulation the noise comes from (seed, round, client), so a run
    repeats. A real site's comes from the operating system: the server knows the run's seed and
    could subtract the noise.
    """
    privacy = ctx.config.privacy
    if privacy.epsilon == 0:
        return arrays
    flat = torch.cat([a.detach().cpu().double().flatten() for a in arrays.values()]).numpy()
    ctx.releases.append(flat.size)
    step = granularity(privacy, flat.size)
    words = seeded_words(ctx.seed("privacy")) if ctx.is_simulated else random_words
    steps = clip_to_grid(flat, privacy.clip_norm, step)
    steps += discrete_gaussian(noise_sigma(privacy) / step, flat.size, words)
    parts = torch.split(torch.from_numpy(steps * step), [a.numel() for a in arrays.values()])
    return {
        name: part.reshape(a.shape).to(a)
        for (name, a), part in zip(arrays.items(), parts, strict=True)
    }
