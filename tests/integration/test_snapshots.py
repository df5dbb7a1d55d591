"""A cache that was saved and loaded goes on exactly as the one that was not."""

import json

import numpy as np
import pytest

import kvstow
from kvstow import Policy, errors
from kvstow.snapshot import Snapshot

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
snapshots = pytest.importorskip("kvstow.integrations.mlx_lm.snapshots")
tiny = pytest.importorskip("tests.integration.tiny")
saving = pytest.importorskip("tests.integration.saving")

pytestmark = pytest.mark.mlx
Tokenizer, filled, save, load = saving.Tokenizer, saving.filled, saving.save, saving.load
assert_same = saving.assert_same
POLICY = Policy.from_dict(
    {"default": "turbo:k4v2", "rules": [{"layers": 0, "scheme": "turbo:k8v8"}]}
)
OFF_THEN_PACKED = Policy.from_dict({"rules": [{"layers": 0, "scheme": "off"}]})
# full attention, sliding windows, recurrent layers, a list of caches, shared KV, chunks
MODELS = ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "jamba", "gemma3n", "llama-sliding"]


@pytest.mark.parametrize("fetch", ["auto", "eager"])
@pytest.mark.parametrize("n_tokens", [1, 31, 100, 256, 300])
@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v2+search", "turbo:k5v5+start200"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_loaded_cache_goes_on_with_exactly_the_logits(tmp_path, name, scheme, n_tokens, fetch):
    model = tiny.build(name)
    with kvstow.attached(model, scheme, fetch=fetch):
        cache, tokens = filled(model, n_tokens)
        save(tmp_path / "x", model, cache, tokens)
        loaded = load(tmp_path / "x", model)
        assert list(map(type, loaded)) == list(map(type, cache))
        assert_same(model, cache, loaded)


@pytest.mark.parametrize(
    "scheme",
    ["off", "affine:8", "affine:4g32", "turbo:k8v3+stored", POLICY, OFF_THEN_PACKED],
    ids=str,
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_every_scheme_and_policy_goes_on_with_exactly_the_logits(tmp_path, scheme, dtype):
    model = tiny.build("llama", dtype=dtype)
    with kvstow.attached(model, scheme):
        cache, tokens = filled(model, 70)
        save(tmp_path / "x", model, cache, tokens)
        assert_same(model, cache, load(tmp_path / "x", model))


@pytest.mark.filterwarnings("ignore::kvstow.KvstowWarning")
@pytest.mark.parametrize("scheme", ["off", "turbo:k8v4"])
@pytest.mark.parametrize("n_tokens", [3, 40])
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_goes_on_with_exactly_the_logits(tmp_path, name, scheme, n_tokens):
    model = tiny.build(name)
    with kvstow.attached(model, scheme):
        cache, tokens = filled(model, n_tokens)
        save(tmp_path / "x", model, cache, tokens)
        loaded = load(tmp_path / "x", model)
        assert list(map(type, loaded)) == list(map(type, cache))
        assert_same(model, cache, loaded)


def random(n_tokens, dim=64, dtype=mx.float32):
    return mx.random.normal((1, 2, n_tokens, dim)).astype(dtype)


def appended(cache, *steps):
    for n in steps:
        cache.update_and_fetch(random(n), random(n))
    return cache


def recurrent():
    cache = host.ArraysCache(3)
    cache[0], cache[2] = random(4), random(4, dtype=mx.bfloat16)
    return cache


def chunked():
    cache = appended(host.ChunkedKVCache(8), 5, 6)
    cache.maybe_trim_front()
    return cache


CACHES = {
    "full": lambda: (host.KVCache(), appended(host.KVCache(), 7, 1)),
    "trimmed": lambda: (host.KVCache(), trimmed(appended(host.KVCache(), 7), 3)),
    "trimmed to nothing": lambda: (host.KVCache(), trimmed(appended(host.KVCache(), 7), 7)),
    "rotated": lambda: (
        host.RotatingKVCache(8, 2),
        appended(host.RotatingKVCache(8, 2), 6, *[1] * 7),
    ),
    "a long chunk": lambda: (host.RotatingKVCache(8), appended(host.RotatingKVCache(8), 5, 20)),
    "chunked": lambda: (host.ChunkedKVCache(8), chunked()),
    "joined": lambda: (host.ConcatenateKVCache(), appended(host.ConcatenateKVCache(), 4)),
    "affine": lambda: (host.QuantizedKVCache(32, 4), appended(host.QuantizedKVCache(32, 4), 9)),
    "recurrent": lambda: (host.ArraysCache(3), recurrent()),
    "list": lambda: (
        host.CacheList(host.ArraysCache(3), host.KVCache()),
        host.CacheList(recurrent(), appended(host.KVCache(), 5)),
    ),
}


def trimmed(cache, n):
    cache.trim(n)
    return cache


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES.keys())
def test_every_cache_of_mlx_lm_has_its_state_again(tmp_path, make):
    """All of it, but for capacity that holds no token."""
    records = snapshots.records
    fresh, cache = make()
    record, arrays = records.describe(cache)
    held = {name: (records.DTYPES[x.dtype], records.to_numpy(x)) for name, x in arrays.items()}
    made = pytest.importorskip("tests.snapshot.made")
    n_tokens = next((r.numbers["offset"] for _, r in record.walk("") if "offset" in r.numbers), 3)
    made.snapshot(tmp_path / "x", [(record, held)], n_tokens)
    with Snapshot(tmp_path / "x") as snapshot:

        def read(name):
            return records.to_mlx(snapshot.read(name), snapshot.tensors[name].dtype)

        again = records.restored(fresh, snapshot.manifest.layers[0], read, "0.")
    assert type(again) is type(cache)
    back, arrays_back = records.describe(again)
    assert back == record
    assert arrays_back.keys() == arrays.keys()
    for name, x in arrays.items():
        assert x.dtype == arrays_back[name].dtype
        assert np.array_equal(records.to_numpy(x), records.to_numpy(arrays_back[name]))


@pytest.mark.parametrize("cache", [host.BatchKVCache([0]), object()], ids=["a batch", "a stranger"])
def test_a_cache_that_no_record_is_known_of_is_refused(tmp_path, cache):
    model = tiny.build("llama")
    with pytest.raises(errors.SnapshotError, match="a snapshot cannot hold a"):
        save(tmp_path / "x", model, [cache, cache], [])
    assert list(tmp_path.iterdir()) == []


def test_two_sequences_are_not_one_snapshot(tmp_path):
    model = tiny.build("llama")
    cache = host.make_prompt_cache(model)
    model(tiny.tokens(5, b=2), cache=cache)
    with pytest.raises(errors.SnapshotError, match="this cache cannot be saved"):
        save(tmp_path / "x", model, cache, [1] * 5)


def test_tokens_that_are_not_those_of_the_cache_are_refused(tmp_path):
    model = tiny.build("llama")
    cache, tokens = filled(model, 9)
    with pytest.raises(errors.SnapshotError, match="this cache cannot be saved"):
        save(tmp_path / "x", model, cache, tokens[:-1])


@pytest.fixture
def saved(tmp_path):
    """A file of a tiny llama under turbo:k8v3."""
    model = tiny.build("llama")
    with kvstow.attached(model, "turbo:k8v3"):
        save(tmp_path / "x", model, *filled(model, 20))
    return tmp_path / "x"


def test_what_a_model_is_set_to_is_a_part_of_its_fingerprint():
    """Equal weights compute something else with other positions or another scale of an adapter."""
    module = pytest.importorskip("mlx_lm.tuner.lora")
    model = tiny.build("llama")
    same, other = tiny.build("llama"), tiny.build("llama", rope_theta=5e5)
    whole = snapshots.fingerprint(model)
    assert whole == snapshots.fingerprint(same)
    assert whole != snapshots.fingerprint(other)
    found = set()
    for scale in (1.0, 2.0):
        mx.random.seed(1)
        adapted = module.LoRALinear.from_base(same.layers[0].self_attn.q_proj, scale=scale)
        same.layers[0].self_attn.q_proj = adapted
        found.add(snapshots.fingerprint(same).weights)
        same.layers[0].self_attn.q_proj = adapted.linear
    assert len({whole.weights, *found}) == 3


def test_saving_and_loading_leave_the_model_as_it_was(saved):
    model = tiny.build("llama")
    before = snapshots.fingerprint(model)
    with kvstow.attached(model, "turbo:k8v3"):
        load(saved, model)
        assert snapshots.fingerprint(model) == before
    assert "make_cache" not in vars(model)


@pytest.mark.parametrize(
    "scheme", ["off", "turbo:k8v4", "turbo:k8v3+stored", "affine:8", POLICY], ids=str
)
def test_another_scheme_is_refused(saved, scheme):
    model = tiny.build("llama")
    with kvstow.attached(model, scheme), pytest.raises(errors.OtherScheme, match="layer"):
        load(saved, model)


def test_a_better_encoder_may_go_on(saved):
    model = tiny.build("llama")
    with kvstow.attached(model, "turbo:k8v3+search"):
        assert str(load(saved, model)[0].scheme) == "turbo:k8v3+search"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen2", {}),
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"head_dim": 128}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"seed": 1}),
        ("llama", {"dtype": mx.bfloat16}),
    ],
)
def test_another_model_is_refused(saved, name, more):
    model = tiny.build(name, **more)
    with kvstow.attached(model, "turbo:k8v3"), pytest.raises(errors.OtherModel):
        load(saved, model)


def test_one_other_weight_is_another_model(saved):
    model = tiny.build("llama")
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[3, 5] = weight[3, 5] * 1.001
    with kvstow.attached(model, "turbo:k8v3"), pytest.raises(errors.OtherModel, match="weights"):
        load(saved, model)


def test_another_tokenizer_is_refused(saved):
    model = tiny.build("llama")
    with kvstow.attached(model, "turbo:k8v3"), pytest.raises(errors.OtherTokenizer):
        load(saved, model, Tokenizer(4))


def test_a_flipped_bit_is_never_a_cache(saved):
    model = tiny.build("llama")
    raw = bytearray(saved.read_bytes())
    raw[-5] ^= 1
    saved.write_bytes(raw)
    with kvstow.attached(model, "turbo:k8v3"), pytest.raises(errors.DamagedSnapshot):
        load(saved, model)


def test_the_skeleton_of_a_model_has_the_shape_of_the_model(saved):
    model = tiny.build("llama")
    with Snapshot(saved) as snapshot, kvstow.attached(model, "turbo:k8v3"):
        snapshots.check(snapshot.manifest, model)
        said = json.loads(json.dumps(snapshot.manifest.as_dict()))
    assert said["shapes"] == ["full 2 x 64", "full 2 x 64"]


def test_the_public_functions_save_and_load_a_cache_and_its_tokens(tmp_path):
    model = tiny.build("llama")
    path = str(tmp_path / "x")
    with kvstow.attached(model, "turbo:k8v3"):
        cache, tokens = filled(model, 20)
        n_bytes = kvstow.save_cache(path, cache, tokens, model=model, tokenizer=Tokenizer())
        assert n_bytes == (tmp_path / "x").stat().st_size
        loaded, read = kvstow.load_cache(path, model=model, tokenizer=Tokenizer())
        assert read == tokens
        assert_same(model, cache, loaded)
        with pytest.raises(kvstow.SnapshotError):
            kvstow.load_cache(path, model=model, tokenizer=Tokenizer(9))
    with pytest.raises(kvstow.UnsupportedModel, match="expected an mlx-lm model"):
        kvstow.save_cache(path, [], [], model=object(), tokenizer=Tokenizer())
    with pytest.raises(kvstow.UnsupportedModel, match="expected an mlx-lm model"):
        kvstow.load_cache(path, model=object(), tokenizer=Tokenizer())


def test_one_file_starts_many_runs(saved):
    model = tiny.build("llama")
    with kvstow.attached(model, "turbo:k8v3"):
        first, second = load(saved, model), load(saved, model)
        model(tiny.tokens(30, seed=1), cache=first)
        again = load(saved, model)
        assert_same(model, second, again)


@pytest.mark.model
def test_the_demo_model_goes_on_with_exactly_the_logits(tmp_path, smollm2):
    model, tokenizer = smollm2
    text = "The lighthouse keeper was called Marta, and her cat was grey. " * 20
    tokens = tokenizer.encode(text)
    for scheme in ("turbo:k8v3", "off"):
        with kvstow.attached(model, scheme):
            cache = host.make_prompt_cache(model)
            model(mx.array(tokens)[None], cache=cache)
            path = tmp_path / "x"
            snapshots.save(path, cache, tokens, model=model, tokenizer=tokenizer)
            loaded = load(path, model, tokenizer)
            rest = mx.array(tokenizer.encode(" The cat was"))[None]
            for _ in range(5):
                expected, got = model(rest, cache=cache), model(rest, cache=loaded)
                assert mx.array_equal(expected, got)
                rest = mx.argmax(expected[:, -1:], axis=-1)
