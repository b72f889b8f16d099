"""The analysis of variance equals values worked out by hand and those of SciPy."""

import numpy as np
import pytest
from scipy import stats

from structured_ensembles.paper.variance import analyse_two_ways


def test_two_ways_by_hand() -> None:
    # Row means 2, 4, 6, column means 3, 5, mean 4. Squares: rows 2·8 = 16, columns 3·2 = 6; residuals ±½ twice, 0 else.
    result = analyse_two_ways([[1.5, 2.5], [3.0, 5.0], [4.5, 7.5]])
    # Residuals: row 1 ±0.5, row 2 0, row 3 ∓0.5: squares 4 · 0.25 = 1, on 2 degrees of freedom.
    assert result.freedom == (2, 2)
    assert result.f == pytest.approx((16 / 2) / (1 / 2))
    assert result.p == pytest.approx(1 / (1 + 16))  # F(2, 2) has the distribution f / (1 + f)
    assert result.deviations == pytest.approx(np.sqrt([(8 - 0.5) / 2, (6 - 0.5) / 3, 0.5]))


def test_rows_equal_scipy_where_columns_do_not_matter() -> None:
    values = np.random.default_rng(0).normal(size=(6, 5)) + np.arange(6)[:, None] * 0.3
    centred = values - values.mean(0)  # without differences of columns, one-way sums of squares are the same
    result = analyse_two_ways(values.tolist())
    one_way = stats.f_oneway(*centred)
    assert result.freedom == (5, 20)
    assert result.f == pytest.approx(one_way.statistic * 20 / 24)  # 24 degrees of freedom there
    assert result.p == pytest.approx(stats.f.sf(result.f, 5, 20))


def test_rows_that_differ_less_than_chance_have_no_deviation() -> None:
    result = analyse_two_ways([[1.0, 2.0, 4.0], [1.1, 1.9, 4.0], [1.0, 2.1, 3.9]])
    assert result.deviations[0] == 0.0
    assert result.p > 0.05
    with pytest.raises(ValueError, match="at least 2 rows"):
        analyse_two_ways([[1.0, 2.0]])


def test_equal_rows_do_not_differ_even_if_nothing_else_does() -> None:
    equal = analyse_two_ways([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    assert (equal.f, equal.p, equal.deviations) == (0.0, 1.0, (0.0, 0.0, 0.0))
    exact = analyse_two_ways([[0.5, 0.25], [0.75, 0.5]])  # nothing is left for chance: F has no bound
    assert (exact.f, exact.p) == (float("inf"), 0.0)
