"""Seeds from words: the numbers that runs and simulated data stand on."""

import hashlib

from sigmasolver.seeds import hashed_seed


def test_the_seed_is_the_first_eight_bytes_of_the_hash_without_the_lowest_bit():
    for text in ("order/42/0", "order/42/1", "step/42/0/0", "darcy/0/0", ""):
        digest = hashlib.sha256(text.encode()).digest()
        assert hashed_seed(text) == sum(byte * 256**place for place, byte in enumerate(digest[:8])) // 2


def test_a_recorded_value():
    """Data and runs of earlier versions are made again with it."""
    assert hashed_seed("darcy/0/0") == 4692949075405215600
