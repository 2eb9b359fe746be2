"""How numbers are written: three significant digits, and words for what is not a number."""

from __future__ import annotations

import math

__all__ = ["NOT_FINITE", "significant", "spread"]

NOT_FINITE = "not finite"
_PLAIN = range(-5, 6)
"""Decimal exponents that are written out; beyond them the exponent is shown."""


def significant(value: float) -> str:
    """Three significant digits: 0.873, 1.20, 12.3, 1230, 1.23e+06."""
    if not math.isfinite(value):
        return NOT_FINITE
    decimals = _decimals(value)
    return f"{value:.2e}" if decimals is None else f"{float(f'{value:.2e}'):.{decimals}f}"


def spread(mean: float, deviation: float) -> str:
    """mean ± deviation, the deviation to the decimals of the mean."""
    if not math.isfinite(mean):
        return NOT_FINITE
    decimals = _decimals(mean)
    second = f"{deviation:.2e}" if decimals is None else f"{deviation:.{decimals}f}"
    return f"{significant(mean)} ± {second}"


def _decimals(value: float) -> int | None:
    """Decimals that show three digits; None where the number is written with an exponent."""
    if value == 0:
        return 2
    exponent = int(f"{value:.2e}".partition("e")[2])
    return max(0, 2 - exponent) if exponent in _PLAIN else None
