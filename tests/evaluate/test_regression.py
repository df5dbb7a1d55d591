"""A small evaluation of the demo model against the one that is recorded.

The rows were written by ``kvstow eval kl --name SmolLM2-135M-Instruct --source moby-dick
--texts 8`` with the arms below. A change that makes KL worse than the upper end of a recorded
interval fails; one that makes it better than the lower end should record new rows.
"""

import json
from pathlib import Path

import pytest

import kvstow

pytest.importorskip("mlx.core")
kl = pytest.importorskip("kvstow.evaluate.kl")
texts = pytest.importorskip("kvstow.evaluate.texts")

pytestmark = [pytest.mark.mlx, pytest.mark.model, pytest.mark.xdist_group("regression")]

RECORDED = Path(kvstow.__file__).parents[2] / "benchmarks" / "results" / "regression.jsonl"
ROWS = {row["arm"]: row for row in map(json.loads, RECORDED.read_text().splitlines())}


@pytest.fixture(scope="module")
def reference(smollm2):
    model, tokenizer = smollm2
    passages = texts.passages(tokenizer, texts.bundled(["moby-dick"]), kl.Window().n_tokens, n=8)
    assert {row["texts"]["sha256"] for row in ROWS.values()} == {passages.about()["sha256"]}
    return kl.Reference(model, passages, kl.Window())


@pytest.mark.parametrize("arm", ROWS)
def test_kl_is_within_the_interval_that_was_recorded(reference, arm):
    row = reference.score(kl.Arm.parse(arm)).as_dict()
    low, high = ROWS[arm]["interval_95"]
    assert low <= row["mean_kl_nats"] <= high
    assert row["bits_per_value"] == ROWS[arm]["bits_per_value"]


def test_what_is_recorded_covers_the_default_the_search_and_the_controls():
    assert {"off", "affine:8", "turbo:k8v3", "turbo:k8v3+search", "turbo:k8v4"} <= set(ROWS)
