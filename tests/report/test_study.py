"""Validation of studies: one-sentence error messages."""

import numpy as np
import pytest

from sigmasolver.report.study import Curve, Maps, Study, Table

TABLE = Table(("model",), (("a",),))
CURVE = Curve("a", (1, 2), (0.1, 0.2))
FIELD = np.zeros((2, 3, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Study("t", "s", (), TABLE, ()), "no curves"),
        (lambda: Study("t", "s", (CURVE, CURVE), TABLE, ()), "2 curves named a"),
        (lambda: Curve("a", (1, 2), (0.1,)), "2 leads and 1 errors"),
        (lambda: Curve("a", (), ()), "0 leads"),
        (lambda: Curve("a", (2, 1), (0.1, 0.2)), "must start at 1 or later and increase"),
        (lambda: Curve("a", (0, 1), (0.1, 0.2)), "must start at 1 or later and increase"),
        (lambda: Curve("a", (1,), (-0.1,)), "negative error"),
        (lambda: Curve("a", (1, 2), (0.1, 0.2), (0.1,)), "one deviation of at least 0 per lead"),
        (lambda: Curve("a", (1,), (0.1,), (), (-1.0,)), "one deviation of at least 0 per lead"),
        (lambda: Table(("a", "b"), (("x",),)), "1 cells for 2 columns"),
        (lambda: Table(("a",), (("x",),), frozenset({(1, 0)})), r"no cell \(1, 0\)"),
        (lambda: Maps("u", (1, 2, 3), FIELD, {}), r"must be \(3, X, Y\)"),
        (lambda: Maps("u", (1, 2), FIELD[..., None], {}), r"must be \(2, X, Y\)"),
        (lambda: Maps("u", (1, 2), FIELD, {"a": FIELD[:, :, :3]}), r"forecast of a has shape \(2, 3, 3\)"),
        (lambda: Maps("u", (1, 1), FIELD, {}), "increase"),
        (lambda: Maps("u", (1, 2), FIELD * np.nan, {}), "no finite value"),
    ],
)
def test_invalid_study_contents_are_rejected(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
