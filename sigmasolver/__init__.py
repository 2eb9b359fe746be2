"""sigmasolver: neural PDE solvers on structured grids, and how far to trust their forecasts."""

from sigmasolver.models import Options, build_model, list_models

__all__ = ["Options", "__version__", "build_model", "list_models"]
__version__ = "0.1.0"
