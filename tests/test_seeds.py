"""`hashed_seed`, which determines runs and simulated data."""

import hashlib

from sigmasolver.seeds import hashed_seed


def test_hashed_seed_is_63_bits_of_the_hash():
    for text in ("order/42/0", "order/42/1", "step/42/0/0", "darcy/0/0", ""):
        digest = hashlib.sha256(text.encode()).digest()
        assert hashed_seed(text) == sum(byte * 256**position for position, byte in enumerate(digest[:8])) // 2


def test_hashed_seed_recorded_value():
    """Data and runs of earlier versions must stay reproducible."""
    assert hashed_seed("darcy/0/0") == 4692949075405215600
