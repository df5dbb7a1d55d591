"""The state of a layer is all of it, and belongs to nobody else."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from kvstow import SchemeError

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
layer = pytest.importorskip("tests.integration.packed.layer")

pytestmark = pytest.mark.mlx
turbo, append, filled, assert_same = layer.turbo, layer.append, layer.filled, layer.assert_same
assert_stores = layer.assert_stores
KINDS = {
    "empty": ("turbo:k8v3", 0),
    "packed": ("turbo:k8v3", 5),
    "full": ("turbo:k4v2", 256),
    "plain": ("turbo:k8v3+start9", 5),
    "stored": ("turbo:k8v3+start3+stored", 5),
}


@pytest.fixture(params=KINDS)
def kept(request, cls, draw):
    """A cache of each kind, and the tokens it holds."""
    text, n_tokens = KINDS[request.param]
    cache, tokens = cls(turbo(text)), draw(n_tokens)
    if n_tokens:
        append(cache, tokens)
    return cache, tokens


def assert_twins(twin, cache):
    assert type(twin) is type(cache)
    assert (twin.scheme, twin.offset, twin.is_packed) == (
        cache.scheme,
        cache.offset,
        cache.is_packed,
    )
    if cache.offset:
        a, b = twin.keys_and_values(), cache.keys_and_values()
        got, wanted = (SimpleNamespace(k=np.array(k), v=np.array(v)) for k, v in (a, b))
        assert_same(got, wanted)


def assert_independent(one, other, draw):
    """Each continues from the common tokens as if the other did not exist."""
    before = None if other.empty() else [np.array(x) for x in other.keys_and_values()]
    one.trim(1)
    append(one, draw(2))
    if before is not None:
        for x, wanted in zip(other.keys_and_values(), before, strict=True):
            assert np.array(x).tobytes() == wanted.tobytes()
    else:
        assert other.empty()


def test_a_cache_from_the_state_of_another_continues_like_it(kept, draw):
    cache, _ = kept
    twin = type(cache).from_state(cache.state)
    assert_twins(twin, cache)
    following = draw(3)
    assert_same(append(twin, following), append(cache, following))
    assert_twins(twin, cache)


def test_the_state_can_be_set_on_a_cache_of_another_scheme(kept, draw):
    cache, _ = kept
    other = filled(type(cache), draw(4), scheme="turbo:k2v2")
    other.state = cache.state
    assert_twins(other, cache)


def test_a_cache_and_one_from_its_state_share_nothing(kept, draw):
    cache, _ = kept
    assert_independent(cache, type(cache).from_state(cache.state), draw)
    assert_independent(type(cache).from_state(cache.state), cache, draw)


def test_two_caches_from_one_state_share_nothing(kept, draw):
    state = kept[0].state
    one, other = (type(kept[0]).from_state(state) for _ in range(2))
    assert_independent(one, other, draw)


def test_a_cache_and_its_deep_copy_share_nothing(kept, draw):
    cache, _ = kept
    assert_twins(copy.deepcopy(cache), cache)
    assert_independent(cache, copy.deepcopy(cache), draw)
    assert_independent(copy.deepcopy(cache), cache, draw)


def test_a_state_that_was_taken_does_not_change_with_the_cache(kept, draw):
    cache, tokens = kept
    state = cache.state
    cache.trim(cache.offset)
    append(cache, draw(max(1, tokens.k.shape[2])))
    twin = type(cache).from_state(state)
    assert twin.offset == tokens.k.shape[2]
    if twin.is_packed:
        assert_stores(twin, tokens)
    elif twin.offset:
        k, v = twin.keys_and_values()
        assert_same(SimpleNamespace(k=np.array(k), v=np.array(v)), tokens)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_restored_cache_decodes_to_the_dtype_of_the_model(cls, draw, dtype):
    tokens = draw(4)
    cache = cls(turbo())
    cache.update_and_fetch(*(mx.array(x).astype(getattr(mx, dtype)) for x in (tokens.k, tokens.v)))
    twin = cls.from_state(cache.state)
    assert {x.dtype for x in twin.keys_and_values()} == {getattr(mx, dtype)}


def test_mlx_lm_can_write_every_kind_and_its_file_holds_the_whole_cache(
    kept, draw, tmp_path, monkeypatch
):
    cache, _ = kept
    path = str(tmp_path / "cache.safetensors")
    host.save_prompt_cache(path, [cache, host.KVCache()], {"model": "none"})
    # Its reader looks classes up in its own module, where ours are not.
    monkeypatch.setattr(host, type(cache).__name__, type(cache), raising=False)
    (twin, plain), metadata = host.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "none"}
    assert plain.empty()
    assert_twins(twin, cache)
    following = draw(3)
    assert_same(append(twin, following), append(cache, following))


@pytest.mark.parametrize("text", ["off", "affine:8"])
def test_a_state_of_another_kind_of_scheme_is_refused(cls, draw, text):
    arrays, *rest = filled(cls, draw(3)).state
    rest[2] = text
    with pytest.raises(SchemeError, match=f"needs a turbo scheme, got {text}"):
        cls.from_state((arrays, *rest))
