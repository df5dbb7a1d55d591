"""KL against the unquantised model, on a small random model."""

import numpy as np
import pytest

from kvstow.errors import EvaluationError, TextError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.texts import Passages

mx = pytest.importorskip("mlx.core")
tiny = pytest.importorskip("tests.integration.tiny")
kl = pytest.importorskip("kvstow.evaluate.kl")
integrations = pytest.importorskip("kvstow.integrations")

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("kl")]

WINDOW = kl.Window(prefix_tokens=12, steps=5)
APPEND = kl.Window(prefix_tokens=12, steps=5, build="append")


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama")


@pytest.fixture(scope="module")
def passages():
    tokens = np.concatenate([np.array(tiny.tokens(18, seed=seed)) for seed in range(3)])
    return Passages(tokens, ("a/1", "a/2", "b/1"))


@pytest.fixture(scope="module")
def reference(model, passages):
    return kl.Reference(model, passages, WINDOW)


def score(reference, arm):
    return reference.score(Arm.parse(arm))


@pytest.mark.parametrize("window", [WINDOW, APPEND], ids=["convert", "append"])
def test_the_identity_control_is_exactly_zero(model, passages, window):
    scores = score(kl.Reference(model, passages, window), "off")
    assert not scores.kl_nats.any()
    assert scores.agrees.all()
    assert scores.kl_nats.shape == (5, 3)


def test_kl_is_that_of_the_definition(model, passages, reference):
    scores = score(reference, "turbo:k4v2@eager")
    exact = model(mx.array(passages.tokens[:, :13]))[:, -1]  # what follows 13 true tokens
    p = np.array(mx.softmax(exact, axis=-1), np.float64)
    with integrations.attached(model, "turbo:k4v2", fetch="eager"):
        cache = pytest.importorskip("mlx_lm.models.cache").make_prompt_cache(model)
        model(mx.array(passages.tokens[:, :12]), cache=cache)
        stored = model(mx.array(passages.tokens[:, 12:13]), cache=cache)[:, -1]
    q = np.array(mx.softmax(stored, axis=-1), np.float64)
    assert scores.kl_nats[0] == pytest.approx((p * np.log(p / q)).sum(axis=-1), abs=1e-5)
    true = passages.tokens[:, 13]
    change = np.log(p[range(3), true]) - np.log(q[range(3), true])
    assert scores.true_nats[0] == pytest.approx(change, abs=1e-5)


def test_fewer_bits_diverge_more(reference):
    means = [score(reference, f"turbo:k8v{bits}").kl_nats.mean() for bits in (8, 4, 3, 2)]
    assert means == sorted(means)
    assert means[0] > 0


def test_what_is_measured_went_through_a_smaller_cache(reference):
    row = score(reference, "turbo:k8v3").as_dict()
    assert 0 < row["kv_bytes"] < row["kv_bytes_bf16"]
    assert row["layers"] == [2, 2]


def test_an_arm_that_quantises_nothing_is_refused(reference):
    with pytest.raises(EvaluationError, match=r"start500: this arm quantised nothing"):
        score(reference, "turbo:k8v3+start500")


def test_a_model_that_is_not_deterministic_is_refused(reference, monkeypatch):
    steps = iter(range(1000))
    honest = kl.feed
    monkeypatch.setattr(kl, "feed", lambda *args: honest(*args) * (1 + 1e-3 * next(steps)))
    fresh = kl.Reference(reference.model, Passages(np.array(tiny.tokens(18)), ("a/1",)), WINDOW)
    with pytest.raises(EvaluationError, match="differs from itself"):
        score(fresh, "off")


def test_passages_shorter_than_the_window_are_refused(model):
    with pytest.raises(TextError, match="needs 18 tokens, the passages have 17"):
        kl.Reference(model, Passages(np.array(tiny.tokens(17)), ("a/1",)), WINDOW)


def test_the_first_append_is_exact_unless_stored(reference):
    by_default, stored = (score(reference, f"turbo:k4v2{s}").kl_nats for s in ("", "+stored"))
    assert stored.mean() != by_default.mean()


def test_a_prefix_that_is_appended_is_another_measurement(model, passages, reference):
    appended = kl.Reference(model, passages, APPEND)
    assert (
        score(appended, "turbo:k4v2").kl_nats.mean()
        != score(reference, "turbo:k4v2").kl_nats.mean()
    )


def test_every_append_moves_the_bar(model, passages):
    moved = []
    kl.Reference(model, passages, APPEND).score(
        Arm.parse("turbo:k8v3"), on_step=lambda done, total: moved.append((done, total))
    )
    assert moved == [(i, 17) for i in range(1, 18)]


def test_a_row_is_finite_and_ready_for_json(reference):
    row = score(reference, "affine:4").as_dict()
    assert row["interval_95"][0] <= row["mean_kl_nats"] <= row["interval_95"][1]
    assert row["median_kl_nats"] <= row["p95_kl_nats"] <= row["p999_kl_nats"] <= row["max_kl_nats"]
    assert np.isfinite([row["rms_change_of_p"], row["change_of_log_ppl"]]).all()
    assert reference.perplexity > 1
