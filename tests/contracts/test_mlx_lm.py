"""What kvstow assumes about mlx-lm. A failure here is upstream news, not a bug."""

import inspect
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstow import Scheme

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
mlx_lm = pytest.importorskip("mlx_lm")
base = pytest.importorskip("mlx_lm.models.base")
host = pytest.importorskip("mlx_lm.models.cache")
llama = pytest.importorskip("mlx_lm.models.llama")
generation = pytest.importorskip("mlx_lm.generate")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")

pytestmark = pytest.mark.mlx

OURS = {
    "empty",
    "from_state",
    "is_trimmable",
    "keys_and_values",
    "make_mask",
    "merge",
    "nbytes",
    "offset",
    "size",
    "state",
    "trim",
    "update_and_fetch",
}
OURS_IN_A_BATCH = {"extend", "extract", "filter", "finalize", "prepare"}
KNOWN_AND_LEFT_OUT = {"step", "to_quantized"}  # absent on purpose: see PackedKVCache
LEFT_OUT_OF_A_BATCH = KNOWN_AND_LEFT_OUT | {"from_state"}  # nothing restores a batch
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
}


@pytest.fixture
def model():
    return llama.Model(llama.ModelArgs.from_dict(CONFIG))


def random(n_tokens=3):
    return mx.random.normal((1, 2, n_tokens, 64))


def parameters(function):
    return inspect.signature(function).parameters


def public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def test_the_version_is_one_that_was_tried():
    assert version("mlx-lm").split(".")[:2] == ["0", "32"]


# --- the cache protocol


def test_the_cache_protocol_has_no_member_we_have_not_considered():
    assert public(host.KVCache) - OURS - KNOWN_AND_LEFT_OUT == set()


@pytest.mark.parametrize("name", ["PackedKVCache", "DeferredKVCache"])
def test_our_caches_have_every_member_of_the_protocol_but_those_left_out(name):
    cache = getattr(integration, name)(Scheme.parse("turbo"))
    assert set(dir(cache)) >= OURS
    assert not set(dir(cache)) & KNOWN_AND_LEFT_OUT


@pytest.mark.parametrize("name", ["BatchKVCache", "BatchRotatingKVCache"])
def test_the_batch_protocol_has_no_member_we_have_not_considered(name):
    known = OURS | OURS_IN_A_BATCH | KNOWN_AND_LEFT_OUT
    assert public(getattr(host, name)) - known == set()


@pytest.mark.parametrize("name", ["PackedKVCache", "DeferredKVCache"])
def test_our_batches_have_every_member_of_the_protocol_but_those_left_out(name):
    cls = getattr(integration, name)
    batch = cls.merge([cls(Scheme.parse("turbo")) for _ in range(2)])
    # Only caches of one row are merged.
    assert set(dir(batch)) >= (OURS | OURS_IN_A_BATCH) - {"from_state", "merge"}
    assert not set(dir(batch)) & LEFT_OUT_OF_A_BATCH


def test_a_batch_cache_moves_tokens_of_any_dtype_and_width():
    """Three of them carry the five planes, the last with nothing beside it."""
    wide = mx.arange(2 * 2 * 300 * 4).reshape(2, 2, 300, 4).astype(mx.uint8)
    batch = host.BatchKVCache([0, 0])
    batch.update_and_fetch(wide, wide[..., :0])
    batch.prepare(lengths=[-0, -100], right_padding=[0, 100])  # said after the append, as we do
    batch.finalize()
    assert batch.offset.tolist() == [300, 200]
    assert np.array_equal(np.array(batch.keys[1, :, 100:300]), np.array(wide[1, :, :200]))
    assert (batch.keys.dtype, batch.values.shape[-1]) == (mx.uint8, 0)
    other = host.BatchKVCache([0])
    other.update_and_fetch(wide[:1, :, :5], wide[:1, :, :5, :0])
    batch.extend(other)
    batch.filter(mx.array([2, 1]))
    row = batch.extract(1)
    assert np.array_equal(np.array(row.keys), np.array(wide[1:, :, :200]))
    merged = host.KVCache.merge([row, host.KVCache()])
    assert (merged.keys.dtype, merged.values.shape) == (mx.uint8, (2, 2, 200, 0))


def test_offsets_of_a_batch_follow_from_where_it_ends_and_its_rows_begin():
    """They are sums in mlx-lm, and computed from the two by us."""
    batch, two = host.BatchKVCache([0, 0]), mx.concatenate([random(7), random(7)])
    steps = {
        "pads on the left": lambda: batch.prepare(left_padding=[2, 0]),
        "append": lambda: batch.update_and_fetch(two, two),
        "pads on the right": lambda: batch.prepare(lengths=[0, -3], right_padding=[0, 3]),
        "roll": batch.finalize,
        "trim": lambda: batch.trim(1),
        "join": lambda: batch.extend(host.KVCache.merge([filled(9), filled(4)])),
        "keep": lambda: batch.filter(mx.array([3, 1])),
    }
    for step in steps.values():
        step()
        assert batch.offset.tolist() == (batch._idx - batch.left_padding).tolist()
    assert batch.offset.tolist() == [4, 3]


def filled(n):
    cache = host.KVCache()
    cache.update_and_fetch(random(n), random(n))
    return cache


def test_a_plain_caches_state_is_keys_values_and_offset():
    cache = host.KVCache()
    assert cache.state == (None, None, 0)
    k, v = random(), random()
    cache.update_and_fetch(k, v)
    keys, values, offset = cache.state
    assert (keys.shape, values.shape, offset) == ((1, 2, 256, 64), (1, 2, 256, 64), 3)
    twin = host.KVCache.from_state((keys, values, 2))
    assert twin.offset == 2
    assert np.array_equal(np.array(twin.keys_and_values()[0]), np.array(k[:, :, :2]))


def test_a_plain_cache_grows_in_steps_of_256_and_trims_by_its_offset():
    cache = host.KVCache()
    assert (cache.empty(), cache.offset, cache.keys, cache.nbytes) == (True, 0, None, 0)
    for n_tokens, capacity in ((3, 256), (253, 256), (1, 512)):
        cache.update_and_fetch(random(n_tokens), random(n_tokens))
        assert cache.keys.shape[2] == capacity
    assert (cache.trim(999), cache.offset, cache.size()) == (257, 0, 0)
    assert not cache.empty()


def test_an_affine_cache_takes_group_size_and_bits_and_counts_in_triples():
    assert list(parameters(host.QuantizedKVCache)) == ["group_size", "bits"]
    cache = host.QuantizedKVCache(group_size=64, bits=8)
    assert (cache.group_size, cache.bits, cache.keys) == (64, 8, None)
    keys, values = cache.update_and_fetch(random(), random())
    assert [x.shape for x in keys] == [(1, 2, 3, 16), (1, 2, 3, 1), (1, 2, 3, 1)]
    assert len(values) == 3
    assert len(cache.keys) == len(cache.values) == 3
    converted = host.KVCache().to_quantized(group_size=32, bits=4)
    assert (type(converted), converted.group_size, converted.bits) == (
        host.QuantizedKVCache,
        32,
        4,
    )


def test_an_affine_cache_cannot_count_itself_before_its_first_token():
    with pytest.raises(AttributeError):
        _ = host.QuantizedKVCache().nbytes


def test_a_rotating_cache_says_its_window():
    assert host.RotatingKVCache(max_size=32).max_size == 32
    assert not issubclass(host.RotatingKVCache, host.KVCache)


def test_a_recurrent_cache_has_no_keys_and_no_offset():
    cache = host.ArraysCache(2)
    assert not hasattr(cache, "keys")
    assert not hasattr(cache, "offset")
    assert cache.empty()


def test_the_mask_maker_takes_the_arguments_that_we_pass():
    assert list(parameters(host.create_attention_mask)) == [
        "N",
        "offset",
        "return_array",
        "window_size",
    ]
    make = host.create_attention_mask
    assert make(1, offset=5, return_array=False, window_size=None) is None
    assert make(3, offset=5, return_array=False, window_size=None) == "causal"
    assert make(3, offset=5, return_array=True, window_size=None).shape == (3, 8)


def test_models_ask_the_cache_for_its_mask_by_these_names():
    asked = []
    cache = SimpleNamespace(make_mask=lambda n, **options: asked.append((n, options)))
    base.create_attention_mask(mx.zeros((1, 7, 4)), cache, window_size=3, return_array=True)
    assert asked == [(7, {"return_array": True, "window_size": 3})]


def test_a_cache_that_is_false_would_lose_its_mask():
    class Empty(list):
        def make_mask(self, *_, **__):
            return "asked"

    assert base.create_attention_mask(mx.zeros((1, 7, 4)), Empty()) == "causal"
    assert base.create_attention_mask(mx.zeros((1, 7, 4)), Empty([0])) == "asked"


def test_saving_a_prompt_cache_takes_arrays_numbers_and_strings_of_the_state(tmp_path):
    state = ((mx.zeros((2,)), None), True, 3, "turbo:k8v3")
    host.save_prompt_cache(str(tmp_path / "x.safetensors"), [SimpleNamespace(state=state)])
    held = mx.load(str(tmp_path / "x.safetensors"))
    assert set(held) == {"0.0.0", "0.0.1", "0.1", "0.2", "0.3"}


def test_trimming_a_prompt_cache_asks_every_layer():
    asked = []
    layer = SimpleNamespace(is_trimmable=lambda: True, trim=lambda n: asked.append(n) or n)
    assert host.trim_prompt_cache([layer, layer], 4) == 4
    assert asked == [4, 4]


# --- attention


def attend(cache, keys, values, **options):
    q = mx.random.normal((1, 4, 3, 64))
    return base.scaled_dot_product_attention(
        q, keys, values, cache=cache, scale=0.125, mask="causal", **options
    )


def test_a_cache_with_bits_is_sent_to_the_quantised_attention_looked_up_as_a_global(monkeypatch):
    calls = []
    monkeypatch.setattr(
        base,
        "quantized_scaled_dot_product_attention",
        lambda *args, **options: calls.append((args, options)) or "ours",
    )
    opaque = object()  # keys and values go through untouched
    cache = SimpleNamespace(bits=8, group_size=32)
    assert attend(cache, opaque, opaque) == "ours"
    (((_, keys, values), options),) = calls
    assert keys is values is opaque
    assert options == {"scale": 0.125, "mask": "causal", "group_size": 32, "bits": 8}


def test_a_cache_without_bits_is_sent_to_the_fast_attention(monkeypatch):
    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", None)
    k, v = random(), random()
    assert attend(SimpleNamespace(group_size=32), k, v).shape == (1, 4, 3, 64)
    assert attend(None, k, v).shape == (1, 4, 3, 64)


def test_attention_sinks_are_refused_for_a_cache_with_bits():
    with pytest.raises(ValueError, match="does not support attention sinks"):
        attend(SimpleNamespace(bits=8, group_size=32), None, None, sinks=mx.zeros((4,)))


def test_every_layer_of_a_model_reaches_the_replaced_global(model, monkeypatch):
    seen = []
    original = base.quantized_scaled_dot_product_attention
    monkeypatch.setattr(
        base,
        "quantized_scaled_dot_product_attention",
        lambda *args, **options: seen.append(args[0].shape[2]) or original(*args, **options),
    )
    cache = [host.QuantizedKVCache() for _ in model.layers]
    for n_tokens in (5, 1):
        model(mx.zeros((1, n_tokens), mx.int32), cache=cache)
    assert seen == [5, 5, 1, 1]


# --- models and generation


def test_a_prompt_cache_comes_from_the_instances_own_make_cache(model):
    made = [object()]
    model.make_cache = lambda: made
    assert host.make_prompt_cache(model) is made
    assert host.make_prompt_cache(model, max_kv_size=64) is made  # which is ignored then


def test_an_attribute_of_the_instance_hides_make_cache_until_it_is_deleted(model):
    before = [type(c) for c in model.make_cache()]
    model.make_cache = list
    assert vars(model)["make_cache"] is list
    assert "make_cache" not in model.parameters()
    del model.make_cache
    assert [type(c) for c in model.make_cache()] == before


def test_a_model_without_make_cache_gets_one_plain_cache_per_layer():
    layers = SimpleNamespace(layers=[1, 2, 3])
    assert [type(c) for c in host.make_prompt_cache(layers)] == [host.KVCache] * 3


def test_calling_a_model_computes_nothing(model):
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    out = model(mx.zeros((1, 4), mx.int32), cache=host.make_prompt_cache(model))
    assert out.shape == (1, 4, 50)
    assert mx.get_peak_memory() - before < 16384  # the weights alone are 400 kB


class Spy(host.KVCache):
    """A plain cache that counts who reads its state, which holds what ours hold."""

    def __init__(self):
        super().__init__()
        self.n_reads = 0

    @property
    def state(self):
        self.n_reads += 1
        return self.keys, self.values, self.offset, "a string", True, None


def steps(model, cache=None, n_prompt=10, **options):
    prompt = mx.arange(n_prompt, dtype=mx.int32)
    return list(generation.generate_step(prompt, model, prompt_cache=cache, **options))


def test_prefill_evaluates_the_state_of_every_layer_after_each_chunk(model):
    cache = [Spy(), Spy()]
    steps(model, cache, prefill_step_size=4, max_tokens=1)
    assert [c.n_reads for c in cache] == [3, 3]  # 4 + 4 + 1, and the last token alone


def test_generation_asks_the_model_for_its_cache(model):
    made = []
    model.make_cache = lambda: made.append([Spy(), Spy()]) or made[-1]
    steps(model, max_tokens=1)
    assert len(made) == 1
    assert made[0][0].offset >= 10


def test_prefill_reports_its_progress(model):
    seen = []
    steps(
        model,
        prefill_step_size=4,
        max_tokens=1,
        prompt_progress_callback=lambda *progress: seen.append(progress),
    )
    assert seen == [(0, 10), (4, 10), (8, 10), (9, 10), (10, 10)]


def test_kv_bits_converts_exactly_the_caches_that_have_to_quantized():
    converted = object()
    with_it = SimpleNamespace(offset=5, to_quantized=lambda **_: converted)
    too_short = SimpleNamespace(offset=4, to_quantized=lambda **_: converted)
    without = SimpleNamespace(offset=5)
    cache = [with_it, too_short, without]
    generation.maybe_quantize_kv_cache(cache, quantized_kv_start=5, kv_group_size=64, kv_bits=8)
    assert cache == [converted, too_short, without]


def test_a_cache_without_merge_is_refused_by_batch_generation_and_not_served_wrongly(model):
    class NoMerge(host.KVCache):
        merge = property()

    model.make_cache = lambda: [NoMerge(), NoMerge()]
    assert not hasattr(NoMerge(), "merge")
    batch = generation.BatchGenerator(model)
    batch.insert([[1, 2, 3], [4, 5]], max_tokens=[2, 2])
    with pytest.raises(ValueError, match="does not yet support batching"):
        batch.next()


@pytest.mark.parametrize("name", ["prompt_cache", "prompt_progress_callback", "prefill_step_size"])
def test_generation_takes_the_options_that_we_pass(name):
    assert name in parameters(generation.generate_step)
    kinds = {p.kind for p in parameters(mlx_lm.stream_generate).values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds  # handed on to generate_step


def test_a_response_has_the_fields_that_we_read(model):
    class Detokenizer:
        last_segment = ""

        def add_token(self, token):
            self.last_segment = f"<{token}>"

        def finalize(self):
            self.last_segment = ""

        def reset(self):
            self.last_segment = ""

    class Tokenizer(generation.TokenizerWrapper):
        def __init__(self):
            pass

        detokenizer = Detokenizer()
        eos_token_ids = frozenset()

    replies = list(mlx_lm.stream_generate(model, Tokenizer(), [1, 2, 3], max_tokens=3))
    assert len(replies) == 3
    last = replies[-1]
    assert "".join(r.text for r in replies).count("<") >= 2
    assert (last.prompt_tokens, last.generation_tokens, last.finish_reason) == (3, 3, "length")
    assert isinstance(last.token, int)
    assert last.prompt_tps > 0
    assert last.generation_tps > 0
    assert last.peak_memory >= 0
    assert replies[0].finish_reason is None


def test_no_model_changes_a_mask_in_place():
    """`attention.masks` knows a mask by its object: changed in place, it would mean another."""
    folder = Path(base.__file__).parent
    changed = re.compile(
        r"^\s*\w*mask\w*(\[[^\]]*\])? *([|&^+*-]=)|^\s*\w*mask\[[^\]\"']*\] *=[^=]"
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.glob("*.py"))
        if path.name != "cache.py"  # where masks are made
        for line in path.read_text(encoding="utf-8").splitlines()
        if changed.search(line)
    ]
    assert found == []
