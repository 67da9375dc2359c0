"""Welch's t-test, and numbers over seeds."""

import math
import statistics
from functools import cache

SURE = 0.01                              # a difference counts if p is less


def welch(a, b):
    """Welch's t-test -> p, two-sided: how often two equal entries would differ as much as these."""
    gap = abs(statistics.mean(a) - statistics.mean(b))
    error, freedom = error_of_gap(a, b)
    return student(gap / error, freedom) if error else float(gap == 0)


def error_of_gap(a, b):
    """The standard error of the difference of two means, and its degrees of freedom."""
    x, y = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    if x + y == 0:
        return 0.0, 1.0
    return math.sqrt(x + y), (x + y) ** 2 / (x ** 2 / (len(a) - 1) + y ** 2 / (len(b) - 1))


def interval(a, b):
    """Half of the 95% interval of mean(a) - mean(b): the p of a gap at its end is 0.05."""
    error, freedom = error_of_gap(a, b)
    return error * reach(freedom)


@cache
def reach(freedom):
    """Half of a 95% interval, in standard errors."""
    low, high = 0.0, 1000.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) > 0.05 else (low, middle)
    return high


def student(t, freedom, n=20_000):
    """P(|T| > t). With T = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), up to
    a factor; its integral from t's angle to pi/2, by the midpoint rule."""
    start = math.atan(t / math.sqrt(freedom))
    step = (math.pi / 2 - start) / n
    area = step * sum(math.cos(start + (i + 0.5) * step) ** (freedom - 1) for i in range(n))
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    return 2 * factor / math.sqrt(math.pi) * area


def spread(values, digits=1):
    """Mean ± standard deviation over seeds"""
    text = f'{statistics.mean(values):,.{digits}f}'
    return f'{text} ± {statistics.stdev(values):,.{digits}f}' if len(values) > 1 else text


def word(gap, p):
    """What a gap in bits per byte is called."""
    return 'no clear difference' if p >= SURE else 'better' if gap < 0 else 'worse'


def verdict(bits, other):
    """Compare the bits per byte of an entry with those of another."""
    if min(len(bits), len(other)) < 2:
        return 'one seed: no test'
    p = welch(bits, other)
    limit = f' (clear: below {SURE})' if SURE <= p < 0.05 else ''
    return f'{word(statistics.mean(bits) - statistics.mean(other), p)}, p = {p:.3g}{limit}'
