"""Forecasting: the forecaster and its rollout, checkpoints, CUDA graph replay, and forecast files."""

from sigmasolver.forecast.forecaster import BOUNDARIES, Forecaster, Rollout, feed_back, rollout

__all__ = ["BOUNDARIES", "Forecaster", "Rollout", "feed_back", "rollout"]
