"""An arm's caches hold what the arm says, on models that are random and small."""

import numpy as np
import pytest

from kvstow.errors import EvaluationError, PolicyError, UnsupportedModel
from kvstow.evaluate.arms import Arm

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
tiny = pytest.importorskip("tests.integration.tiny")
harness = pytest.importorskip("kvstow.evaluate.harness")
simulated = pytest.importorskip("kvstow.evaluate.simulated")
plain_caches = pytest.importorskip("kvstow.integrations.mlx_lm.attach").plain_caches

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama", num_hidden_layers=3)


def logits(model, arm, schedule=(9, 1, 1, 4)):
    """Of the last append of a run with fresh caches, and the caches."""
    with harness.running(model, Arm.parse(arm)) as run:
        caches = run.new()
        at = 0
        for n in schedule:
            out = harness.feed(model, caches, np.array(tiny.tokens(20))[:, at : at + n])
            at += n
        return np.array(out), caches


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v2", "turbo:k8v8"])
def test_simulating_keys_and_values_gives_the_eager_output(model, scheme):
    """With both parts simulated there is nothing but the packing that could differ."""
    eager, _ = logits(model, f"{scheme}@eager")
    from_parts = _simulated_whole(model, scheme)
    assert np.array_equal(eager, from_parts)


def _simulated_whole(model, scheme):
    rounding = simulated.Codec(
        simulated.codec_of(Arm.parse(f"{scheme}@keys"), 64)[0].keys,
        simulated.codec_of(Arm.parse(f"{scheme}@values"), 64)[0].values,
    )
    caches = [simulated.SimulatedKVCache(rounding) for _ in range(3)]
    at = 0
    for n in (9, 1, 1, 4):
        out = harness.feed(model, caches, np.array(tiny.tokens(20))[:, at : at + n])
        at += n
    return np.array(out)


def test_each_part_moves_the_output_and_the_whole_moves_it_more(model):
    exact, _ = logits(model, "off")
    moved = {
        arm: np.abs(logits(model, arm)[0] - exact).max()
        for arm in ("turbo:k4v2@keys", "turbo:k4v2@values", "turbo:k4v2", "paper:mse2")
    }
    assert min(moved.values()) > 1e-4


def test_one_layer_is_the_only_one_that_is_quantised(model):
    _, caches = logits(model, "turbo:k8v3@layer1")
    kinds = [type(cache).__name__ for cache in caches]
    assert kinds == ["KVCache", "DeferredKVCache", "KVCache"]


def test_taking_over_a_plain_cache_leaves_it_as_it_was(model):
    plain = host.make_prompt_cache(model)
    harness.feed(model, plain, np.array(tiny.tokens(9)))
    before = [np.array(c.keys_and_values()[0]) for c in plain]
    for arm in ("turbo:k8v3", "turbo:k8v3@layer1", "turbo:k4v2@keys", "paper:mse3", "affine:4"):
        with harness.running(model, Arm.parse(arm)) as run:
            taken = run.take_over(plain)
            assert [c.offset for c in taken] == [9, 9, 9]
            harness.feed(model, taken, np.array(tiny.tokens(2)))
    after = [np.array(c.keys_and_values()[0]) for c in plain]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_taking_over_is_a_first_append(model):
    with harness.running(model, Arm.parse("turbo:k4v2")) as run:
        plain = host.make_prompt_cache(model)
        with harness.running(model, Arm.parse("off")):
            plain = host.make_prompt_cache(model)
            harness.feed(model, plain, np.array(tiny.tokens(9)))
        taken, appended = run.take_over(plain), run.new()
        harness.feed(model, appended, np.array(tiny.tokens(9)))
        for one, other in zip(taken, appended, strict=True):
            for a, b in zip(one.packed(), other.packed(), strict=True):
                assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_row_says_what_is_quantised_and_what_it_takes(model):
    _, caches = logits(model, "turbo:k8v3")
    with harness.running(model, Arm.parse("turbo:k8v3")) as run:
        about = run.about(caches)
    assert (about["layers"], about["bits_per_value"], about["head_dims"]) == ([3, 3], 6.25, [64])
    assert about["kv_bytes"] < about["kv_bytes_bf16"]
    with harness.running(model, Arm.parse("turbo:k8v3@keys")) as run:
        about = run.about(run.new())
    assert (about["fetch"], about["kv_bytes"]) == ("simulated", None)


def test_sliding_layers_are_quantised_and_full_leaves_them_as_they_are():
    model = tiny.build("exaone4")
    with harness.running(model, Arm.parse("turbo:k8v3")) as run:
        both = run.about(run.new())
    with harness.running(model, Arm.parse("turbo:k8v3@full")) as run:
        full = run.about(run.new())
    assert (both["arm"], both["layers"], both["kept"]) == ("turbo:k8v3", [2, 2], {})
    assert (full["arm"], full["layers"]) == ("turbo:k8v3@full", [1, 2])
    assert full["kept"] == {"the policy says off": [0]}
    assert (full["bits_per_value"], full["head_dims"]) == (6.25, [64])
    exact, *quantised = (logits(model, arm)[0] for arm in ("off", "turbo:k8v3@full", "turbo:k8v3"))
    apart = [np.abs(x - exact).max() for x in quantised]
    assert 0 < apart[0] < apart[1]


def test_full_of_a_model_without_sliding_windows_is_refused(model):
    with pytest.raises(PolicyError, match="names no layer of this model"):
        logits(model, "turbo:k8v3@full")


@pytest.mark.parametrize("arm", ["turbo:k8v3@keys", "turbo:k8v3@values", "paper:mse4"])
def test_a_simulated_arm_keeps_windows_as_they_slide(arm):
    model = tiny.build("exaone4")
    with harness.running(model, Arm.parse(arm)) as run:
        caches, plain = run.new(), plain_caches(model)
        for n in (40, 1, 9, 1):
            for cache in (caches, plain):
                harness.feed(model, cache, np.zeros((1, n), int))
        assert [(c.offset, c.nbytes) for c in caches] == [(c.offset, c.nbytes) for c in plain]
        taken = run.take_over(plain)
    one, other = (harness.feed(model, c, np.zeros((1, 1), int)) for c in (taken, plain))
    assert 0 < np.abs(np.array(one - other)).max() < 1


def test_a_layer_that_the_model_does_not_have_is_refused(model):
    with pytest.raises(EvaluationError, match=r"cache 7 .* those that can are \[0, 1, 2\]"):
        logits(model, "turbo:k8v3@layer7")


def test_a_model_that_cannot_be_stored_is_refused():
    model = tiny.build("llama", head_dim=80, hidden_size=320)
    with pytest.raises(UnsupportedModel, match="head_dim"):
        logits(model, "turbo:k8v3")


def test_another_dtype_goes_when_the_arm_does(model):
    before, _ = logits(model, "off")
    in_bfloat16, _ = logits(model, "off@bfloat16")
    after, _ = logits(model, "off")
    assert 0 < np.abs(in_bfloat16 - before).max() < 0.1
    assert np.array_equal(before, after)


def test_what_mlx_cannot_run_is_refused_in_one_line_that_names_the_arm(model):
    with (
        pytest.raises(EvaluationError, match=r"^affine:8: mlx cannot run this here: no kernel$"),
        harness.running(model, Arm.parse("affine:8")),
    ):
        raise RuntimeError("no kernel\nat some place")
    assert "make_cache" not in vars(model)


def test_a_mistake_in_python_code_keeps_its_own_exception(model):
    with pytest.raises(RecursionError), harness.running(model, Arm.parse("off")):
        raise RecursionError
