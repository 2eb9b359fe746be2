"""Relative error and blow-up of frames, in NumPy."""

# The definitions are those of `evaluate.metrics`. They are repeated because a report must not load torch; tests compare
# both.

from __future__ import annotations

import numpy as np

from sigmasolver.report.digits import significant

__all__ = ["BLOWN_UP", "blown_up", "percent_text", "relative_l2"]

BLOWN_UP = 10.0
"""A forecast has blown up if its norm exceeds this multiple of the largest norm of the truth."""


def relative_l2(difference: np.ndarray, truth: np.ndarray) -> float:
    """‖ŷ − y‖₂ / ‖y‖₂ of one frame, from the difference ŷ − y or its magnitude."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.linalg.norm(difference.astype(np.float64)) / np.linalg.norm(truth.astype(np.float64)))


def percent_text(error: float) -> str:
    """A relative error in per cent, such as "3.14 %"; in words if it is not finite."""
    text = significant(100 * error)
    return text if text[-1].isalpha() else f"{text} %"


def blown_up(forecast: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """For each lead of (leads, ...), return whether the forecast is not finite or far larger than the truth.

    Such frames are excluded from the error scale because they would hide the errors of all others. Points at which the
    truth is not finite do not count.
    """
    known = np.isfinite(truth)
    flattened = (np.where(known, frames, 0).reshape(len(frames), -1).astype(np.float64) for frames in (forecast, truth))
    norms, true_norms = (np.linalg.norm(frames, axis=1) for frames in flattened)
    largest = true_norms.max()
    bound = BLOWN_UP * largest if largest else np.finfo(np.float64).max
    blown: np.ndarray = ~(norms <= bound)  # comparisons with NaN are false
    return blown
