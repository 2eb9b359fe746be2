"""Export a run to one file for other programs: from history to next block, both in physical units."""

from sigmasolver.export.formats import FORMATS
from sigmasolver.export.run import Exported, export_run

__all__ = ["FORMATS", "Exported", "export_run"]
