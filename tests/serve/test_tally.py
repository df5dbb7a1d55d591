"""Counts and rates, on a clock that a test sets."""

import threading

import pytest

from kvstow.serve import tally as tallies
from kvstow.serve.tally import BOUNDS_S, WINDOW_S, Tally


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tally(clock):
    return Tally(clock)


def test_nothing_has_happened_at_first(tally):
    prompt, decode, requests = tally.read()
    assert (prompt.tokens, decode.per_s, prompt.busy_s) == (0, 0.0, 0.0)
    assert set(requests.outcomes.values()) == {0}
    assert (requests.refused, requests.duration.count) == ({}, 0)


def test_a_rate_is_that_of_the_window_and_falls_to_zero(tally, clock):
    clock.now += 60
    tally.step("decode", 0.5, 100)
    assert tally.read()[1].per_s == 100 / WINDOW_S
    clock.now += WINDOW_S
    after = tally.read()[1]
    assert (after.per_s, after.tokens, after.busy_s) == (0.0, 100, 0.5)


def test_a_server_that_just_started_is_not_slow_for_the_time_before_it(tally, clock):
    clock.now += 2
    tally.step("decode", 2.0, 100)
    assert tally.read()[1].per_s == 50
    assert tally.read()[1].window_s == 2


def test_a_prompt_that_was_read_in_one_long_step_is_no_burst(tally, clock):
    clock.now += 60
    tally.step("prompt", 20.0, 2048)
    assert tally.read()[0].per_s == pytest.approx(2048 / 20)
    clock.now += WINDOW_S / 2
    assert tally.read()[0].per_s == pytest.approx(2048 / 20 / 2)


def test_steps_between_reads_do_not_pile_up(tally, clock):
    for _ in range(10_000):
        clock.now += 0.01
        tally.step("decode", 0.01, 1)
    assert len(tally._decode._steps) <= WINDOW_S / 0.01 + 1
    assert tally.read()[1].per_s == pytest.approx(100)


def test_a_clock_that_is_set_back_does_not_matter():
    assert Tally().clock is tallies.time.monotonic


def test_the_first_token_counts_once_and_so_does_the_end(tally, clock):
    visit = tally.arrive()
    clock.now += 0.3
    visit.token()
    clock.now += 5
    visit.token()
    visit.end("answered")
    visit.end("failed")
    _, _, requests = tally.read()
    assert requests.outcomes == {"answered": 1, "disconnected": 0, "timed_out": 0, "failed": 0}
    assert (requests.first_token.count, requests.duration.count) == (1, 1)
    assert requests.first_token.sum_s == pytest.approx(0.3)
    assert requests.duration.sum_s == pytest.approx(5.3)


def test_a_refused_request_counts_by_its_reason_alone(tally):
    tally.arrive().refuse("queue_full")
    _, _, requests = tally.read()
    assert requests.refused == {"queue_full": 1}
    assert sum(requests.outcomes.values()) == requests.duration.count == 0


@pytest.mark.parametrize("seconds", [0.0, BOUNDS_S[0], 0.7, BOUNDS_S[-1], 10_000.0])
def test_a_histogram_counts_what_took_at_most_so_long(tally, clock, seconds):
    visit = tally.arrive()
    clock.now += seconds
    visit.end("answered")
    latency = tally.read()[2].duration
    took = clock.now - 100.0  # as floating point has it
    assert latency.at_most == (*(int(took <= bound) for bound in BOUNDS_S), 1)


def test_reasons_without_end_end_as_other(tally):
    for i in range(1000):
        tally.refuse(f"reason {i}")
    refused = tally.read()[2].refused
    assert len(refused) == tallies.MOST_REASONS + 1
    assert refused["other"] == 1000 - tallies.MOST_REASONS


def test_threads_do_not_lose_counts(tally):
    def work():
        for _ in range(500):
            tally.step("decode", 0.0, 1)
            tally.arrive().end("answered")
            tally.read()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, decode, requests = tally.read()
    assert (decode.tokens, requests.outcomes["answered"]) == (2000, 2000)
