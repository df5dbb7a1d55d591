"""A policy spends a budget where costs say, and is no worse than any other that fits."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.capacity import LayerShape
from kvstow.errors import EvaluationError
from kvstow.policy import Policy
from kvstow.scheme import KEY_BITS, VALUE_BITS, Scheme, Turbo

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
allocation = pytest.importorskip("kvstow.evaluate.allocation")

Layer = allocation.Layer
SHAPE = LayerShape("full", 2, 64, 64)


def falling(scale):
    """Costs that fall four times per bit, as errors do."""
    return {bits: scale * 4.0**-bits for bits in (2, 3, 4, 5, 8)}


layers = st.lists(
    st.builds(
        lambda k, v: Layer(SHAPE, falling(k), falling(v)),
        st.floats(1e-6, 1e3),
        st.floats(1e-6, 1e3),
    ),
    min_size=1,
    max_size=3,
).map(lambda found: dict(enumerate(found)))
SCHEMES = allocation.candidates(Turbo())
FEW = [Turbo(8, v) for v in (3, 4, 5)]  # steps of one size: none is left out for a smaller one
LEAST = 2 * Turbo(2, 2).bytes_per_token(64)


def test_the_candidates_are_all_pairs_of_widths_with_the_options_asked_for():
    found = allocation.candidates(Scheme.parse("turbo:k8v3+search"))
    assert len(set(found)) == len(KEY_BITS) * len(VALUE_BITS)
    assert all(scheme.search for scheme in found)


@given(layers, st.floats(1, 4))
def test_a_budget_is_never_exceeded_and_more_of_it_never_costs_kl(found, factor):
    budget = int(LEAST * len(found) * factor)
    policy = allocation.allocate(found, SCHEMES, budget)
    cost = allocation.predicted(found, policy)
    assert cost.n_bytes <= budget
    more = allocation.predicted(found, allocation.allocate(found, SCHEMES, 2 * budget))
    assert more.nats <= cost.nats


@settings(max_examples=30, deadline=None)
@given(layers, st.integers(0, 60))
def test_no_policy_of_as_many_bytes_costs_less(found, extra):
    least = min(2 * scheme.bytes_per_token(64) for scheme in FEW)
    policy = allocation.allocate(found, FEW, least * len(found) + extra)
    cost = allocation.predicted(found, policy)
    # What is optimal are the bytes taken, not a rest that no next step fits in.
    for schemes in product(FEW, repeat=len(found)):
        other = [found[i].under(scheme) for i, scheme in enumerate(schemes)]
        if sum(c.n_bytes for c in other) <= cost.n_bytes:
            assert sum(c.nats for c in other) >= cost.nats * (1 - 1e-9)


@given(layers)
def test_a_uniform_budget_is_spent_no_worse_than_uniformly(found):
    uniform = Turbo(5, 4)
    policy = allocation.allocate(
        found, SCHEMES, sum(layer.under(uniform).n_bytes for layer in found.values())
    )
    cost, even = (allocation.predicted(found, p) for p in (policy, Policy(uniform)))
    # As above: what is left over is less than one step of a layer.
    step = 2 * (Turbo(8, 8).bytes_per_token(64) - Turbo(2, 2).bytes_per_token(64))
    assert cost.nats <= even.nats or even.n_bytes - cost.n_bytes < step


def test_hard_keys_get_more_bits_and_easy_ones_give_them():
    found = {
        0: Layer(SHAPE, falling(100.0), falling(1.0)),
        1: Layer(SHAPE, falling(0.01), falling(1.0)),
    }
    policy = allocation.allocate(found, SCHEMES, 4 * Turbo(5, 4).bytes_per_token(64))
    hard, easy = (policy.of_layer(i, "full") for i in (0, 1))
    assert hard.key_bits > easy.key_bits


def test_too_few_bytes_are_refused_with_the_least():
    found = {0: Layer(SHAPE, falling(1.0), falling(1.0))}
    with pytest.raises(EvaluationError, match=f"the least is {LEAST}"):
        allocation.allocate(found, SCHEMES, LEAST - 1)


def test_the_most_common_scheme_is_the_default():
    a, b = Turbo(8, 3), Turbo(4, 4)
    policy = allocation.policy_of({0: a, 1: b, 2: b, 5: a, 7: b})
    assert policy.default == b
    assert policy.rules[0].as_dict() == {"layers": "0, 5", "scheme": "turbo:k8v3"}


def test_costs_pass_through_what_was_measured_and_fall_with_the_error_of_the_layer():
    tiny = pytest.importorskip("tests.integration.tiny")
    texts = pytest.importorskip("kvstow.evaluate.texts")
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 40))
    passages = texts.Passages(tokens, ("a/a", "a/b"))
    nats = {str(arm): 0.1 * (i + 1) for i, arm in enumerate(allocation.probes([0, 1], Turbo()))}
    found = allocation.costs(tiny.build("llama"), passages, nats, Turbo())
    assert sorted(found) == [0, 1]
    for i, layer in found.items():
        assert layer.keys[5] == pytest.approx(nats[f"turbo:k5v8@layer{i}"])
        measured = nats[f"turbo:k8v3@layer{i}"]
        assert layer.values[3] + layer.keys[8] == pytest.approx(measured)
        for costs in (layer.keys, layer.values):
            widths = sorted(costs)
            assert [costs[b] for b in widths] == sorted(costs.values(), reverse=True)
        # Errors of keys fall about 4 times per bit.
        assert 30 < layer.keys[5] / layer.keys[8] < 120
