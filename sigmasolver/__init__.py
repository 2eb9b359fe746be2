"""sigmasolver: neural PDE solvers on structured grids, and how far to trust their forecasts."""

from typing import TYPE_CHECKING, Any

from sigmasolver.version import __version__

if TYPE_CHECKING:
    from sigmasolver.forecast.checkpoint import load
    from sigmasolver.models import Options, build_model, list_models

__all__ = ["Options", "__version__", "build_model", "list_models", "load"]


def __getattr__(name: str) -> Any:
    """Torch is loaded with the first name that needs it: the command line answers, and hears Ctrl-C, before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load":
        from sigmasolver.forecast.checkpoint import load

        return load
    from sigmasolver import models

    return getattr(models, name)
