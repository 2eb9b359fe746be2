"""sigmasolver: neural PDE solvers on structured grids, and how far to trust their forecasts."""

from typing import TYPE_CHECKING, Any

from sigmasolver.models import Options, build_model, list_models
from sigmasolver.version import __version__

if TYPE_CHECKING:
    from sigmasolver.trained import load

__all__ = ["Options", "__version__", "build_model", "list_models", "load"]


def __getattr__(name: str) -> Any:
    """`load` needs the readers of runs and normalisers, which building a model does not: imported when first used."""
    if name == "load":
        from sigmasolver.trained import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
