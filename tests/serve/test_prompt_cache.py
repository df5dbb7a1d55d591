"""What is kept of prompts, beside running requests."""

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.models.cache import ArraysCache, KVCache

from kvstow.serve.prompt_cache import WithinBudget, aligned

ONE = 256 * 2 * 4 * 4  # bytes of a cache with room for 256 tokens of one head of 4


def filled(*lengths):
    """One cache for each length."""
    caches = [KVCache() for _ in lengths]
    for cache, n in zip(caches, lengths, strict=True):
        x = mx.zeros((1, 1, n, 4))
        cache.update_and_fetch(x, x)
    return caches


class Room:
    """What running requests leave."""

    n_bytes = 10 * ONE

    def __call__(self):
        return self.n_bytes


@pytest.fixture
def room():
    return Room()


@pytest.fixture
def kept(room):
    return WithinBudget(10, room)


def keep(kept, first, n=10):
    kept.insert_cache("m", list(range(first, first + n)), filled(n))


def test_room_for_running_requests_is_made_at_the_next_request(kept, room):
    for first in (0, 100, 200):
        keep(kept, first)
    size = kept.nbytes // 3
    room.n_bytes = size
    kept.fetch_nearest_cache("m", [1000, 1001])
    assert (len(kept), kept.nbytes) == (1, size)


def test_a_request_does_not_push_out_what_it_continues(kept, room):
    keep(kept, 0)
    room.n_bytes = 0
    found, rest = kept.fetch_nearest_cache("m", list(range(12)))
    assert (found[0].offset, rest) == (10, [10, 11])
    assert len(kept) == 0


def test_what_has_no_room_is_not_kept(kept, room):
    room.n_bytes = 0
    keep(kept, 0)
    assert (len(kept), kept.nbytes) == (0, 0)


def test_a_prompt_that_is_held_whole_has_one_token_left(kept):
    keep(kept, 0)
    found, rest = kept.fetch_nearest_cache("m", list(range(10)))
    assert (found[0].offset, rest) == (9, [9])


def test_caches_that_hold_fewer_tokens_than_said_are_kept_under_those(kept):
    kept.insert_cache("m", list(range(10)), filled(9, 8))
    found, rest = kept.fetch_nearest_cache("m", list(range(12)))
    assert ([c.offset for c in found], rest) == ([8, 8], [8, 9, 10, 11])


def test_caches_that_cannot_forget_and_hold_other_tokens_are_not_kept():
    recurrent = ArraysCache(1)
    recurrent[0] = mx.zeros(3)
    assert aligned([recurrent, *filled(10)], 10) == 10
    assert aligned([recurrent, *filled(10)], 9) == 0
