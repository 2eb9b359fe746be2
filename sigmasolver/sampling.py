"""Reproducible choices: random seeds derived from strings, evenly spaced indices."""

from __future__ import annotations

import hashlib

__all__ = ["evenly_spaced", "hashed_seed"]


def hashed_seed(text: str) -> int:
    """63 bits of a hash of `text`, such as "order/42/7": neighbouring numbers in it give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def evenly_spaced(count: int, limit: int) -> list[int]:
    """At most `limit` evenly spaced indices below `count`, the first and, of several, the last among them."""
    number = min(limit, count)
    if number < 2:
        return [0] * number
    # Positions are computed from the nearer end, as by `torch.linspace`. How these floats round halves decides which
    # windows recorded results are means of; integers would round some of them the other way.
    last, step = count - 1, (count - 1) / (number - 1)
    first_half = [step * index for index in range(number // 2)]
    second_half = [last - step * index for index in reversed(range(number - number // 2))]
    return [round(position) for position in (*first_half, *second_half)]
