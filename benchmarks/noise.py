"""Benchmark subjects: a task at the paper's sizes on random windows, without simulated or stored data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sigmasolver.recipes import Recipe, changed, recipe_of
from sigmasolver.train.dry_run import forecaster_of, windows_of, with_random_data

__all__ = ["SEED", "Subject", "forecaster_of", "windows_of"]

SEED = 0


@dataclass(frozen=True)
class Subject:
    """A task, a model, and overrides of their settings."""

    task: str
    model: str = "transolver-sigma"
    settings: Sequence[str] = ()

    def recipe(self, precision: str = "float32") -> Recipe:
        recipe = recipe_of(self.task, self.model, SEED)
        return with_random_data(
            changed(replace(recipe, train=replace(recipe.train, precision=precision)), self.settings)
        )
