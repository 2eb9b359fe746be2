"""Random seeds derived from strings."""

from __future__ import annotations

import hashlib

__all__ = ["hashed_seed"]


def hashed_seed(text: str) -> int:
    """63 bits of a hash of `text`, such as "order/42/7": neighbouring numbers in it give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
