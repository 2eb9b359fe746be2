"""Forecasts: the model between its normalisers, its rollout, its checkpoint, graphs of it, and files."""

from sigmasolver.forecast.forecaster import BOUNDARIES, Forecaster, Rollout, feed_back, rollout

__all__ = ["BOUNDARIES", "Forecaster", "Rollout", "feed_back", "rollout"]
