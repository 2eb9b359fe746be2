"""Moments of values that arrive in blocks: count n, mean m and squared deviations S merge exactly (Chan et al.)."""

from __future__ import annotations

from typing import Any

__all__ = ["Moments", "merge"]

Moments = tuple[Any, Any, Any]
"""n, m, S: numbers, or NumPy or torch arrays with one entry per set of values."""


def merge(first: Moments, second: Moments) -> Moments:
    """Merge the moments of two sets of values, either of which may be empty."""
    (n1, m1, S1), (n2, m2, S2) = first, second
    n, delta = n1 + n2, m2 - m1
    divisor = n + (n == 0)  # avoid 0/0 where both are empty
    return n, m1 + delta * (n2 / divisor), S1 + S2 + delta**2 * (n1 * n2 / divisor)
