"""sigmasolver: neural PDE solvers on structured grids, and how far to trust their forecasts."""

from sigmasolver.models import Options, build_model, list_models
from sigmasolver.version import __version__

__all__ = ["Options", "__version__", "build_model", "list_models"]
