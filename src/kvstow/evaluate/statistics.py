"""Intervals over texts and prompts, and the summaries that every table shows.

Tokens of one text are correlated, so what is resampled is texts: the interval of a
mean is a percentile bootstrap of per-text means, and two arms are compared by
resampling the *same* texts of both. Facts that are found or not have the interval of a
proportion.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEVELS = (0.025, 0.975)
Z = 1.959964  # of a normal distribution, 95% are within


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


def found_interval(cells: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """95% interval of the share of facts that are found: Wilson's, of all cells together.

    Most arms find all facts, or all but one. A bootstrap of figures that are all 1 is the point
    1, as if ten prompts could show that nothing is ever missed; Wilson's interval is as wide
    there as so few prompts make it, and stays within 0 and 1. It takes prompts as independent.
    Those of one length share their text between depths, and as far as this makes them alike the
    true interval is wider.

    Args:
        cells: With ``n`` prompts each, of which ``found`` found the fact.

    >>> low, high = found_interval([{"n": 10, "found": 10}, {"n": 10, "found": 10}])
    >>> f"{low:.3f} to {high:.3f}"
    '0.839 to 1.000'
    """
    n, found = (sum(cell[key] for cell in cells) for key in ("n", "found"))
    if n < 1:
        return 0.0, 1.0  # no prompt says nothing
    p = min(max(found / n, 0.0), 1.0)
    centre = p + Z**2 / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    low, high = ((centre + side) / (1 + Z**2 / n) for side in (-half, half))
    return max(low, 0.0), min(high, 1.0)


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
