"""A run as one file for other programs: history in physical units to the next block in physical units."""

from sigmasolver.export.formats import FORMATS
from sigmasolver.export.run import Exported, export_run

__all__ = ["FORMATS", "Exported", "export_run"]
