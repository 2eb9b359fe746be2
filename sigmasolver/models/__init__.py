"""Transolver-sigma, its family and the baselines: one class for one, two and three axes, a row for every variant."""

from sigmasolver.models.config import ModelSize, Options, SolverConfig
from sigmasolver.models.variants import (
    build_model,
    build_solver,
    count_parameters,
    list_models,
    matched_width,
    on_meta_device,
    register_model,
)

__all__ = [
    "ModelSize",
    "Options",
    "SolverConfig",
    "build_model",
    "build_solver",
    "count_parameters",
    "list_models",
    "matched_width",
    "on_meta_device",
    "register_model",
]
