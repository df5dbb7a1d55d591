"""A trim takes the last tokens away, and nothing else."""

import pytest

host = pytest.importorskip("mlx_lm.models.cache")
layer = pytest.importorskip("tests.integration.packed.layer")

pytestmark = pytest.mark.mlx
join, cut, decode, append, filled = layer.join, layer.cut, layer.decode, layer.append, layer.filled
assert_same, assert_stores = layer.assert_same, layer.assert_stores


def test_a_trim_leaves_the_row_packed(cls, draw):
    first, second = draw(20), draw(3)
    cache = filled(cls, first, scheme="turbo:k8v3+start7")
    assert cache.trim(15) == 15
    assert (cache.is_packed, cache.offset) == (True, 5)
    kept = cut(first, 0, 5)
    assert_same(append(cache, second), decode(join(kept, second), cache.scheme))
    assert_stores(cache, join(kept, second))


def test_a_row_trimmed_to_nothing_is_fresh(cls, draw):
    cache = filled(cls, draw(20))
    assert cache.trim(99) == 20
    assert (cache.is_packed, cache.offset, cache.size(), cache.empty()) == (False, 0, 0, True)
    assert cache.trim(1) == 0
    tokens = draw(4)
    assert_same(append(cache, tokens), tokens)
    assert_stores(cache, tokens)


def test_a_row_trimmed_to_nothing_waits_for_n_tokens_again(cls, draw):
    cache = filled(cls, draw(20), scheme="turbo:k8v3+start7")
    cache.trim(20)
    first, second = draw(6), draw(1)
    assert_same(append(cache, first), first)
    assert not cache.is_packed
    assert_same(append(cache, second), join(first, second))
    assert_stores(cache, join(first, second))


def test_a_plain_row_can_be_trimmed(cls, draw):
    first, second = draw(5), draw(6)
    cache = filled(cls, first, scheme="turbo:k8v3+start7")
    assert cache.trim(3) == 3
    assert (cache.is_packed, cache.offset) == (False, 2)
    both = join(cut(first, 0, 2), second)
    assert_same(append(cache, second), both)
    assert_stores(cache, both)


def test_a_speculative_step_equals_the_sequential_one(cls, draw):
    """Five tokens drafted at once, two of them kept, is an append of those two alone."""
    first, drafted, following = draw(9), draw(5), draw(1)
    speculative, sequential = filled(cls, first), filled(cls, first)
    window = append(speculative, drafted)
    speculative.trim(3)
    for i in range(2):
        seen = append(sequential, cut(drafted, i, i + 1))
        assert_same(cut(window, 0, 10 + i), seen)
    assert_same(append(speculative, following), append(sequential, following))


def test_every_cache_can_be_trimmed_and_mlx_lm_agrees(cls, draw):
    cache = filled(cls, draw(5))
    assert cache.is_trimmable()
    assert host.can_trim_prompt_cache([cache])
    assert host.trim_prompt_cache([cache], 2) == 2
    assert cache.offset == 3
