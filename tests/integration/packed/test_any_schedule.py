"""Whatever is done to a layer, it holds its own tokens, byte for byte."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

integration = pytest.importorskip("kvstow.integrations.mlx_lm")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
layer = pytest.importorskip("tests.integration.packed.layer")

pytestmark = pytest.mark.mlx
PackedKVCache = integration.PackedKVCache
DeferredKVCache = integration.DeferredKVCache
H, D = layer.H, layer.D
turbo, join, cut, decode, append = layer.turbo, layer.join, layer.cut, layer.decode, layer.append
assert_same, assert_stores = layer.assert_same, layer.assert_stores
SCHEMES = [
    "turbo:k8v3",
    "turbo:k2v2",
    "turbo:k5v5+stored",
    "turbo:k4v8+start9",
    "turbo:k8v4+start9+stored",
    "turbo:k8v3+search",
    "turbo:k4v8+search+start9",
]


@settings(max_examples=40, deadline=None)
@given(
    text=st.sampled_from(SCHEMES),
    in_windows=st.booleans(),
    lengths=st.lists(st.integers(1, 12) | st.sampled_from([250, 256, 300]), min_size=1, max_size=6),
    b=st.integers(1, 2),
)
def test_appending_in_pieces_stores_the_same_bytes_as_at_once(text, in_windows, lengths, b):
    rng, n_tokens = np.random.default_rng(sum(lengths)), sum(lengths)
    k, v = rng.standard_normal((2, b, H, n_tokens, D)).astype(np.float32)
    tokens = SimpleNamespace(k=k, v=v)
    cache, start = (DeferredKVCache if in_windows else PackedKVCache)(turbo(text)), 0
    for length in lengths:
        append(cache, cut(tokens, start, start + length))
        start += length
    if n_tokens >= (cache.scheme.start_tokens or 1):
        assert_stores(cache, tokens)
    else:
        assert not cache.is_packed
    assert (cache.offset, cache.size(), cache.empty()) == (n_tokens, n_tokens, False)


class AnySequence(RuleBasedStateMachine):
    """Caches under random operations, against the float tokens that each one holds."""

    @initialize(
        text=st.sampled_from(
            ["turbo:k8v3", "turbo:k4v2+start7", "turbo:k2v8+start3+stored", "turbo+search"]
        ),
        in_windows=st.booleans(),
    )
    def begin(self, text, in_windows):
        self.owner = deferred.Owner()
        deferred.install(self.owner)
        self.rng = np.random.default_rng(0)
        self.scheme = turbo(text)
        cls = DeferredKVCache if in_windows else PackedKVCache
        # Each entry: a cache, its tokens, whether it is packed.
        self.family = [[cls(self.scheme), self.random(0), False]]

    def random(self, n_tokens):
        k, v = self.rng.standard_normal((2, 1, H, n_tokens, D)).astype(np.float32)
        return SimpleNamespace(k=k, v=v)

    def pick(self, choice):
        return self.family[choice % len(self.family)]

    def teardown(self):
        deferred.remove(self.owner)

    @rule(choice=st.integers(0, 9), n=st.integers(1, 9) | st.sampled_from([250, 300]))
    def append(self, choice, n):
        entry = self.pick(choice)
        cache, held, packed = entry
        new = self.random(n)
        tokens = join(held, new)
        got = append(cache, new)
        packs = tokens.k.shape[2] >= (self.scheme.start_tokens or 1)
        if packed or (packs and self.scheme.stored):
            assert_same(got, decode(tokens, self.scheme))
        else:
            assert_same(got, tokens)
        entry[1:] = tokens, packed or packs

    @rule(choice=st.integers(0, 9), n=st.integers(0, 9) | st.just(1000))
    def trim(self, choice, n):
        entry = self.pick(choice)
        cache, held, packed = entry
        left = max(held.k.shape[2] - n, 0)
        assert cache.trim(n) == held.k.shape[2] - left
        entry[1:] = cut(held, 0, left), packed and left > 0

    @precondition(lambda self: len(self.family) < 4)
    @rule(choice=st.integers(0, 9))
    def deepcopy(self, choice):
        cache, held, packed = self.pick(choice)
        self.family.append([copy.deepcopy(cache), held, packed])

    @precondition(lambda self: len(self.family) < 4)
    @rule(choice=st.integers(0, 9))
    def from_state(self, choice):
        cache, held, packed = self.pick(choice)
        self.family.append([type(cache).from_state(cache.state), held, packed])

    @invariant()
    def every_cache_holds_its_own_tokens(self):
        for cache, held, packed in getattr(self, "family", []):
            n_tokens = held.k.shape[2]
            assert (cache.offset, cache.size(), cache.empty(), cache.is_packed) == (
                (n_tokens, n_tokens, n_tokens == 0, packed)
            )
            if packed:
                assert_stores(cache, held)
            elif n_tokens:
                k, v = cache.keys_and_values()
                assert_same(SimpleNamespace(k=np.array(k), v=np.array(v)), held)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
