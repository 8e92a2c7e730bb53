"""Seeds of random streams: the same everywhere, and another for every name."""

import hashlib
import itertools

from protocol.seeds import seed_of


def test_a_seed_is_the_first_63_bits_of_the_hash_of_its_names():
    digits = hashlib.sha256(b"7\x1f12\x1fclient-0003\x1fbatches").hexdigest()
    bits = f"{int(digits, 16):0256b}"
    assert seed_of(7, 12, "client-0003", "batches") == int(bits[:63], 2)


def test_names_that_read_alike_in_a_row_are_other_streams():
    """Without something between the numbers, round 12 of seed 1 would be round 2 of seed 11."""
    streams = itertools.product((1, 11, 112), (1, 2, 12, 112), ("a", "1a"))
    seeds = [seed_of(*names) for names in streams]
    assert len(set(seeds)) == len(seeds)
