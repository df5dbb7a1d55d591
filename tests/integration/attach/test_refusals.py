"""What `attach` refuses: it says why, and leaves everything as it was."""

import pytest

import kvstow
from kvstow import SchemeError, UnsupportedModel

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
tiny = pytest.importorskip("tests.integration.tiny")
attached = pytest.importorskip("tests.integration.attach.attached")

pytestmark = pytest.mark.mlx
attachment = integration.attachment
build = tiny.build
RECURRENT, EXPECTED = attached.RECURRENT, attached.EXPECTED
layer_types, is_ours = attached.layer_types, attached.is_ours
MLA = r"multi-head latent attention \(kv_lora_rank 64\)"
REFUSED = [
    ("deepseek_v2", "turbo", "auto", MLA),
    ("deepseek_v2", "affine:8", "auto", MLA),
    ("kimi_vl", "turbo", "auto", MLA),
    ("mamba", "turbo", "auto", f"would apply to no layer of this model: {RECURRENT}"),
    ("mamba", "affine:8", "auto", f"would apply to no layer of this model: {RECURRENT}"),
    ("llama-80", "turbo", "auto", r"turbo:k8v3 needs head_dim in \(64, 128, 256, 512\), .* 80"),
    ("llama-80", "turbo:k4v2+start9", "eager", r"needs head_dim in .* the model has 80"),
    ("llama-80", "affine:8", "auto", "affine:8 needs a head_dim .* multiple of 64, .* 80"),
    ("llama-80", "affine:4g32", "auto", "affine:4g32 needs a head_dim .* multiple of 32, .* 80"),
    ("gpt_oss", "affine:8", "auto", "does not support attention sinks"),
    ("gemma2", "affine:8", "auto", "does not run on affine:8 caches"),
    ("llama", "affine:8", "eager", "fetch 'eager' is an option of turbo, the scheme is affine:8"),
    ("llama", "affine:8", "deferred", "fetch 'deferred' is an option of turbo"),
    ("gemma2", "turbo", "deferred", "expand_dims"),
]


@pytest.mark.parametrize(("name", "scheme", "fetch", "why"), REFUSED)
def test_a_refusal_says_why_and_leaves_the_model_as_it_was(name, scheme, fetch, why):
    model = build(name)
    before = layer_types(model)
    with pytest.raises(UnsupportedModel, match=why):
        kvstow.attach(model, scheme, fetch=fetch)
    assert "make_cache" not in vars(model)
    assert layer_types(model) == before
    assert not is_ours()


@pytest.mark.parametrize(
    ("scheme", "fetch", "error"),
    [
        ("turbo:k8", "auto", SchemeError),
        ("turbo:k3v3", "auto", SchemeError),
        ("affine:5", "auto", SchemeError),
        ("TURBO", "auto", SchemeError),
        ("turbo", "fast", ValueError),
        ("turbo", "fused", UnsupportedModel),
        ("affine:8", "eager", UnsupportedModel),
    ],
)
def test_a_failed_attach_leaves_the_earlier_attachment(scheme, fetch, error):
    model = build("llama")
    kvstow.attach(model, "turbo:k8v4")
    earlier = attachment(model)
    with pytest.raises(error):
        kvstow.attach(model, scheme, fetch=fetch)
    with pytest.raises(error), kvstow.attached(model, scheme, fetch=fetch):
        pass
    assert attachment(model) is earlier
    assert is_ours()
    kvstow.detach(model)
    assert not is_ours()


def test_a_wrong_scheme_is_reported_before_the_model_is_looked_at():
    with pytest.raises(SchemeError, match="key bits must be one of"):
        kvstow.attach(object(), "turbo:k9v3")


@pytest.mark.parametrize("thing", [object(), None, ("model", "tokenizer"), "smollm2"])
def test_what_is_not_an_mlx_model_is_refused(thing):
    with pytest.raises(
        UnsupportedModel, match=f"expected an mlx-lm model, got {type(thing).__name__}"
    ):
        kvstow.attach(thing, "turbo")
    with pytest.raises(UnsupportedModel, match="expected an mlx-lm model"):
        kvstow.detach(thing)


def test_an_mlx_module_that_is_no_language_model_is_refused():
    with pytest.raises(UnsupportedModel):
        kvstow.attach(nn.Linear(4, 4), "turbo")


def test_an_mlx_array_is_refused():
    with pytest.raises(UnsupportedModel):
        kvstow.attach(mx.zeros(3), "turbo")


def test_every_configuration_is_tested():
    assert set(EXPECTED) | {name for name, *_ in REFUSED} == set(tiny.CONFIGS)
