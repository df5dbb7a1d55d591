"""Retrieval through the quantised cache: small random models, and SmolLM2, which finds facts."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.haystack import Haystack
from kvstow.evaluate.texts import Text, bundled

mx = pytest.importorskip("mlx.core")
tiny = pytest.importorskip("tests.integration.tiny")
harness = pytest.importorskip("kvstow.evaluate.harness")
needle = pytest.importorskip("kvstow.evaluate.needle")

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("needle")]

WINDOW = needle.Window((180, 220), (0.0, 1.0), per_cell=2, chunk_tokens=64)
TEXTS = [Text("made", "x", " ".join(f"Sentence {i} says little." for i in range(60)))]


class Letters:
    """One token a letter; what a random model writes counts as every number."""

    def __init__(self, written="0123456789"):
        self.written = written

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) % tiny.VOCAB for letter in text]

    def decode(self, tokens):
        assert len(tokens) == needle.ANSWER_TOKENS
        return self.written


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama")


@pytest.fixture
def finds_all(monkeypatch):
    monkeypatch.setattr(needle, "_found", lambda *_: True)


def reference_of(model, window=WINDOW):
    tokenizer = Letters()
    prompts = window.prompts(Haystack(tokenizer, TEXTS))
    return needle.Reference(model, tokenizer, prompts, window)


def answers(model, arm, **changes):
    """What an arm wrote, without a reference."""
    reference = reference_of(model, replace(WINDOW, **changes))
    with harness.running(model, Arm.parse(arm)) as run:
        return reference._read(run, lambda *_: None)


@pytest.mark.usefixtures("finds_all")
def test_a_row_counts_every_cell(model):
    row = reference_of(model).score(Arm.parse("turbo:k8v3"))
    assert [(c["length"], c["depth"], c["n"]) for c in row["cells"]] == [
        (180, 0.0, 2),
        (180, 1.0, 2),
        (220, 0.0, 2),
        (220, 1.0, 2),
    ]
    assert (row["score"], row["score_off"], row["relative"]) == (1, 1, 1)
    assert row["layers"] == [2, 2]


def test_what_is_not_found_is_counted_in_its_cell(model, monkeypatch):
    reference = reference_of(model)
    calls = iter(range(100))
    missed = len(WINDOW.prompts(Haystack(Letters(), TEXTS)))  # the first that the arm reads
    monkeypatch.setattr(needle, "_found", lambda *_: next(calls) != missed)
    row = reference.score(Arm.parse("turbo:k8v3"))
    assert (row["score"], row["score_off"], row["relative"]) == (7 / 8, 1, 7 / 8)
    assert row["interval_95"] == pytest.approx([0.529, 0.978], abs=5e-4)
    assert [cell["n"] - cell["found"] for cell in row["cells"]].count(1) == 1
    assert all(cell["found_off"] == cell["n"] for cell in row["cells"])


@pytest.mark.usefixtures("finds_all")
@pytest.mark.parametrize("prefix_hit", [False, True])
def test_what_is_measured_went_through_a_smaller_cache(model, prefix_hit):
    about = answers(model, "turbo:k8v3", prefix_hit=prefix_hit).about
    assert 0 < about["kv_bytes"] < about["kv_bytes_bf16"]
    exact = answers(model, "off", prefix_hit=prefix_hit).nats
    assert np.all(answers(model, "turbo:k8v3", prefix_hit=prefix_hit).nats != exact)


def test_chunks_and_prefix_hits_do_not_change_the_unquantised_model(model):
    exact = answers(model, "off").nats
    for change in ({"chunk_tokens": 500}, {"chunk_tokens": 7}, {"prefix_hit": True}):
        assert np.abs(answers(model, "off", **change).nats - exact).max() < 1e-4


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k8v3+stored", "turbo:k4v2@eager"])
def test_a_prefix_hit_never_encodes_again(model, scheme, monkeypatch):
    reference = reference_of(model, needle.Window((180,), (0.5,), 1, prefix_hit=True))
    prompt = reference.prompts[0]
    read, stored = [], []
    honest = copy.deepcopy

    def note(caches):
        read.extend(caches)
        stored.extend(planes(cache) for cache in caches)
        return honest(caches)

    monkeypatch.setattr(needle.copy, "deepcopy", note)
    with harness.running(model, Arm.parse(scheme)) as run:
        hit = reference._prefilled(run, [prompt])
    n = len(prompt.haystack)
    assert [cache.offset for cache in hit] == [n + len(prompt.question) - 1] * 2
    for before, own, cache in zip(stored, read, hit, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(before, planes(own), strict=True))
        after = [plane[:, :, :n] for plane in planes(cache)]
        assert [plane.shape[2] for plane in before] == [n] * len(before)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def planes(cache):
    return [np.array(plane) for part in cache.packed() for plane in part]


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v2"])
def test_a_hit_continues_as_without_one_from_a_chunk_boundary(model, scheme):
    window = needle.Window((180,), (0.5,), 1)
    boundary = len(reference_of(model, window).prompts[0].haystack)
    same = {"lengths": (180,), "depths": (0.5,), "per_cell": 1, "chunk_tokens": boundary}
    hit, whole = (answers(model, scheme, **same, prefix_hit=on).nats for on in (True, False))
    assert np.array_equal(hit, whole)


@pytest.mark.usefixtures("finds_all")
def test_the_identity_control_is_exactly_zero(model):
    reference = reference_of(model)
    reference.score(Arm.parse("off"))
    assert np.array_equal(reference._answers.nats, answers(model, "off").nats)


@pytest.mark.usefixtures("finds_all")
def test_an_arm_that_quantises_nothing_is_refused(model):
    with pytest.raises(EvaluationError, match=r"start500: this arm quantised nothing"):
        reference_of(model).score(Arm.parse("turbo:k8v3+start500"))


@pytest.mark.usefixtures("finds_all")
def test_a_model_that_is_not_deterministic_is_refused(model, monkeypatch):
    calls = iter(range(10_000))
    honest = needle.feed
    monkeypatch.setattr(needle, "feed", lambda *args: honest(*args) * (1 + 1e-3 * next(calls)))
    with pytest.raises(EvaluationError, match="differs from itself"):
        reference_of(model).score(Arm.parse("off"))


def test_a_model_that_finds_nothing_is_refused_with_the_cells_that_fail(model, monkeypatch):
    monkeypatch.setattr(needle, "_found", lambda prompt, _: prompt.cell != (220, 1.0))
    with pytest.raises(
        EvaluationError,
        match=r"finds 6 of 8 facts, and 80% .*: 0 of 2 at length "
        r"220 depth 1; try shorter lengths or a larger model",
    ):
        reference_of(model).score(Arm.parse("turbo:k8v3"))


def test_the_unquantised_model_reads_once_also_where_it_finds_too_little(model, monkeypatch):
    monkeypatch.setattr(needle, "_found", lambda *_: False)
    reference = reference_of(model)
    reads = []
    honest = reference._read
    monkeypatch.setattr(reference, "_read", lambda *args: (reads.append(1), honest(*args))[1])
    for arm in ("off", "turbo:k8v3"):
        with pytest.raises(EvaluationError, match="finds 0 of 8 facts"):
            reference.score(Arm.parse(arm))
    assert len(reads) == 1


def test_only_prompts_that_are_alike_are_rows_of_one_batch(model, monkeypatch):
    monkeypatch.setattr(needle, "TOKENS_AT_ONCE", 400)
    prompts = reference_of(model, needle.Window((180, 220), (0.0, 0.5, 1.0), 3)).prompts
    batches = list(needle._batches(prompts))
    assert [prompt for batch in batches for prompt in batch] == prompts
    for batch in batches:
        assert len({(len(p.haystack), len(p.question)) for p in batch}) == 1
        assert len(batch) <= 2
    assert max(map(len, batches)) == 2


@pytest.mark.usefixtures("finds_all")
def test_batches_do_not_change_the_answers(model, monkeypatch):
    whole = answers(model, "turbo:k8v3")
    monkeypatch.setattr(needle, "TOKENS_AT_ONCE", 1)
    one_by_one = answers(model, "turbo:k8v3")
    assert np.abs(whole.nats - one_by_one.nats).max() < 1e-4
    assert whole.about["kv_bytes"] == one_by_one.about["kv_bytes"]


@pytest.mark.model
def test_smollm2_finds_facts_through_the_cache(smollm2):
    model, tokenizer = smollm2
    window = needle.Window((256,), (0.0, 1.0), 1, prefix_hit=True, chunk_tokens=128)
    prompts = window.prompts(Haystack(tokenizer, bundled(["moby-dick"])))
    reference = needle.Reference(model, tokenizer, prompts, window)
    row = reference.score(Arm.parse("turbo:k8v4"))
    assert (row["score_off"], row["relative"], row["layers"]) == (1, 1, [30, 30])
