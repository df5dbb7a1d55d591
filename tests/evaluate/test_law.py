import numpy as np
import pytest

from kvstow.errors import EvaluationError
from kvstow.evaluate.law import fit, laws, violations
from tests.evaluate.made_rows import DISTORTION, bits_rows, kl_row


def exact(rate, *bits, floor=0.0, c=2.0):
    return [kl_row(f"turbo:k8v{b}", floor + c * rate**-b) for b in bits]


@pytest.mark.parametrize("rate", [2.0, 3.6, 4.0, 7.5])
def test_a_fit_finds_the_rate_that_the_rows_were_made_with(rate):
    law = fit(exact(rate, 2, 3, 4, 5))
    assert law.rate == pytest.approx(rate)
    assert law.c == pytest.approx(2.0)
    assert law.floor_nats == 0
    assert law.at(np.array([3])) == pytest.approx(2.0 * rate**-3)
    # Every text falls alike, so texts that are drawn again say the same.
    assert law.interval_95 == pytest.approx((rate, rate))


def test_what_the_keys_cost_is_taken_off_before_the_fit():
    rows = [*exact(4.0, 2, 3, 4, floor=0.005), kl_row("turbo:k8v8", 0.005)]
    law = fit(rows)
    assert law.rate == pytest.approx(4.0)
    assert (law.floor_nats, law.bits) == (pytest.approx(0.005), (2, 3, 4))
    assert fit(rows[:-1]).rate < 3.5


def test_a_kl_in_proportion_to_the_squared_error_falls_as_theory_says():
    law = fit(bits_rows(2, 3, 4, 5, 8))
    assert law.rate == pytest.approx((DISTORTION[2] / DISTORTION[5]) ** (1 / 3), rel=0.01)
    assert 3.4 < law.rate < 4


def test_the_interval_holds_the_rate_and_grows_with_what_texts_differ_by(rng):
    def rows(spread):
        noise = rng.normal(0, spread, (3, 8))
        return [
            kl_row(f"turbo:k8v{b}", per_text=4.0**-b * np.exp(noise[i]))
            for i, b in enumerate((2, 3, 4))
        ]

    widths = []
    for spread in (0.02, 0.3):
        law = fit(rows(spread))
        low, high = law.interval_95
        assert low < law.rate < high
        widths.append(high - low)
    assert widths[0] < widths[1] / 3


def test_the_same_rows_have_the_same_interval_in_any_order():
    rows = exact(4.0, 2, 3, 4)
    rows[0]["per_text_kl_nats"] = [0.1, 0.2, 0.05, 0.15]
    assert fit(rows).interval_95 == fit(rows[::-1]).interval_95


def test_a_width_that_is_no_worse_than_eight_bits_is_not_fitted():
    rows = [*exact(4.0, 2, 3, 4, floor=0.01), kl_row("turbo:k8v5", 0.009)]
    law = fit([*rows, kl_row("turbo:k8v8", 0.01)])
    assert law.bits == (2, 3, 4)


@pytest.mark.parametrize("bits", [(3,), (3, 8), (8,)])
def test_one_width_below_eight_bits_makes_no_law(bits):
    with pytest.raises(EvaluationError, match=r"tiny turbo:k8v\*: a law needs two widths"):
        fit(bits_rows(*bits))
    assert laws(bits_rows(*bits)) == []


def test_rows_of_different_numbers_of_texts_make_no_law():
    rows = [kl_row("turbo:k8v2", 0.1), kl_row("turbo:k8v3", per_text=[0.02, 0.03])]
    with pytest.raises(EvaluationError, match="different numbers of texts"):
        fit(rows)


def test_each_model_and_kind_of_keys_has_its_own_law():
    searched = [kl_row(f"turbo:k8v{b}+search", 3.0**-b) for b in (2, 3)]
    others = [kl_row(f"turbo:k8v{b}@values", 0.1) for b in (2, 3)] + bits_rows(2, 3, keys=4)
    rows = [*bits_rows(2, 3), *bits_rows(3, 4, model="other"), *searched, *others]
    found = [(law.model, law.scheme, law.bits) for law in laws(rows)]
    assert found == [
        ("tiny", "turbo:k8v*", (2, 3)),
        ("other", "turbo:k8v*", (3, 4)),
        ("tiny", "turbo:k8v*+search", (2, 3)),
    ]


def test_arms_of_a_part_of_the_layers_belong_to_no_law():
    whole = [kl_row(f"turbo:k8v{b}", 4.0**-b) for b in (2, 3, 4)]
    parts = [kl_row(f"turbo:k8v{b}@full", 1e-3 * 4.0**-b) for b in (2, 3, 4, 8)]
    (law,) = laws([*whole, *parts])
    assert law.floor_nats == 0
    assert law.rate == pytest.approx(4)


def test_a_kl_that_falls_with_every_width_violates_nothing():
    rows = [*bits_rows(2, 3, 4, 5, 8), *(kl_row(f"paper:mse{b}", 4.0**-b) for b in range(1, 9))]
    rows += [kl_row("off", 0.0), kl_row("affine:4", 0.1), kl_row("affine:8", 0.001)]
    assert violations(rows) == []


@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        ("turbo:k8v3", "turbo:k8v4"),
        ("turbo:k4v3", "turbo:k8v3"),
        ("turbo:k8v2@values", "turbo:k8v5@values"),
        ("turbo:k8v2@layer1", "turbo:k8v5@layer1"),
        ("affine:4g32", "affine:8g32"),
        ("paper:prod2", "paper:prod3"),
    ],
)
@pytest.mark.parametrize("kl", [0.02, 0.03])
def test_more_bits_that_are_no_better_are_named(fewer, more, kl):
    found = violations([kl_row(more, kl), kl_row(fewer, 0.02)])
    assert [(v.fewer, v.more) for v in found] == [(fewer, more)]
    assert f"{more} has more bits than {fewer} and no smaller KL" in str(found[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("turbo:k4v5", "turbo:k8v3"),
        ("turbo:k4v3", "turbo:k8v4"),
        ("affine:4g32", "affine:8"),
        ("paper:mse2", "paper:prod3"),
        ("turbo:k8v3", "turbo:k8v4@values"),
        ("turbo:k8v3@layer1", "turbo:k8v4@layer2"),
        ("off", "turbo:k8v3"),
    ],
)
def test_arms_that_differ_in_more_than_one_width_have_no_order(one, other):
    assert violations([kl_row(one, 0.01), kl_row(other, 0.02)]) == []


def test_models_are_not_compared_with_each_other():
    assert violations([kl_row("turbo:k8v3"), kl_row("turbo:k8v4", 0.5, model="other")]) == []
