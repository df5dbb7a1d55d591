"""How KL falls with bits: a law to fit, and an order that must hold.

Near the reference KL is a quadratic form of the change in logits, so a small error of
the values costs in proportion to its square. The squared error of the best scalar code
of a normal coordinate (Lloyd 1982, Max 1960) is .1175, .0345, .0095, .0025 for 2 to 5 bits:
it falls 3.40, 3.64 and 3.79 times per bit, towards 4 (6.02 dB, Panter and Dite 1951).
So with keys of one width KL is expected to follow ``floor + c * rate**-bits`` with a rate
of 3.4 to 4, where the floor is what the keys cost. A rate well above it says that the
fewest bits are beyond what a quadratic form describes; one well below, that something else
than the values makes the error.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import Row
from kvstow.evaluate.selection import of_kind
from kvstow.evaluate.statistics import LEVELS, RESAMPLES
from kvstow.scheme import Affine, Turbo

FLOOR_BITS = 8  # values so fine that what is left is the cost of the keys
RESOLUTION = 1e-8  # nats; rows are rounded there
THEORY = 4.0  # the limit of many bits


@dataclass(frozen=True, slots=True)
class Law:
    """``floor_nats + c * rate**-bits``, fitted to one model and one kind of keys.

    Attributes:
        model: As the rows call it.
        scheme: The arms, with ``*`` for the bits of values: ``turbo:k8v*``.
        rows: The arms, by bits, the one that gave the floor among them.
        bits: Of the values, those that were fitted.
        floor_nats: KL at `FLOOR_BITS`; 0 if that was not measured.
        c: Of the fit.
        c_theory: Of the fit whose rate is `THEORY`.
        rate: How many times KL above the floor falls per bit.
        interval_95: Of the rate: a paired bootstrap over texts.
    """

    model: str
    scheme: str
    rows: tuple[Row, ...]
    bits: tuple[int, ...]
    floor_nats: float
    c: float
    c_theory: float
    rate: float
    interval_95: tuple[float, float]

    def at(self, bits: np.ndarray) -> np.ndarray:
        """The fitted KL."""
        return self.floor_nats + self.c * self.rate**-bits

    def theory_at(self, bits: np.ndarray) -> np.ndarray:
        """The KL if it fell `THEORY` times per bit."""
        return self.floor_nats + self.c_theory * THEORY**-bits


class Violation(NamedTuple):
    """Two arms of one model, of which the one with more bits is not the better one."""

    model: str
    fewer: str
    fewer_kl_nats: float
    more: str
    more_kl_nats: float

    def __str__(self) -> str:
        return (
            f"{self.model}: {self.more} has more bits than {self.fewer} and no smaller KL, "
            f"{self.more_kl_nats:.3g} against {self.fewer_kl_nats:.3g}"
        )


def laws(rows: Iterable[Row]) -> list[Law]:
    """A fit of each model and kind of keys that has enough widths of values.

    Args:
        rows: KL rows that can stand in one figure; those of another kind are left out.
    """
    series: dict[tuple[str, str], list[Row]] = {}
    for row in of_kind(rows, "law"):
        series.setdefault((row["model"], _starred(_turbo(row))), []).append(row)
    fitted = []
    for of_one_kind in series.values():
        with suppress(EvaluationError):  # what cannot be fitted has no law
            fitted.append(fit(of_one_kind))
    return fitted


def fit(rows: Sequence[Row]) -> Law:
    """Least squares of log(KL - floor) over bits, for arms that differ in value bits alone.

    A width whose KL is not above the floor says nothing of the rate and is not fitted.

    Raises:
        EvaluationError: If fewer than two widths are left, or rows have different texts.
    """
    if len({len(row["per_text_kl_nats"]) for row in rows}) > 1:
        raise EvaluationError(f"rows of {rows[0]['model']} have different numbers of texts")
    by_bits = {
        _turbo(row).value_bits: row for row in sorted(rows, key=lambda r: _turbo(r).value_bits)
    }
    per_text = {bits: np.array(row["per_text_kl_nats"]) for bits, row in by_bits.items()}
    floor = per_text.get(FLOOR_BITS, np.zeros(len(rows[0]["per_text_kl_nats"])))
    excess = {bits: x - floor for bits, x in per_text.items() if bits != FLOOR_BITS}
    excess = {bits: x for bits, x in excess.items() if x.mean() > RESOLUTION}
    name = f"{rows[0]['model']} {_starred(_turbo(rows[0]))}"
    if len(excess) < 2:
        raise EvaluationError(f"{name}: a law needs two widths of values with a KL above the floor")
    bits, above = np.array([*excess]), np.stack([*excess.values()])
    log_above = np.log(above.mean(axis=1))
    slope = _slopes(bits, log_above)
    middle = log_above.mean()
    return Law(
        model=rows[0]["model"],
        scheme=_starred(_turbo(rows[0])),
        rows=tuple(by_bits.values()),
        bits=tuple(excess),
        floor_nats=float(floor.mean()),
        c=float(np.exp(middle - slope * bits.mean())),
        c_theory=float(np.exp(middle + np.log(THEORY) * bits.mean())),
        rate=float(np.exp(-slope)),
        interval_95=_interval(bits, above),
    )


def widths(arm: Arm) -> tuple[str, tuple[int, ...]]:
    """All of an arm but its widths, as an arm of 8 bits, and its widths.

    >>> widths(Arm.parse("turbo:k8v3@values"))
    ('turbo:k8v8@values', (8, 3))
    """
    if arm.paper:
        return str(replace(arm, paper=arm.paper[:-1] + "8")), (int(arm.paper[-1]),)
    scheme = arm.scheme
    if isinstance(scheme, Turbo):
        same = replace(scheme, key_bits=8, value_bits=8)
        return str(replace(arm, scheme=same)), (scheme.key_bits, scheme.value_bits)
    if isinstance(scheme, Affine):
        return str(replace(arm, scheme=replace(scheme, bits=8))), (scheme.bits,)
    return str(arm), ()


def violations(rows: Iterable[Row]) -> list[Violation]:
    """Pairs of arms that differ in one width and whose KL does not fall with it.

    Args:
        rows: KL rows that can stand in one figure.
    """
    found = []
    known = [(row, *widths(Arm.parse(row["arm"]))) for row in rows]
    for fewer, kind, bits in known:
        for more, other_kind, other_bits in known:
            changes = [b - a for a, b in zip(bits, other_bits, strict=False) if b != a]
            alike = (fewer["model"], kind) == (more["model"], other_kind)
            one_more = alike and len(changes) == 1 and changes[0] > 0
            if one_more and more["mean_kl_nats"] >= fewer["mean_kl_nats"]:
                pair = (fewer["arm"], fewer["mean_kl_nats"], more["arm"], more["mean_kl_nats"])
                found.append(Violation(fewer["model"], *pair))
    return found


def _turbo(row: Row) -> Turbo:
    scheme = Arm.parse(row["arm"]).scheme
    if not isinstance(scheme, Turbo):
        raise EvaluationError(f"the law is of turbo schemes, got {row['arm']}")
    return scheme


def _starred(scheme: Turbo) -> str:
    name, plus, options = str(scheme).partition("+")
    return f"{name.rpartition('v')[0]}v*{plus}{options}"


def _slopes(bits: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Slope of ``(..., len(bits))`` logarithms over bits, by least squares."""
    centred = bits - bits.mean()
    slopes: np.ndarray = logs @ centred / (centred @ centred)
    return slopes


def _interval(bits: np.ndarray, above: np.ndarray) -> tuple[float, float]:
    """95% interval of the rate; `above` is ``(len(bits), n)``, resampled by text."""
    n = above.shape[1]
    chosen = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    means = np.maximum(above[:, chosen].mean(axis=2), RESOLUTION)
    low, high = np.quantile(np.exp(-_slopes(bits, np.log(means).T)), LEVELS)
    return float(low), float(high)
