"""The quality bars, on the real demo model in float32.

``--log-cli-level=info`` shows the figures.
"""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
kl = pytest.importorskip("kvstow.evaluate.kl")
texts = pytest.importorskip("kvstow.evaluate.texts")

pytestmark = [pytest.mark.mlx, pytest.mark.model, pytest.mark.xdist_group("bars")]

# Nats; on 24 texts of two sources they are 0.0002, 0.0051 and 0.0208 (quality.jsonl).
KL_BARS = {"turbo:k8v8": 0.0005, "turbo:k8v4": 0.008, "turbo:k8v3": 0.03}
SUBJECTS = ("river", "volcano", "engine", "doctor", "dragon")  # one token each
REPLY_TOKENS, ANSWER_TOKENS = 64, 32
# How far apart the two best logits may be where texts part. Under k8v8 their difference
# moves by 0.05 rms on such text (under k8v3 by 0.45), so this is three times that.
LOGIT_GAP = 0.15
log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def model(smollm2):
    return smollm2[0]


# --- KL


@pytest.fixture(scope="module")
def divergences(smollm2):
    """Scheme to mean KL in nats. ``off`` is zero: tests/evaluate/test_regression.py."""
    model, tokenizer = smollm2
    window = kl.Window(steps=16)
    passages = texts.passages(tokenizer, texts.bundled(["python"]), window.n_tokens, n=8)
    figures = {}
    for scores in kl.compare(model, passages, list(KL_BARS), window):
        row = scores.as_dict()
        figures[row["arm"]] = row["mean_kl_nats"]
        # What was measured went through the packed cache.
        assert (row["layers"], row["fetch"]) == ([30, 30], "deferred")
        assert row["nonfinite_groups"] == 0
        assert row["kv_bytes_bf16"] / row["kv_bytes"] > 1.8
    log.info("mean KL in nats: %s", {scheme: round(x, 6) for scheme, x in figures.items()})
    return figures


@pytest.mark.parametrize("scheme", KL_BARS)
def test_divergence_is_within_the_bar(divergences, scheme):
    assert 0 < divergences[scheme] <= KL_BARS[scheme]


def test_fewer_bits_diverge_more(divergences):
    figures = [divergences[scheme] for scheme in KL_BARS]
    assert figures == sorted(set(figures))


# --- greedy text


def chat(tokenizer, text):
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True)


@pytest.fixture(scope="module")
def prompts(smollm2):
    """Five chat prompts of one length, as rows."""
    rows = [chat(smollm2[1], f"Write a long story about a {subject}.") for subject in SUBJECTS]
    assert len({len(row) for row in rows}) == 1
    return np.array(rows)


def greedy(model, prompts, n_tokens=REPLY_TOKENS):
    """Tokens ``(b, n)``, and by how much the best logit was ahead of the second."""
    cache = host.make_prompt_cache(model)
    logits = np.array(model(mx.array(prompts), cache=cache)[:, -1])
    chosen, gaps = [], []
    for _ in range(n_tokens):
        chosen.append(logits.argmax(axis=-1))
        gaps.append(np.ptp(np.partition(logits, -2, axis=-1)[:, -2:], axis=-1))
        logits = np.array(model(mx.array(chosen[-1][:, None]), cache=cache)[:, -1])
    return SimpleNamespace(
        tokens=np.stack(chosen, axis=1), gaps=np.stack(gaps, axis=1), cache=cache
    )


@pytest.fixture(scope="module")
def replies(model, prompts):
    found = {"off": greedy(model, prompts)}
    for scheme in ("turbo:k8v8", "turbo:k8v3"):
        with kvstow.attached(model, scheme):
            found[scheme] = greedy(model, prompts)
        assert {str(c.scheme) for c in found[scheme].cache} == {scheme}
    return found


QUESTIONS = (
    (
        "What is the capital of France?",
        "How do I boil an egg?",
        "What causes the seasons on Earth?",
    ),
    ("Explain what a key-value cache is.",),
    ("Write a short poem about the sea.",),
)


@pytest.mark.parametrize("questions", QUESTIONS)
def test_an_answer_under_k8v8_is_the_unquantised_answer(smollm2, questions):
    """Questions of one length are rows of one batch, whose weights are read once.

    Of twelve such questions ten are answered alike over 64 tokens; two part at gaps of 0.017
    and 0.075.
    """
    model, tokenizer = smollm2
    prompts = np.array([chat(tokenizer, question) for question in questions])
    exact = greedy(model, prompts, ANSWER_TOKENS)
    with kvstow.attached(model, "turbo:k8v8"):
        stored = greedy(model, prompts, ANSWER_TOKENS)
    for row in range(len(questions)):
        differs = np.flatnonzero(exact.tokens[row] != stored.tokens[row])
        assert not differs.size or exact.gaps[row, differs[0]] < 0.01


def test_long_greedy_texts_under_k8v8_part_only_at_near_ties(replies):
    exact, stored = replies["off"], replies["turbo:k8v8"]
    parted = {}
    for row, subject in enumerate(SUBJECTS):
        at = np.flatnonzero(exact.tokens[row] != stored.tokens[row])
        if at.size:
            parted[subject] = (int(at[0]), float(exact.gaps[row, at[0]]))
    log.info("k8v8 parts from the unquantised text at (token, logit gap): %s", parted)
    assert all(gap < LOGIT_GAP for _, gap in parted.values()), parted
    assert len(parted) <= 3  # under k8v3 all of them part, most of them further from a tie


def most_repeated(tokens, n=4):
    """The share of the commonest run of `n` tokens."""
    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return max(runs.count(run) for run in runs) / len(runs)


def test_greedy_text_under_k8v3_is_about_as_likely_to_the_unquantised_model(
    model, prompts, replies
):
    nats = {}
    for scheme in ("off", "turbo:k8v3"):
        tokens = replies[scheme].tokens
        both = np.concatenate([prompts, tokens], axis=1)
        logits = model(mx.array(both[:, :-1]))[:, prompts.shape[1] - 1 :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        taken = mx.take_along_axis(logprobs, mx.array(tokens)[..., None], axis=-1)
        nats[scheme] = np.array(taken)[..., 0].mean(axis=1)
    log.info("mean log-probability of a token: %s", {k: x.round(3) for k, x in nats.items()})
    # Greedy text is nearly the likeliest there is. Text of another model, or of a cache
    # that garbles what it holds, is several nats per token below it.
    assert nats["turbo:k8v3"].mean() > nats["off"].mean() - 0.25
    assert nats["turbo:k8v3"].min() > -2


def test_greedy_text_under_k8v3_does_not_fall_into_a_loop(replies):
    for row in replies["turbo:k8v3"].tokens:
        assert most_repeated(row.tolist()) <= 0.1
    assert most_repeated([5, 6] * 32) > 0.4


def test_greedy_text_under_k8v3_is_another_text(replies):
    parted = (replies["turbo:k8v3"].tokens != replies["off"].tokens).any(axis=1)
    assert parted.sum() >= 3


# --- bytes


def test_k8v3_takes_a_2_55th_of_bf16_at_1024_tokens(model, smollm2):
    tokens = mx.array(texts.passages(smollm2[1], texts.bundled(["python"]), 1024, n=1).tokens)
    with kvstow.attached(model, "turbo:k8v3"):
        cache = host.make_prompt_cache(model)
        before = mx.get_active_memory()
        for at in range(0, 1024, 256):
            model(tokens[:, at : at + 256], cache=cache)
            mx.eval([c.state for c in cache])
        allocated = mx.get_active_memory() - before
    usage = kvstow.usage(cache)
    bf16 = 30 * 2 * 3 * 64 * 1024 * 2  # layers, K and V, KV heads, head_dim, tokens, bytes
    assert (usage.tokens, usage.capacity_tokens, usage.kv_bytes_bf16) == (1024, 1024, bf16)
    assert usage.compression_ratio >= 2.55
    assert bf16 / allocated >= 2.5  # allocations are rounded up, and buffers reused
    assert usage.nonfinite_groups == 0
