"""Symmetries of equations: maps of the grid that turn solutions into solutions."""

from sigmasolver.symmetries.groups import SYMMETRIES, refuse_unsuitable, register_symmetries, symmetries_of
from sigmasolver.symmetries.maps import GridSymmetries, Isometry, SymmetryGroup, Translation

__all__ = [
    "SYMMETRIES",
    "GridSymmetries",
    "Isometry",
    "SymmetryGroup",
    "Translation",
    "refuse_unsuitable",
    "register_symmetries",
    "symmetries_of",
]
