"""Welch's t-test, and numbers over seeds."""

import math
import statistics

SURE = 0.01                              # a difference counts if p is less


def welch(a, b):
    """Welch's t-test -> p, two-sided: how often two equal entries would differ as much as these."""
    gap = abs(statistics.mean(a) - statistics.mean(b))
    x, y = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    if x + y == 0:
        return float(gap == 0)
    t = gap / math.sqrt(x + y)
    freedom = (x + y) ** 2 / (x ** 2 / (len(a) - 1) + y ** 2 / (len(b) - 1))
    return student(t, freedom)


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


def verdict(bits, other):
    """Bits per byte against another entry's."""
    if min(len(bits), len(other)) < 2:
        return 'one seed: no test'
    p = welch(bits, other)
    word = 'better' if statistics.mean(bits) < statistics.mean(other) else 'worse'
    return f"{word if p < SURE else 'no clear difference'}, p = {p:.3g}"
