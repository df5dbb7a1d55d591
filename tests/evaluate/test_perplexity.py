"""Perplexity through the quantised cache: small random models, and SmolLM2 for one figure."""

import numpy as np
import pytest

from kvstow.errors import EvaluationError, TextError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.texts import Passages, bundled
from kvstow.evaluate.texts import passages as passages_of

mx = pytest.importorskip("mlx.core")
tiny = pytest.importorskip("tests.integration.tiny")
perplexity = pytest.importorskip("kvstow.evaluate.perplexity")

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("perplexity")]

N_TOKENS = 40


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama")


@pytest.fixture(scope="module")
def passages():
    tokens = np.concatenate([np.array(tiny.tokens(N_TOKENS, seed=seed)) for seed in range(3)])
    return Passages(tokens, ("a/1", "a/2", "b/1"))


def reference_of(model, passages, chunk=8):
    return perplexity.Reference(model, passages, perplexity.Window(N_TOKENS, chunk))


@pytest.fixture(scope="module")
def reference(model, passages):
    return reference_of(model, passages)


def score(reference, arm):
    return reference.score(Arm.parse(arm))


def test_the_reference_is_the_model_without_a_cache(model, passages, reference):
    logits = np.array(model(mx.array(passages.tokens)), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nats = -np.take_along_axis(log_p[:, :-1], passages.tokens[:, 1:, None], axis=-1)[..., 0]
    scores = score(reference, "off")
    assert scores.nats.shape == (3, N_TOKENS - 1 - 8)
    # float32 forwards of 8 and of 40 tokens: 1e-4 is 20 times what they differ by
    assert np.abs(scores.nats - nats[:, 8:]).max() < 1e-4
    assert scores.as_dict()["ppl"] == pytest.approx(np.exp(nats[:, 8:].mean()), rel=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 8])
def test_the_identity_control_is_exactly_zero(model, passages, chunk):
    row = score(reference_of(model, passages, chunk), "off").as_dict()
    assert row["mean_change_nats"] == 0
    assert row["per_text_change_nats"] == [0, 0, 0]
    assert row["ppl"] == row["ppl_off"]


def test_chunks_do_not_change_the_unquantised_model(model, passages):
    by_chunk = [score(reference_of(model, passages, chunk), "off").nats for chunk in (1, 5, 20)]
    last = [nats[:, -10:] for nats in by_chunk]
    assert max(np.abs(nats - last[0]).max() for nats in last) < 1e-4


def test_chunks_change_a_quantised_one(model, passages):
    one, all_at_once = (
        score(reference_of(model, passages, chunk), "turbo:k4v2").nats[:, -10:] for chunk in (1, 20)
    )
    assert np.abs(one - all_at_once).max() > 1e-4


@pytest.mark.parametrize("chunk", [1, 8])
def test_what_is_measured_went_through_a_smaller_cache(model, passages, chunk):
    reference = reference_of(model, passages, chunk)
    scores = score(reference, "turbo:k8v3")
    row = scores.as_dict()
    assert 0 < row["kv_bytes"] < row["kv_bytes_bf16"]
    assert row["layers"] == [2, 2]
    assert np.all(scores.nats != scores.reference_nats, axis=0).mean() > 0.9


def test_scored_tokens_are_those_after_the_first_chunk(reference):
    row = score(reference, "turbo:k8v3").as_dict()
    assert row["n_scored_tokens"] == 3 * (N_TOKENS - 1 - 8)
    low, high = row["interval_95"]
    assert low <= row["mean_change_nats"] <= high
    assert np.mean(row["per_text_change_nats"]) == pytest.approx(row["mean_change_nats"], abs=1e-7)
    assert np.log(row["ppl"] / row["ppl_off"]) == pytest.approx(row["mean_change_nats"], abs=1e-6)


def test_fewer_bits_change_more(reference):
    changes = [
        np.abs(scores.nats - scores.reference_nats).mean()
        for scores in (score(reference, f"turbo:k8v{bits}") for bits in (8, 4, 3, 2))
    ]
    assert changes == sorted(changes)


def test_an_arm_that_quantises_nothing_is_refused(reference):
    with pytest.raises(EvaluationError, match=r"start500: this arm quantised nothing"):
        score(reference, "turbo:k8v3+start500")


def test_a_model_that_is_not_deterministic_is_refused(model, passages, monkeypatch):
    calls = iter(range(1000))
    honest = perplexity.feed
    monkeypatch.setattr(perplexity, "feed", lambda *args: honest(*args) * (1 + 1e-3 * next(calls)))
    with pytest.raises(EvaluationError, match="differs from itself"):
        score(reference_of(model, passages), "off")


def test_passages_shorter_than_the_window_are_refused(model, passages):
    with pytest.raises(TextError, match="needs 41 tokens, the passages have 40"):
        perplexity.Reference(model, passages, perplexity.Window(41, 8))


@pytest.mark.parametrize("chunk", [0, 39, 40])
def test_a_window_without_scored_tokens_is_refused(chunk):
    with pytest.raises(EvaluationError, match="at most 38"):
        perplexity.Window(N_TOKENS, chunk)


def test_the_longest_chunk_leaves_one_scored_token(model, passages):
    assert score(reference_of(model, passages, 38), "turbo:k4v2").nats.shape == (3, 1)


def test_texts_are_read_in_batches_that_their_logits_allow(model, passages, monkeypatch):
    whole = score(reference_of(model, passages), "turbo:k8v3")
    monkeypatch.setattr(perplexity, "LOGITS_AT_ONCE", 2 * 8 * tiny.VOCAB)
    reference = reference_of(model, passages)
    moved = []
    scores = reference.score(Arm.parse("turbo:k8v3"), on_step=lambda *step: moved.append(step))
    assert np.abs(scores.nats - whole.nats).max() < 1e-4
    assert scores.about["kv_bytes"] == whole.about["kv_bytes"]
    assert moved == [(i, 10) for i in range(1, 11)]


def test_a_large_vocabulary_is_summed_without_a_bias(rng):
    logits = rng.normal(0, 3, (1, 8, 200_000)).astype(np.float32)
    true = rng.integers(0, 200_000, (1, 8))
    exact = logits.astype(np.float64)
    picked = np.take_along_axis(exact, true[..., None], axis=-1)[..., 0]
    expected = np.log(np.exp(exact).sum(axis=-1)) - picked
    assert np.abs(perplexity._nats(mx.array(logits), true) - expected).max() < 1e-6


@pytest.mark.model
def test_smollm2_reads_prose_almost_as_well_through_the_cache(smollm2):
    model, tokenizer = smollm2
    read = passages_of(tokenizer, bundled(["moby-dick"]), 128, n=2)
    reference = perplexity.Reference(model, read, perplexity.Window(128, 32))
    row = score(reference, "turbo:k8v3").as_dict()
    assert 10 < row["ppl_off"] < 100
    assert 0 < abs(row["mean_change_nats"]) < 0.1
    assert score(reference, "turbo:k4v2").as_dict()["ppl"] > row["ppl"]
