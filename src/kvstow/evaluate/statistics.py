"""Intervals over texts, and the summaries that every table shows.

Tokens of one text are correlated, so what is resampled is texts: the interval of a
mean is a percentile bootstrap of per-text means, and two arms are compared by
resampling the *same* texts of both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEVELS = (0.025, 0.975)


def mean_interval(per_text: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of ``(n,)`` per-text figures.

    >>> low, high = mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    >>> bool(low < 2.5 < high)
    True
    """
    return _interval(per_text[_resampled(per_text.size)].mean(axis=1))


def ratio_interval(per_text: np.ndarray, baseline: np.ndarray) -> tuple[float, float]:
    """95% interval of ``mean(per_text) / mean(baseline)``, paired by text."""
    rows = _resampled(per_text.size)
    return _interval(per_text[rows].mean(axis=1) / baseline[rows].mean(axis=1))


def summarise(per_step: np.ndarray) -> dict[str, Any]:
    """Mean of per-text means with its interval, and the tail over all steps.

    Args:
        per_step: ``(steps, n)`` nats.

    Returns:
        Rounded to 8 digits after the point, ready for JSON.
    """
    per_text = per_step.mean(axis=0)
    tail = np.quantile(per_step, [0.5, 0.95, 0.999])
    return {
        "mean_kl_nats": digits(per_text.mean()),
        "interval_95": digits(mean_interval(per_text)),
        "median_kl_nats": digits(tail[0]),
        "p95_kl_nats": digits(tail[1]),
        "p999_kl_nats": digits(tail[2]),
        "max_kl_nats": digits(per_step.max()),
        "per_text_kl_nats": digits(per_text),
    }


def digits(x: float | np.ndarray | Sequence[float]) -> Any:
    """A number, or a list of them, rounded for JSON."""
    rounded = np.round(np.asarray(x, dtype=np.float64), 8)
    return rounded.tolist()


def _resampled(n: int) -> np.ndarray:
    """Indices ``(RESAMPLES, n)``, the same for every caller with `n` texts."""
    return np.random.default_rng(0).integers(0, n, (RESAMPLES, n))


def _interval(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, LEVELS)
    return float(low), float(high)
