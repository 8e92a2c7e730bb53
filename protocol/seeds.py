"""Seeds of named random streams, derived from the run's seed."""

import hashlib


def seed_of(seed: int, *names: int | str) -> int:
    """A seed in [0, 2**63) for the stream `names` of the run with this seed.

    The same on every machine and in every process; streams with different names are independent.
    Example: seed_of(run_seed, round, client, "batches").
    """
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
