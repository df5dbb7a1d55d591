"""Models split over two processes of this machine, each with packed caches of its own heads."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

import kvstow
from kvstow import UnsupportedModel

architectures = pytest.importorskip("tests.integration.architectures")
processes = pytest.importorskip("tests.integration.launch")
parallel = pytest.importorskip("kvstow.integrations.mlx_lm.tensor_parallel")
skeleton = pytest.importorskip("kvstow.models").skeleton
tiny = pytest.importorskip("tests.integration.tiny")

pytestmark = pytest.mark.mlx
# Split by mlx-lm, and quantised by kvstow.
MODELS = (
    *("exaone_moe", "glm4_moe", "gpt_oss", "iquestloopcoder", "llama", "minimax"),
    *("minimax_m3_vl", "ministral3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"),
    *("solar_open", "step3p5"),
)
# And refused, with the reason, or not run: see docs/architectures.md.
OTHERS = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe_lite"),
    *("glm_moe_dsa", "kimi_k25", "kimi_k3", "longcat_flash", "longcat_flash_ngram", "mistral4"),
    *("muse_spark", "prism_hadamard_qwen35"),
)


@processes.needs_ring
def test_split_models_have_the_logits_of_whole_ones_and_half_the_bytes():
    done = processes.launch(sys.executable, "-m", "tests.integration.two_processes", *MODELS)
    told = processes.objects(done)
    rows = {row["name"]: row for row in told if "name" in row}
    assert set(rows) == set(MODELS), done.stdout + done.stderr
    for row in rows.values():
        assert row["size"] == 2
        # Sums of two halves round differently, and a number between two codes takes the other.
        assert row["moved"] < 2e-2, row
        assert row["bytes"] == 0.5, row
    seeds = {row["rank"]: row["seed"] for row in told if "seed" in row}
    assert set(seeds) == {0, 1}
    assert seeds[0] == seeds[1] > 0  # so all draw the same tokens


def test_every_architecture_that_mlx_lm_can_split_is_tried():
    def can_split(name):
        return hasattr(import_module(f"mlx_lm.models.{name}").Model, "shard")

    names = [name for name in architectures.names() if name != "olmo"]  # exits without a package
    assert {name for name in names if can_split(name)} == {*MODELS, *OTHERS}


def test_an_architecture_that_mlx_lm_cannot_split_is_refused():
    model = skeleton(tiny.COMMON | {"model_type": "gemma2"})
    with pytest.raises(UnsupportedModel, match="mlx-lm cannot split a gemma2 over processes"):
        parallel.check_split(model, SimpleNamespace(size=lambda: 2))


@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m3_vl"])
def test_a_stage_of_a_pipeline_is_refused_and_says_what_can_be_done(name):
    model = architectures.build(name)
    owner = getattr(model, "language_model", model)
    owner.model.pipeline(SimpleNamespace(rank=lambda: 1, size=lambda: 2))
    with pytest.raises(UnsupportedModel, match=r"one of 2 stages of a pipeline, .* model\.shard"):
        kvstow.attach(model, "turbo")
    assert "make_cache" not in vars(model)
