"""Greedy continuations under two arms, and the token at which they part."""

import numpy as np
import pytest

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm.generate")
host = pytest.importorskip("mlx_lm.models.cache")
tiny = pytest.importorskip("tests.integration.tiny")
diffs = pytest.importorskip("kvstow.evaluate.diff")
integrations = pytest.importorskip("kvstow.integrations")

pytestmark = pytest.mark.mlx

PROMPT = tiny.tokens(20)[0].tolist()
ROUGH = "turbo:k2v2"


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama", tie_word_embeddings=False)  # else it repeats the last token


def compare(model, *arms, prompt=PROMPT, max_tokens=40, **more):
    first, second = map(Arm.parse, arms)
    return diffs.diff(model, prompt, (first, second), max_tokens=max_tokens, **more)


def test_an_arm_and_itself_do_not_part(model):
    found = compare(model, "turbo:k8v3", "turbo:k8v3")
    assert found.parting is None
    assert found.tokens[0] == found.tokens[1]
    assert len(found.tokens[0]) == 40


@pytest.mark.parametrize("arm", ["off", ROUGH])
@pytest.mark.parametrize("n_prefill", [5, 2048])
def test_a_continuation_is_that_of_mlx_lm_itself(model, monkeypatch, arm, n_prefill):
    monkeypatch.setattr(diffs, "PREFILL_TOKENS", n_prefill)
    with integrations.attached(model, arm):
        steps = mlx_lm.generate_step(
            mx.array(PROMPT), model, max_tokens=40, prefill_step_size=n_prefill
        )
        expected = [int(token) for token, _ in steps]
    assert compare(model, arm, arm).tokens[0] == expected


def test_the_parting_tells_both_tokens_under_both_arms(model):
    found = compare(model, "off", ROUGH)
    parting = found.parting
    at = parting.index
    assert found.tokens[0][:at] == found.tokens[1][:at]
    assert parting.tokens == (found.tokens[0][at], found.tokens[1][at])
    assert parting.tokens[0] != parting.tokens[1]
    exact = model(mx.array([PROMPT + found.tokens[0][:at]]))[0, -1]
    p = np.array(mx.softmax(exact.astype(mx.float32)))
    assert parting.probabilities[0] == pytest.approx(p[list(parting.tokens)], rel=1e-3)
    (a, b), (c, d) = parting.probabilities
    assert parting.gaps == pytest.approx((a - b, d - c))
    assert min(parting.gaps) >= 0


def test_the_order_of_the_arms_is_that_of_the_pairs(model):
    found, swapped = compare(model, "off", ROUGH), compare(model, ROUGH, "off")
    assert swapped.tokens == found.tokens[::-1]
    assert swapped.parting.gaps == found.parting.gaps[::-1]
    assert swapped.parting.tokens == found.parting.tokens[::-1]


def test_a_token_that_ends_a_text_is_its_last(model):
    whole = compare(model, "off", "off").tokens[0]
    end = whole[7]
    found = compare(model, "off", "off", ends=frozenset([end]))
    assert found.tokens[0] == whole[: whole.index(end) + 1]


def test_a_text_that_ends_before_the_other_has_parted_at_its_end(model):
    at = compare(model, "off", ROUGH).parting.index
    end = compare(model, "off", ROUGH).tokens[1][at]
    if end in compare(model, "off", ROUGH).tokens[0][: at + 1]:
        pytest.skip("the token stands in what both have")
    found = compare(model, "off", ROUGH, ends=frozenset([end]))
    assert (found.parting.index, len(found.tokens[1])) == (at, at + 1)


def test_a_prompt_of_one_token_is_enough(model):
    assert len(compare(model, "off", "turbo:k8v8", prompt=[3], max_tokens=4).tokens[1]) == 4


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(EvaluationError, match="the prompt is empty"):
        compare(model, "off", ROUGH, prompt=[])


def test_steps_are_counted_over_both_arms(model):
    moved = []
    compare(model, "off", ROUGH, max_tokens=3, on_step=lambda *at: moved.append(at))
    assert moved == [(i, 6) for i in range(1, 7)]
