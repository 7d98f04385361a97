"""Means, noise and confidence intervals of a few numbers that depend on each other.

Block means of a loss curve are few (20 in a verdict) and autocorrelated. Both widen an interval: 20 values with a correlation
of 0.5 between neighbours are worth 6.7 independent ones, so their mean has 1.7 times the standard error, and Student's t with
5.7 degrees of freedom puts the 95% bound at 2.5 standard errors instead of 1.96.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAD_TO_SD = 1.4826  # of a normal distribution
LARGEST_CORRELATION = 0.97  # beyond it the long-run deviation cannot be told
CONFIDENCE = 0.95  # of an estimate's two-sided interval
POWER = 0.8  # with which a value counts as one that would have been seen
LARGEST_TAIL_CORRELATION = 0.9
SMALLEST_EFFECTIVE_TAIL = 3  # values; with fewer the interval would be that of one degree of freedom, too wide for any use


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and the degrees of freedom of that error."""

    mean: float
    error: float
    freedom: float

    @property
    def half_width(self) -> float:
        """Half of the two-sided 95% interval."""
        return student_t_quantile((1 + CONFIDENCE) / 2, self.freedom) * self.error

    @property
    def visible(self) -> float:
        """How far a true value must lie from a bound to be told from it with a probability of 0.8."""
        return self.half_width + student_t_quantile(POWER, self.freedom) * self.error


def difference_scale(gaps: Sequence[float]) -> float:
    """The standard deviation of gaps, from the median of their consecutive differences. 0 with fewer than two."""
    if len(gaps) < 2:
        return 0.0
    return MAD_TO_SD * statistics.median(abs(b - a) for a, b in itertools.pairwise(gaps)) / math.sqrt(2.0)


def variance(values: Sequence[float]) -> float:
    """The sample variance of at least two values."""
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def autocorrelated_mean(values: Sequence[float]) -> Estimate:
    """The mean of at least two autocorrelated values, with its standard error.

    The lag-1 autocorrelation r of n values is biased by about -(1 + 3 r) / n, which is added back, and it is held in 0 to 0.9.
    With k = (1 + r) / (1 - r), the variance of the mean is k sigma^2 / n, and the sample variance is too small by the factor
    (n - k) / (n - 1). The effective number of values is n / k, held at 3 or more.
    """
    n = len(values)
    mean = statistics.fmean(values)
    deviations = [value - mean for value in values]
    squares = math.fsum(d * d for d in deviations)
    if squares == 0:
        return Estimate(mean, 0.0, n - 1)
    r = math.fsum(a * b for a, b in itertools.pairwise(deviations)) / squares
    r = min(max(0.0, r + (1 + 3 * r) / n), LARGEST_TAIL_CORRELATION)
    k = max(1.0, min((1 + r) / (1 - r), n / SMALLEST_EFFECTIVE_TAIL))
    return Estimate(mean, math.sqrt(squares / (n - k) * k / n), max(1.0, n / k - 1))


def student_t_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t, to about 1e-12, for a probability above 0.5 and below 1.

    P(T > t) = I_x(f / 2, 1 / 2) / 2 with x = f / (f + t^2) and I the regularised incomplete beta function (Abramowitz and
    Stegun 26.7.1). It is inverted by bisection.
    """
    assert 0.5 < probability < 1
    low, high = 0.0, 1.0
    while _t_survival(high, freedom) > 1 - probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_survival(middle, freedom) > 1 - probability else (low, middle)
    return high


def _t_survival(t: float, freedom: float) -> float:
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8, evaluated from the front by Lentz's method)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d)
            c = 1.0 + term / c
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction


def long_run_ratio(correlation: float) -> float:
    """sqrt((1 + r) / (1 - r)): the long-run deviation of a first-order autoregression over its marginal one."""
    r = min(max(0.0, correlation), LARGEST_CORRELATION)
    return math.sqrt((1 + r) / (1 - r))


def hidden_by_differences(gaps: Sequence[float]) -> float:
    """The long-run deviation over that of differences: sqrt(1 + r) / (1 - r), r with its bias and one standard error added.

    Values beyond 3 deviations from the median, the deviation taken from the median of the distances, are first moved there: one
    spike would make any series look uncorrelated.
    """
    n = len(gaps)
    if n < 3:
        return 1.0
    middle = statistics.median(gaps)
    bound = 3 * MAD_TO_SD * statistics.median(abs(gap - middle) for gap in gaps)
    held = [min(max(gap, middle - bound), middle + bound) for gap in gaps]
    mean = statistics.fmean(held)
    squares = math.fsum((gap - mean) ** 2 for gap in held)
    if squares == 0:
        return 1.0
    r = math.fsum((a - mean) * (b - mean) for a, b in itertools.pairwise(held)) / squares
    r += (1 + 3 * r) / n
    r = min(max(0.0, r + math.sqrt(max(0.0, 1 - r * r) / n)), LARGEST_CORRELATION)
    return math.sqrt(1 + r) / (1 - r)


def pooled_correlation(columns: Sequence[Sequence[float]], seeds: int) -> float:
    """The lag-1 autocorrelation of the seeds' deviations from their mean, pooled over the seeds, with its bias added back."""
    rows = [[value - statistics.fmean(column) for value in column] for column in columns if len(column) == seeds]
    squares = math.fsum(d * d for row in rows for d in row)
    if squares == 0:
        return 0.0
    r = math.fsum(a * b for before, after in itertools.pairwise(rows) for a, b in zip(before, after, strict=True)) / squares
    return r + (1 + 3 * r) / len(rows)
