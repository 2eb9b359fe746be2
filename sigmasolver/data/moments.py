"""Moments of values that come in parts: count n, mean m and squared deviations S merge exactly (Chan and others)."""

from __future__ import annotations

from typing import Any

__all__ = ["Moments", "merge"]

Moments = tuple[Any, Any, Any]
"""n, m, S: numbers, or arrays of NumPy or torch with one entry for each set of values."""


def merge(first: Moments, second: Moments) -> Moments:
    """The moments of all values from those of two parts, of which either may be empty."""
    (n1, m1, S1), (n2, m2, S2) = first, second
    n, delta = n1 + n2, m2 - m1
    divisor = n + (n == 0)  # where both are empty nothing is added
    return n, m1 + delta * (n2 / divisor), S1 + S2 + delta**2 * (n1 * n2 / divisor)
