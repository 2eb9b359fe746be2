"""sigmasolver: neural PDE solvers on structured grids, and how far to trust their forecasts.

The names below are the public API; docs/api.md shows them at work. Each is loaded when it is first used, so
`import sigmasolver` is quick and does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sigmasolver.version import __version__

if TYPE_CHECKING:
    from sigmasolver.api import (
        diagnose_run,
        evaluate_run,
        infer_recipe,
        open_dataset,
        open_windows,
        recipe_of,
        rollout,
        simulate_dataset,
        train_model,
        write_report,
    )
    from sigmasolver.evaluate import metrics
    from sigmasolver.forecast.checkpoint import load
    from sigmasolver.models import build_model, list_models, register_model

__all__ = [
    "__version__",
    "build_model",
    "diagnose_run",
    "evaluate_run",
    "infer_recipe",
    "list_models",
    "load",
    "metrics",
    "open_dataset",
    "open_windows",
    "recipe_of",
    "register_model",
    "rollout",
    "simulate_dataset",
    "train_model",
    "write_report",
]

_MODULES = {
    "build_model": "sigmasolver.models",
    "list_models": "sigmasolver.models",
    "load": "sigmasolver.forecast.checkpoint",
    "metrics": "sigmasolver.evaluate",
    "register_model": "sigmasolver.models",
}
"""Modules of the public names that are not in `sigmasolver.api`."""
_MOVED = {
    "Options": "sigmasolver.models",
    "Recipe": "sigmasolver.recipes",
    "register_loss": "sigmasolver.train.objectives",
    "register_optimiser": "sigmasolver.train.optimisers",
    "register_task": "sigmasolver.recipes",
    "save_pretrained": "sigmasolver.model_cards.share",
}
"""Formerly public names and their modules, kept for backward compatibility."""


def __getattr__(name: str) -> Any:
    """Import public names on first access, so that torch is loaded only when needed."""
    if name == "open":  # sigmasolver.open(dataset); not in __all__, so that a star import does not shadow open()
        name = "open_dataset"
    if name in _MOVED:
        return getattr(import_module(_MOVED[name]), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "sigmasolver.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
