"""Format numbers: three significant digits, and "not finite" for NaN and infinity."""

from __future__ import annotations

import math

__all__ = ["NOT_FINITE", "significant", "spread"]

NOT_FINITE = "not finite"
_FIXED_POINT = range(-5, 6)
"""Decimal exponents written in fixed-point notation; numbers outside use scientific notation."""


def significant(value: float) -> str:
    """Format with three significant digits: 0.873, 1.20, 12.3, 1230, 1.23e+06."""
    if not math.isfinite(value):
        return NOT_FINITE
    decimals = _decimals(value)
    return f"{value:.2e}" if decimals is None else f"{float(f'{value:.2e}'):.{decimals}f}"


def spread(mean: float, deviation: float) -> str:
    """Format mean ± deviation, the deviation with the decimals of the mean."""
    if not math.isfinite(mean):
        return NOT_FINITE
    decimals = _decimals(mean)
    text = f"{deviation:.2e}" if decimals is None else f"{deviation:.{decimals}f}"
    return f"{significant(mean)} ± {text}"


def _decimals(value: float) -> int | None:
    """Decimals for three significant digits; None for scientific notation."""
    if value == 0:
        return 2
    exponent = int(f"{value:.2e}".partition("e")[2])
    return max(0, 2 - exponent) if exponent in _FIXED_POINT else None
