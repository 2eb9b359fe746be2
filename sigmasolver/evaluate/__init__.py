"""Errors of forecasts on the test part, as records; the metrics are in `evaluate.metrics`."""

from sigmasolver.evaluate.evaluation import (
    LEGACY_DEFAULTS,
    PROTOCOLS,
    Request,
    count_test_windows,
    evaluate_run,
    in_cohort,
    measure,
    predict,
    records_of_test_part,
    rows_of,
    same_source,
    source_of,
    trivial_baseline,
    windows_of,
)

__all__ = [
    "LEGACY_DEFAULTS",
    "PROTOCOLS",
    "Request",
    "count_test_windows",
    "evaluate_run",
    "in_cohort",
    "measure",
    "predict",
    "records_of_test_part",
    "rows_of",
    "same_source",
    "source_of",
    "trivial_baseline",
    "windows_of",
]
