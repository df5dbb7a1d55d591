"""What tests of `attach` share: what it makes of each model, and a schedule to run one by."""

import importlib

from mlx_lm.models import base
from mlx_lm.models import cache as host

from kvstow.integrations import mlx_lm as integration
from tests.integration import scheduled, tiny

ORIGINAL = base.quantized_scaled_dot_product_attention
ORIGINAL_WITH_SINKS = base.scaled_dot_product_attention
OURS = {
    "eager": {
        host.KVCache: integration.PackedKVCache,
        host.RotatingKVCache: integration.PackedRotatingKVCache,
    },
    "deferred": {
        host.KVCache: integration.DeferredKVCache,
        host.RotatingKVCache: integration.DeferredRotatingKVCache,
    },
}
SCHEDULE, run = scheduled.SCHEDULE, scheduled.run
RECURRENT = "recurrent layer has a state, not keys and values"
# Name: fetch, quantised layers, reasons of the others.
EXPECTED = {
    "cohere": ("deferred", [0, 1], {}),
    "cohere2": ("deferred", [0, 1], {}),
    "dbrx": ("deferred", [0, 1], {}),
    "exaone4": ("deferred", [0, 1], {}),
    "gemma2": ("eager", [0, 1], {}),
    "gemma3": ("deferred", [0, 1], {}),
    "gemma3n": ("deferred", [0, 1, 2, 3], {}),
    "gemma3_text": ("deferred", [0, 1], {}),
    "gemma4_text": ("deferred", [0, 1, 2, 3, 4], {}),
    "gpt2": ("deferred", [0, 1], {}),
    "gpt_oss": ("deferred", [0, 1], {}),  # attention sinks
    "jamba": ("deferred", [1], {RECURRENT: [0]}),
    "llama": ("deferred", [0, 1], {}),
    "llama-7": ("deferred", [0, 1], {}),
    "llama-mha": ("deferred", [0, 1], {}),
    "llama-sliding": ("deferred", [0, 1], {}),
    "mixtral": ("deferred", [0, 1], {}),
    "olmo2": ("deferred", [0, 1], {}),
    "phi3": ("deferred", [0, 1], {}),
    "qwen2": ("deferred", [0, 1], {}),
    "qwen3": ("deferred", [0, 1], {}),
    "qwen3_next": ("deferred", [3], {RECURRENT: [0, 1, 2]}),
    "stablelm": ("eager", [0, 1], {}),
}


def schedule_of(name):
    """Recurrent layers cannot be trimmed."""
    recurrent = RECURRENT in EXPECTED[name][2]
    return tuple(n for n in SCHEDULE if n > 0) if recurrent else SCHEDULE


def defined(model, report):
    """A prompt cache whose quantised layers follow the definition in numpy."""
    return [
        tiny.definition(report.scheme, c) if layer.quantised else c
        for layer, c in zip(report.layers, host.make_prompt_cache(model), strict=True)
    ]


def layer_types(model):
    return [type(c) for c in host.make_prompt_cache(model)]


def own_make_cache(model):
    """The model with a ``make_cache`` of its own on the instance."""

    def make_cache():
        return [host.KVCache(), host.RotatingKVCache(max_size=32)]

    model.make_cache = make_cache
    return make_cache


def affine_by_hand(model, scheme):
    return [host.QuantizedKVCache(scheme.group_size, scheme.bits) for _ in model.layers]


def is_ours():
    """Whether mlx-lm's functions are replaced: both, or neither."""
    ours = base.quantized_scaled_dot_product_attention is not ORIGINAL
    for module in (base, importlib.import_module("mlx_lm.models.gpt_oss")):
        assert (module.scaled_dot_product_attention is not ORIGINAL_WITH_SINKS) == ours
    return ours
