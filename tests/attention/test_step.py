"""A step is planned once for layers that are alike, and anew for any other."""

from dataclasses import replace

import numpy as np
import pytest

from kvstow.scheme import Turbo
from kvstow.store import Turns

mx = pytest.importorskip("mlx.core")
arrival = pytest.importorskip("kvstow.attention.arrival")
fused = pytest.importorskip("kvstow.attention.fused")
window = pytest.importorskip("kvstow.attention.window")
codec = pytest.importorskip("kvstow.codec.mlx")
layout = pytest.importorskip("kvstow.codec.layout")
masks = pytest.importorskip("kvstow.attention.masks")
stand_in = pytest.importorskip("tests.kernels.stand_in")

pytestmark = pytest.mark.mlx
kernels = stand_in.kernels
D, CAPACITY = 64, 16
SCHEME = Turbo(8, 3)


def drawn(shape, dtype=mx.float32):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return mx.array(x).astype(dtype)


def layer(n_tokens=5, capacity=CAPACITY, scheme=SCHEME, b=1, late=0, late_dtype=mx.float32):
    """A window, of which the last `late` tokens are on their way."""
    exact = drawn((b, 2, capacity, D))
    keys = codec.encode_keys(exact, bits=scheme.key_bits, guard=True)
    values = codec.encode_values(exact, bits=scheme.value_bits, guard=True)
    coming = turns = None
    if late:
        given = [drawn((b, 2, late, D), late_dtype)] * 2
        planes = tuple(mx.contiguous(plane) for plane in (*keys, *values))
        keys, values = layout.PackedKeys(*planes[:3]), layout.PackedValues(*planes[3:])
        coming = arrival.Arrival(scheme, planes, n_tokens - late, given, turns := Turns())
    return window.PackedWindow(keys, values, n_tokens, scheme, True, coming, turns)


@pytest.fixture
def planned(kernels, monkeypatch):
    """How many calls were planned; the self-checks are behind us."""
    for late in (0, 1):
        for n in (1, 2):
            fused.attend(drawn((1, 2, n, D)), layer(late=late), scale=0.1, mask="causal")
    calls, plan = [], kernels.planned

    def counted(*given, **options):
        calls.append(options)
        return plan(*given, **options)

    monkeypatch.setattr(kernels, "planned", counted)
    fused._last.steps = ()
    kernels.forget()
    return calls


@pytest.mark.parametrize("late", [0, 1])
def test_layers_that_are_alike_share_a_plan_and_not_their_tokens(planned, kernels, late):
    first, second = layer(late=late), layer(late=late)
    for one in (first, second):
        fused.attend(drawn((1, 2, 1, D)), one, scale=0.1)
    assert planned == [{"stores": 4 if late else None}]
    assert len(kernels.attended) == 2
    assert len(kernels.stored) == 2 * late
    if late:
        assert first.arrival.there() is not second.arrival.there()


OTHERS = {
    "tokens": lambda: (drawn((1, 2, 1, D)), layer(n_tokens=6), {}),
    "capacity": lambda: (drawn((1, 2, 1, D)), layer(capacity=24), {}),
    "scheme": lambda: (drawn((1, 2, 1, D)), layer(scheme=Turbo(4, 3)), {}),
    "rows": lambda: (drawn((2, 2, 1, D)), layer(b=2), {}),
    "heads": lambda: (drawn((1, 4, 1, D)), layer(), {}),
    "query tokens": lambda: (drawn((1, 2, 2, D)), layer(), {"mask": "causal"}),
    "dtype": lambda: (drawn((1, 2, 1, D), mx.float16), layer(), {}),
    "scale": lambda: (drawn((1, 2, 1, D)), layer(), {"scale": 0.2}),
    "mask": lambda: (drawn((1, 2, 1, D)), layer(), {"mask": of_a_window()}),
    "a token on its way": lambda: (drawn((1, 2, 1, D)), layer(late=1), {}),
}


def of_a_window():
    return masks.remember(mx.ones((1, 5), mx.bool_), masks.Sight(1, 5, window=3))


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_has_a_plan_of_its_own(planned, name):
    fused.attend(drawn((1, 2, 1, D)), layer(), scale=0.1)
    queries, other, options = OTHERS[name]()
    got = fused.attend(queries, other, **{"scale": 0.1, **options})
    assert len(planned) == 2
    fused._last.steps = ()
    queries, other, options = OTHERS[name]()
    np.testing.assert_array_equal(
        np.array(got), np.array(fused.attend(queries, other, **{"scale": 0.1, **options}))
    )


def test_layers_of_two_kinds_that_take_turns_share_two_plans(planned, kernels):
    for n_tokens in (5, 9, 5, 9, 9, 5):
        fused.attend(drawn((1, 2, 1, D)), layer(n_tokens=n_tokens), scale=0.1)
    assert len(planned) == 2
    assert [call.longest for call in kernels.attended] == [5, 9, 5, 9, 9, 5]
    fused.attend(drawn((1, 2, 1, D)), layer(n_tokens=6), scale=0.1)
    fused.attend(drawn((1, 2, 1, D)), layer(n_tokens=5), scale=0.1)
    assert len(planned) == 4  # the third kind took a place


LATE_OTHERS = {
    "none": {},
    "of another dtype": {"late": 1, "late_dtype": mx.float16},
    "two": {"late": 2},
}


@pytest.mark.parametrize("name", LATE_OTHERS)
def test_a_plan_that_stores_a_token_is_for_layers_that_have_one_on_its_way(planned, kernels, name):
    fused.attend(drawn((1, 2, 1, D)), layer(late=1), scale=0.1)
    fused.attend(drawn((1, 2, 1, D)), layer(**LATE_OTHERS[name]), scale=0.1)
    assert planned == [{"stores": 4}, {"stores": None}]
    assert len(kernels.stored) == 1


def test_a_token_that_the_query_does_not_see_is_stored_by_a_launch_of_its_own(planned, kernels):
    trimmed, amid = layer(n_tokens=6, late=1), layer(n_tokens=9, late=5)
    trimmed.n_tokens = 5  # behind the token on its way
    amid.arrival.exact = tuple(x[:, :, :1] for x in amid.arrival.exact)
    narrow = masks.remember(mx.ones((1, 9), mx.bool_), masks.Sight(1, 9, window=3))
    for window, mask in ((trimmed, None), (amid, narrow)):
        fused.attend(drawn((1, 2, 1, D)), window, scale=0.1, mask=mask)
    assert planned == [{"stores": None}] * 2
    assert kernels.stored == []
    assert [place for _, place in kernels.appended] == [5, 4]


def test_a_prompt_keeps_neither_plan_nor_mask(planned):
    n = fused.MOST_STEP_TOKENS + 1
    for _ in range(2):
        fused.attend(drawn((1, 2, n, D)), layer(n_tokens=n), scale=0.1, mask="causal")
    assert len(planned) == 2
    assert fused._last.steps == ()


def test_planes_are_padded_for_the_kernel_alone(planned, monkeypatch):
    pads, pad = [], mx.pad
    monkeypatch.setattr(mx, "pad", lambda *given: pads.append(given) or pad(*given))
    given = drawn((1, 2, 1, D)), layer(capacity=13)
    unknown = mx.ones((1, 5), mx.bool_)
    fused.attend(*given, scale=0.1, mask=unknown)
    assert not pads
    assert not planned
    padded = fused.attend(*given, scale=0.1)
    assert pads
    wanted = fused.attend(given[0], replace(given[1], fused=False), scale=0.1)
    np.testing.assert_allclose(np.array(padded), np.array(wanted), atol=1e-6)


def test_layers_with_sinks_share_a_plan_and_not_their_sinks(planned, monkeypatch, kernels):
    given = []

    def attend(queries, _planes, _tokens, _scheme, scores, **_):
        given.append(scores.sinks)
        return queries

    monkeypatch.setattr(fused.selfcheck, "outcome", lambda _: fused.selfcheck.Outcome("", ""))
    monkeypatch.setattr(kernels, "attend", attend)
    several = [mx.zeros((2,)), mx.ones((2,)), None]
    for sinks in several:
        fused.attend(drawn((1, 2, 1, D)), layer(), scale=0.1, sinks=sinks)
    assert len(planned) == 2
    assert all(got is sinks for got, sinks in zip(given, several, strict=True))


def test_a_layer_that_is_deferred_leaves_the_plan_of_others(planned, kernels):
    queries, mask = drawn((1, 2, 1, D)), mx.ones((1, 5), mx.bool_)  # says what nobody knows
    for given in (None, mask, None):
        fused.attend(queries, layer(), scale=0.1, mask=given)
    assert len(planned) == 1
    assert len(kernels.attended) == 2


def test_a_plan_that_cannot_be_called_is_not_kept(planned, kernels):
    queries = drawn((1, 2, 1, D))
    fused.attend(queries, layer(), scale=0.1)
    kernels.error = RuntimeError("no launch")
    with pytest.warns(UserWarning, match="could not be called"):
        fused.attend(queries, layer(), scale=0.1)
    kernels.error = None
    fused.attend(queries, layer(), scale=0.1)
    assert len(planned) == 2
