"""Recipes: the full configuration of a training run, the settings of the paper, and suites of runs."""

from sigmasolver.recipes.config import config_text, read_config
from sigmasolver.recipes.recipe import ModelRecipe, Recipe, TrainRecipe, changed
from sigmasolver.recipes.rows import RECIPES, changed_settings, recipe_of, register_task
from sigmasolver.recipes.suites import SUITES, factor_settings, suite_of

__all__ = [
    "RECIPES",
    "SUITES",
    "ModelRecipe",
    "Recipe",
    "TrainRecipe",
    "changed",
    "changed_settings",
    "config_text",
    "factor_settings",
    "read_config",
    "recipe_of",
    "register_task",
    "suite_of",
]
