import numpy as np
import pytest

from kvstow.evaluate.statistics import found_interval, mean_interval, ratio_interval, summarise


def test_an_interval_holds_the_true_mean_about_95_times_in_100(rng):
    held = 0
    for _ in range(200):
        low, high = mean_interval(rng.exponential(size=24))
        held += low <= 1 <= high
    assert 170 <= held <= 199  # a percentile bootstrap of 24 skewed figures is a little short


def test_paired_texts_give_a_ratio_a_tighter_interval_than_its_parts(rng):
    baseline = rng.exponential(size=16)
    low, high = ratio_interval(0.8 * baseline, baseline)
    assert low == pytest.approx(0.8)
    assert high == pytest.approx(0.8)
    wide = mean_interval(baseline)
    assert wide[1] / wide[0] > 1.5


def test_intervals_are_the_same_every_time(rng):
    figures = rng.exponential(size=16)
    assert mean_interval(figures) == mean_interval(figures)


def test_a_summary_weighs_texts_and_keeps_the_tail():
    per_step = np.array([[0.0, 1.0], [2.0, 5.0]])  # (steps, texts)
    summary = summarise(per_step)
    assert summary["per_text_kl_nats"] == [1.0, 3.0]
    assert summary["mean_kl_nats"] == 2.0
    assert (summary["median_kl_nats"], summary["max_kl_nats"]) == (1.5, 5.0)
    assert summary["interval_95"] == [1.0, 3.0]


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_an_interval_of_facts_found_holds_the_true_share_about_95_times_in_100(rng, p):
    found = rng.binomial(20, p, size=500)
    held = [low <= p <= high for low, high in (found_interval([cell(20, int(n))]) for n in found)]
    assert 0.92 <= np.mean(held) <= 1  # with 20 prompts there are few intervals to be had


def test_finding_everything_is_no_proof_that_nothing_is_missed():
    assert found_interval([cell(20, 20)]) == (pytest.approx(0.839, abs=5e-4), 1)
    assert found_interval([cell(20, 0)]) == (0, pytest.approx(0.161, abs=5e-4))


def test_more_prompts_make_the_interval_of_facts_found_tighter():
    widths = [high - low for low, high in (found_interval([cell(4, 3)] * n) for n in (1, 5, 50))]
    assert widths == sorted(widths, reverse=True)
    assert found_interval([cell(4, 3)] * 5) == found_interval([cell(20, 15)])


@pytest.mark.parametrize("cells", [[], [(0, 0)], [(-3, 1)], [(4, 9)], [(4, -2)]])
def test_counts_that_cannot_be_make_an_interval_within_0_and_1(cells):
    low, high = found_interval([cell(*counts) for counts in cells])
    assert 0 <= low <= high <= 1


def cell(n, found):
    return {"n": n, "found": found}
