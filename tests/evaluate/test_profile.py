"""What a model stores, described layer by layer."""

from pathlib import Path

import numpy as np
import pytest

from kvstow.errors import EvaluationError
from kvstow.evaluate.rows import read_rows
from kvstow.evaluate.texts import Passages

mx = pytest.importorskip("mlx.core")
tiny = pytest.importorskip("tests.integration.tiny")
profiles = pytest.importorskip("kvstow.evaluate.profile")
hardness = pytest.importorskip("kvstow.integrations.mlx_lm.hardness")
host = pytest.importorskip("mlx_lm.models.cache")

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("profile")]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "profile.jsonl"
PASSAGES = Passages(np.array(tiny.tokens(40, b=3)), ("a/1", "a/2", "b/1"))


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama")


@pytest.fixture(scope="module")
def caches(model):
    caches = host.make_prompt_cache(model)
    model(mx.array(PASSAGES.tokens), cache=caches)
    return [tuple(map(np.array, c.keys_and_values())) for c in caches]


def test_every_figure_is_its_definition(model, caches):
    for layer, (k, v) in zip(profiles.profile(model, PASSAGES).layers, caches, strict=True):
        assert layer.key_norm == pytest.approx(np.linalg.norm(k, axis=-1).mean(), rel=1e-4)
        assert layer.value_norm == pytest.approx(np.linalg.norm(v, axis=-1).mean(), rel=1e-4)
        assert layer.ratio == pytest.approx(layer.key_norm / layer.value_norm, rel=1e-4)
        groups = k.reshape(*k.shape[:-1], 2, 32)
        rms = np.sqrt((k**2).mean(axis=-1, keepdims=True))
        ranges = (groups.max(axis=-1) - groups.min(axis=-1)) / rms
        assert layer.key_group_range == pytest.approx(ranges.mean(), rel=1e-4)
        # Steps of 1/15 of a range, errors uniform within one.
        steps = np.sqrt(((ranges / 15) ** 2).mean() / 12)
        assert layer.key_error_4bit == pytest.approx(steps, rel=0.1)
        assert layer.key_error_8bit == pytest.approx(steps * 15 / 254, rel=0.1)
        assert layer.hardness == pytest.approx(hardness.hardness(mx.array(k)), abs=1e-5)
        assert (layer.outlier_channels, layer.channels) == (0, 128)


def test_a_channel_beyond_eight_times_the_median_is_an_outlier():
    x = np.ones((2, 3, 5, 64), np.float32)
    x[:, 1, :, 4], x[:, 2, :, 6] = -8.5, 7.5
    assert profiles._outliers(x) == 1


def test_a_model_is_as_hard_as_its_hardest_layer():
    model = tiny.build("qwen2")
    bias = model.layers[1].self_attn.k_proj.bias
    model.layers[1].self_attn.k_proj.bias = bias.at[31::32].add(60.0)
    found = profiles.profile(model, PASSAGES)
    assert found.hardness == found.layers[1].hardness > hardness.LIMIT > found.layers[0].hardness
    assert found.layers[1].outlier_channels == 4
    row = found.as_dict()
    assert (row["hard_keys"], row["threshold"]) == (True, hardness.LIMIT)


@pytest.mark.parametrize(
    ("name", "indices", "n_caches"), [("gemma3_text", [0, 1], 2), ("jamba", [1], 2)]
)
def test_layers_with_keys_are_described_windows_included(name, indices, n_caches):
    found = profiles.profile(tiny.build(name), PASSAGES)
    assert [layer.index for layer in found.layers] == indices
    assert found.as_dict()["layers"] == [len(indices), n_caches]


@pytest.mark.parametrize(
    ("name", "why"), [("llama-80", r"its keys have \[80\]"), ("mamba", "no attention layer")]
)
def test_a_model_without_keys_to_code_is_refused(name, why):
    with pytest.raises(EvaluationError, match=why):
        profiles.profile(tiny.build(name), PASSAGES)


# --- the recorded figures

HARD = ("Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-Coder-1.5B-Instruct")
EASY = ("SmolLM2-135M-Instruct", "gemma-3-270m")


@pytest.fixture(scope="module")
def recorded():
    rows = [row for row in read_rows([RESULTS]) if row["measure"] == "profile"]
    return {row["model"]: row for row in rows}


def test_the_measure_separates_hard_from_easy_models_with_a_margin(recorded):
    for figure in ("hardness", "hardness_at_attach"):
        assert min(recorded[name][figure] for name in HARD) > 2 * hardness.LIMIT
        assert max(recorded[name][figure] for name in EASY) < hardness.LIMIT / 2


def test_random_tokens_find_what_text_finds(recorded):
    for row in recorded.values():
        assert row["hardness_at_attach"] == pytest.approx(row["hardness"], rel=0.25)


@pytest.mark.parametrize("name", HARD)
def test_the_layers_that_are_hard_are_those_whose_kl_is_large(recorded, name):
    kl = {
        int(row["arm"].partition("@layer")[2]): row["mean_kl_nats"]
        for row in read_rows([RESULTS])
        if row["measure"] == "kl" and row["model"] == name and "@layer" in row["arm"]
    }
    layers = recorded[name]["layers_profile"]
    hard = {layer["index"] for layer in layers if layer["hardness"] > hardness.LIMIT}
    assert hard
    assert len(kl) == len(layers)
    assert min(kl[i] for i in hard) > max(kl[i] for i in kl if i not in hard)
