"""The prefix cache over files: what a process that was restarted finds, and how it goes on."""

import copy
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest

import kvstow
from kvstow.snapshot.prefixes import HEAD_TOKENS, files

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
generation = pytest.importorskip("mlx_lm.generate")
disk_prefixes = pytest.importorskip("kvstow.integrations.mlx_lm.disk_prefixes")
tiered = pytest.importorskip("kvstow.integrations.mlx_lm.prompt_cache")
tiny = pytest.importorskip("tests.integration.tiny")

pytestmark = pytest.mark.mlx
KEY = ("model", None, None)
TEXT = tiny.tokens(500)
OTHER = tiny.tokens(500, seed=5)


class Tokenizer:
    """Of three letters."""

    def get_vocab(self):
        return {"a": 0, "b": 1, "c": 2}


class Server:
    """What one process of a server has: a model, files, and the tiers above them."""

    def __init__(self, root, model, tokenizer=None, **options):
        self.model, self.tokenizer = model, tokenizer or Tokenizer()
        self.disk = disk_prefixes.DiskPrefixes(root, min_tokens=HEAD_TOKENS, **options)
        self.cache = tiered.TieredPromptCache(on_disk=self.on_disk, stats=self.disk.stats)
        self.stats = self.disk.stats

    def on_disk(self, key):
        return self.disk.of(self.model, self.tokenizer) if key == KEY else None

    def fetch(self, tokens):
        return self.cache.fetch_nearest_cache(KEY, tokens)

    def insert(self, tokens, cache):
        self.cache.insert_cache(KEY, tokens, cache)
        self.disk.flush()


def list_of(start, end, text=TEXT):
    return text[0, start:end].tolist()


def append(model, cache, start, end, text=TEXT):
    """Logits of some tokens of the text, appended at once."""
    logits = model(text[:, start:end], cache=cache)
    mx.eval(logits, [c.state for c in cache])
    return np.array(logits.astype(mx.float32))


def filled(model, *lengths):
    cache, at = host.make_prompt_cache(model), 0
    for n in lengths:
        append(model, cache, at, at + n)
        at += n
    return cache


def attached(name="llama", scheme="turbo:k8v3", **more):
    model = tiny.build(name, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kvstow.KvstowWarning)
        kvstow.attach(model, scheme)
    return model


def assert_goes_on_as(model, hit, uncached, at, *steps):
    for n in steps:
        got, wanted = (append(model, c, at, at + n) for c in (hit, uncached))
        np.testing.assert_array_equal(got, wanted)
        at += n


# --- a restart


@pytest.mark.parametrize("scheme", ["off", "affine:8", "turbo:k8v3", "turbo:k4v2+stored"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_restarted_server_goes_on_exactly_as_one_that_read_the_prefix(tmp_path, scheme, dtype):
    model = attached(scheme=scheme, dtype=dtype)
    Server(tmp_path, model).insert(list_of(0, 100), filled(model, 70, 30))
    again = Server(tmp_path, attached(scheme=scheme, dtype=dtype))
    hit, rest = again.fetch(list_of(0, 140))
    assert rest == list_of(100, 140)
    assert_goes_on_as(model, hit, filled(model, 70, 30), 100, 40, 1, 1, 3)
    assert (again.stats.disk_hits, again.stats.disk_tokens, again.stats.misses) == (1, 100, 0)
    assert again.fetch(list_of(0, 140))[1] == rest  # it is in memory now, and unchanged
    assert (again.stats.disk_hits, again.stats.memory_hits, again.stats.memory_tokens) == (
        1,
        1,
        100,
    )


MODELS = ["gemma3_text", "gpt_oss", "qwen3_next", "jamba", "gemma3n", "llama-sliding"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scheme", ["off", "turbo:k8v4"])
def test_every_kind_of_layer_goes_on_exactly_at_the_length_of_the_file(tmp_path, name, scheme):
    model = attached(name, scheme)
    Server(tmp_path, model).insert(list_of(0, 60), filled(model, 60))
    hit, rest = Server(tmp_path, model).fetch(list_of(0, 75))
    assert rest == list_of(60, 75)
    assert_goes_on_as(model, hit, filled(model, 60), 60, 15, 1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_file_is_served_as_memory_would_serve_it_or_not_at_all(tmp_path, name):
    model = attached(name)
    cache = filled(model, 60)
    in_memory = host.LRUPromptCache()
    in_memory.insert_cache(KEY, list_of(0, 60), cache)
    Server(tmp_path, model).insert(list_of(0, 60), copy.deepcopy(cache))
    prompt = list_of(0, 40) + list_of(0, 20, OTHER)
    (expected, rest), (hit, rest_of_disk) = (
        x.fetch_nearest_cache(KEY, prompt) for x in (in_memory, Server(tmp_path, model).cache)
    )
    assert rest_of_disk == rest
    assert (hit is None) == (expected is None)
    if hit is not None:
        assert_goes_on_as(model, hit, expected, 100, 15, 1)


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k8v3+start80"])
def test_a_trimmed_hit_equals_an_uncached_run_of_the_same_schedule(tmp_path, scheme):
    model = attached(scheme=scheme)
    Server(tmp_path, model).insert(list_of(0, 100), filled(model, 70, 30))
    prompt = list_of(0, 70) + list_of(0, 30, OTHER)
    hit, rest = Server(tmp_path, model).fetch(prompt)
    if scheme.endswith("+start80"):  # a run of 70 tokens would not be packed yet
        assert (hit, rest) == (None, prompt)
        return
    assert rest == prompt[70:]
    got, wanted = (append(model, c, 0, 30, OTHER) for c in (hit, filled(model, 70)))
    np.testing.assert_array_equal(got, wanted)


def test_greedy_text_is_the_same_after_a_restart_and_without_one(tmp_path):
    model = attached(tie_word_embeddings=False)

    def answer(server, prompt):
        cache, rest = server.fetch(prompt)
        cache = cache or host.make_prompt_cache(model)
        steps = generation.generate_step(
            mx.array(rest), model, prompt_cache=cache, max_tokens=8, prefill_step_size=50
        )
        reply = [int(token) for token, _ in steps]
        server.insert((prompt + reply)[: cache[0].offset], cache)
        return len(prompt) - len(rest), reply

    turns = [list_of(0, 50), list_of(0, 50) + list_of(80, 120), list_of(0, 50) + list_of(130, 160)]
    one = Server(tmp_path / "one", model)
    expected = [answer(one, turn) for turn in turns]
    restarted = [answer(Server(tmp_path / "many", model), turn) for turn in turns]
    assert restarted == expected
    assert [n for n, _ in expected] == [0, 50, 50]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "jamba"])
def test_what_a_batch_hands_over_is_written_and_found_as_in_memory(tmp_path, name):
    """As mlx-lm's server does: at the end of segments, and of answers."""
    model = attached(name)
    server = Server(tmp_path, model)
    batch = generation.BatchGenerator(model, max_tokens=4, prefill_step_size=32)
    batch.insert_segments(
        [
            [list_of(0, 40), list_of(40, 70), list_of(70, 75)],
            [list_of(0, 40), list_of(90, 130)],
            [list_of(5, 60), list_of(60, 62)],
        ]
    )
    while True:
        read, written = batch.next()
        if not read and not written:
            break
        ends = [r.uid for r in read if r.end_of_segment and not r.end_of_prompt]
        for cache, held in batch.extract_cache(ends).values():
            server.insert(held[:], cache)
        for r in (r for r in written if r.finish_reason is not None):
            server.insert(r.all_tokens[:], r.prompt_cache)
    stats = server.stats
    assert (stats.writes + stats.skipped, stats.errors) == (10, 0)
    assert stats.writes >= 3
    for prompt in (list_of(0, 70) + list_of(150, 160), list_of(5, 60) + list_of(80, 90)):
        (one, rest), (other, rest_of_disk) = (
            server.fetch(prompt),
            Server(tmp_path, model).fetch(prompt),
        )
        assert rest == rest_of_disk == prompt[-10:]
        logits = [np.array(model(mx.array([rest]), cache=cache)) for cache in (one, other)]
        np.testing.assert_array_equal(*logits)


# --- which tier


def test_memory_is_asked_first_and_a_file_only_if_it_spares_much_more(tmp_path):
    model = attached()
    Server(tmp_path, model).insert(list_of(0, 200), filled(model, 200))
    server = Server(tmp_path, model)
    for n, n_held, tier in ((180, 180, "memory"), (100, 200, "disk")):
        server.cache = tiered.TieredPromptCache(on_disk=server.on_disk, stats=server.stats)
        super(tiered.TieredPromptCache, server.cache).insert_cache(
            KEY, list_of(0, n), filled(model, n)
        )
        hit, rest = server.fetch(list_of(0, 250))
        assert (hit[0].offset, rest) == (n_held, list_of(n_held, 250))
        assert getattr(server.stats, f"{tier}_hits") == 1
    assert server.stats.as_dict() == server.stats.as_dict() | {
        "memory_tokens": 180,
        "disk_tokens": 200,
        "misses": 0,
    }


@pytest.mark.parametrize("name", ["llama", "jamba"])
@pytest.mark.parametrize("restart", [False, True])
def test_something_is_left_to_read_of_a_prompt_that_is_held_whole(tmp_path, name, restart):
    """mlx-lm's own cache leaves nothing, and its server refuses an empty prompt."""
    model = attached(name)
    server = Server(tmp_path, model)
    server.insert(list_of(0, 40), filled(model, 40))
    server.insert(list_of(0, 60), filled(model, 40, 20))
    server = Server(tmp_path, model) if restart else server
    hit, rest = server.fetch(list_of(0, 60))
    n = 59 if name == "llama" else 40
    assert rest == list_of(n, 60)
    assert host.can_trim_prompt_cache(hit) == (name == "llama")
    append(model, hit, n, 60)


def test_a_miss_is_counted_and_returns_the_prompt(tmp_path):
    server = Server(tmp_path, attached())
    for prompt in (list_of(0, 50), [3], [], [-7] * 50):
        assert server.fetch(prompt) == (None, prompt)
    assert server.stats.misses == 4


def test_images_in_a_prompt_are_not_written(tmp_path):
    """mlx-lm has negative numbers in their place, and they are not in the file."""
    model = attached()
    server = Server(tmp_path, model)
    server.insert([-5, *list_of(1, 50)], filled(model, 50))
    assert (server.stats.writes, server.stats.errors) == (0, 0)
    assert server.fetch([-5, *list_of(1, 60)])[0] is not None


def test_a_model_that_is_kept_out_of_the_files_is_held_in_memory(tmp_path):
    """As one with a draft model, whose caches are in the same list."""
    model = attached()
    server = Server(tmp_path, model)
    server.cache.insert_cache("drafting", list_of(0, 50), filled(model, 50))
    server.disk.flush()
    assert server.cache.fetch_nearest_cache("drafting", list_of(0, 60))[1] == list_of(50, 60)
    assert files.entries(tmp_path) == []


def test_a_file_that_is_served_survives_being_changed_by_who_uses_it(tmp_path):
    model = attached()
    Server(tmp_path, model).insert(list_of(0, 64), filled(model, 64))
    server = Server(tmp_path, model)
    first, _ = server.fetch(list_of(0, 70))
    append(model, first, 300, 350)
    second, _ = server.fetch(list_of(0, 70))
    assert_goes_on_as(model, second, filled(model, 64), 64, 6, 1)


# --- what is written


def test_putting_takes_references_and_what_happens_later_is_not_written(tmp_path, monkeypatch):
    """The writer waits while the cache goes on, is trimmed and filled with something else."""
    model = attached()
    disk = disk_prefixes.DiskPrefixes(tmp_path, min_tokens=HEAD_TOKENS)
    gate = threading.Event()
    add = type(disk.files).add
    monkeypatch.setattr(type(disk.files), "add", lambda *a: gate.wait(10) and add(*a))
    of_model = disk.of(model, Tokenizer())
    cache = filled(model, 64)
    of_model.put(list_of(0, 64), cache)
    append(model, cache, 64, 70)
    host.trim_prompt_cache(cache, 40)
    append(model, cache, 0, 40, OTHER)
    gate.set()
    disk.close()
    hit, _ = Server(tmp_path, model).fetch(list_of(0, 70))
    assert_goes_on_as(model, hit, filled(model, 64), 64, 6, 1)


def test_the_writer_computes_nothing_with_mlx(tmp_path, monkeypatch):
    model = attached("llama-sliding", dtype=mx.bfloat16)
    disk = disk_prefixes.DiskPrefixes(tmp_path, min_tokens=HEAD_TOKENS)
    seen = []
    add = type(disk.files).add

    def watched(directory, tokens, manifest, sources):
        arrays = {name: source.read() for name, source in sources.items()}
        seen.extend(type(x) for x in arrays.values())
        return add(directory, tokens, manifest, sources)

    monkeypatch.setattr(type(disk.files), "add", watched)
    disk.of(model, Tokenizer()).put(list_of(0, 64), filled(model, 64))
    disk.close()
    assert set(seen) == {np.ndarray}
    assert disk.stats.writes == 1


def test_putting_copies_no_data():
    model = attached("llama", num_hidden_layers=1)
    cache = filled(model, 256)
    record, arrays = disk_prefixes.records.describe(cache[0])
    before = mx.get_active_memory()
    sources = disk_prefixes.records.sources_now(arrays, "")
    assert mx.get_active_memory() - before < 4096 < sum(x.n_bytes for x in sources.values())
    views = [source.read() for source in sources.values()]
    assert not any(view.flags.owndata for view in views)
    assert record.stage == "packed"


def test_the_model_is_not_kept_alive(tmp_path):
    server = Server(tmp_path, attached())
    server.insert(list_of(0, 50), filled(server.model, 50))
    of_model = server.on_disk(KEY)
    assert server.on_disk(KEY) is of_model
    kvstow.detach(server.model)
    server.model = attached(seed=1)
    assert not of_model.is_alive
    assert of_model.nearest(list_of(0, 60)) is None
    assert server.on_disk(KEY) is not of_model


# --- what is not served


def adapted(model):
    lora = pytest.importorskip("mlx_lm.tuner.lora").LoRALinear
    layer = model.layers[0].self_attn
    layer.q_proj = lora.from_base(layer.q_proj)
    return model


DIFFERENT = {
    "weights": lambda: attached(seed=1),
    "dtype": lambda: attached(dtype=mx.bfloat16),
    "adapter": lambda: adapted(attached()),
    "positions": lambda: attached(rope_theta=1e5),
    "scheme": lambda: attached(scheme="turbo:k8v4"),
    "encoder": lambda: attached(scheme="turbo:k8v3+search"),
    "off": lambda: tiny.build("llama"),
    "policy": lambda: attached(
        scheme=kvstow.Policy.from_dict({"rules": [{"layers": 0, "scheme": "off"}]})
    ),
}


@pytest.mark.parametrize("other", DIFFERENT)
def test_another_model_finds_nothing(tmp_path, other):
    model = attached()
    Server(tmp_path, model).insert(list_of(0, 50), filled(model, 50))
    server = Server(tmp_path, DIFFERENT[other]())
    assert server.fetch(list_of(0, 60))[0] is None
    assert Server(tmp_path, attached()).fetch(list_of(0, 60))[0] is not None


def test_layers_that_another_version_stored_otherwise_are_not_served(tmp_path):
    """One policy may come to mean more layers."""
    server = Server(tmp_path, tiny.build("llama"))
    of_model = server.on_disk(KEY)
    of_model._identity = replace(of_model._identity, policy=kvstow.Policy.of("turbo:k8v3"))
    server.insert(list_of(0, 50), filled(server.model, 50))
    later = Server(tmp_path, attached())
    with pytest.warns(kvstow.KvstowWarning, match="layer 0 .* is stored under off"):
        assert later.fetch(list_of(0, 60))[0] is None
    assert files.entries(tmp_path) == []


def test_a_model_that_is_attached_anew_has_other_prefixes(tmp_path):
    model = attached()
    server = Server(tmp_path, model)
    server.insert(list_of(0, 50), filled(model, 50))
    kvstow.detach(model)
    kvstow.attach(model, "turbo:k8v4")
    server.cache = tiered.TieredPromptCache(on_disk=server.on_disk)
    assert server.fetch(list_of(0, 60))[0] is None


def test_another_tokenizer_finds_nothing(tmp_path):
    class Other(Tokenizer):
        def get_vocab(self):
            return {"a": 0, "c": 1, "b": 2}

    model = attached()
    Server(tmp_path, model).insert(list_of(0, 50), filled(model, 50))
    assert Server(tmp_path, model, Other()).fetch(list_of(0, 60))[0] is None


@pytest.mark.parametrize("at", [0.005, 0.5, 0.99])
def test_a_damaged_file_is_told_of_once_removed_and_the_prompt_is_read(tmp_path, at):
    model = attached()
    Server(tmp_path, model).insert(list_of(0, 50), filled(model, 50))
    (entry,) = files.entries(tmp_path)
    raw = bytearray(entry.path.read_bytes())
    raw[int(at * len(raw))] ^= 16
    entry.path.write_bytes(raw)
    server = Server(tmp_path, model)
    with pytest.warns(kvstow.KvstowWarning, match="it was removed") as told:
        assert server.fetch(list_of(0, 60))[0] is None
    assert (len(told), server.stats.errors, server.stats.misses) == (1, 1, 1)
    assert files.entries(tmp_path) == []
    server.insert(list_of(0, 50), filled(model, 50))  # and is written anew
    assert len(files.entries(tmp_path)) == 1


@pytest.fixture
def forked(tmp_path):
    """A model, and two files that begin alike; the path of the one with the text itself."""
    model = attached()
    server = Server(tmp_path, model)
    server.insert(list_of(0, 100), filled(model, 100))
    (entry,) = files.entries(tmp_path)
    cache = filled(model, 60)
    append(model, cache, 60, 100, OTHER)
    server.insert([*list_of(0, 60), *list_of(60, 100, OTHER)], cache)
    assert len(files.entries(tmp_path)) == 2
    return model, entry.path


def test_where_the_best_file_is_damaged_the_next_one_is_read(tmp_path, forked):
    model, best = forked
    raw = bytearray(best.read_bytes())
    raw[-1] ^= 16
    best.write_bytes(raw)
    server = Server(tmp_path, model)
    with pytest.warns(kvstow.KvstowWarning, match="it was removed"):
        hit, rest = server.fetch(list_of(0, 110))
    assert rest == list_of(60, 110)
    assert (server.stats.disk_hits, server.stats.disk_tokens, server.stats.misses) == (1, 60, 0)
    assert_goes_on_as(model, hit, filled(model, 60), 60, 50)


def test_where_the_best_file_goes_while_it_is_chosen_the_next_one_is_read(
    tmp_path, forked, monkeypatch
):
    model, best = forked
    server = Server(tmp_path, model)
    nearest = server.disk.files.nearest

    def slow(*prompt):
        found = nearest(*prompt)
        best.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(server.disk.files, "nearest", slow)
    assert server.fetch(list_of(0, 110))[1] == list_of(60, 110)
    assert (server.stats.disk_hits, server.stats.errors) == (1, 0)


def test_a_full_disk_is_told_of_once_and_serving_goes_on(tmp_path, monkeypatch):
    model = attached()
    server = Server(tmp_path, model)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.warns(kvstow.KvstowWarning, match="No space left on device: no more") as told:
        server.insert(list_of(0, 50), filled(model, 50))
    assert len(told) == 1
    for n in (80, 120):  # a second warning would be an error
        server.insert(list_of(0, n), filled(model, n))
    assert server.fetch(list_of(0, 130))[1] == list_of(120, 130)
    assert (server.stats.writes, server.stats.errors) == (0, 1)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_another_model_is_told_of_and_not_written(tmp_path, layers):
    model = attached()
    server = Server(tmp_path, model)
    strangers = (filled(model, 50) * 2)[:layers]
    with pytest.warns(kvstow.KvstowWarning, match=f"has {layers} layers, the model 2") as told:
        server.insert(list_of(0, 50), strangers)
    assert len(told) == 1
    server.insert(list_of(0, 50), strangers)  # a second warning would be an error
    assert files.entries(tmp_path) == []


def test_tokens_that_are_not_those_of_the_cache_are_told_of_and_not_written(tmp_path):
    model = attached()
    server = Server(tmp_path, model)
    with pytest.warns(kvstow.KvstowWarning, match="cannot be saved"):
        server.insert(list_of(0, 51), filled(model, 50))
    assert files.entries(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"min_tokens": HEAD_TOKENS - 1}, {"max_bytes": -1}])
def test_limits_that_mean_nothing_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="got"):
        disk_prefixes.DiskPrefixes(tmp_path, **wrong)


@pytest.mark.model
def test_smollm2_finds_a_fact_on_a_hit_from_disk(smollm2, tmp_path):
    """The text was read by a process that is gone; another one asks."""
    haystack = pytest.importorskip("kvstow.evaluate.haystack")
    texts = pytest.importorskip("kvstow.evaluate.texts")
    model, tokenizer = smollm2
    prompt = haystack.Haystack(tokenizer, texts.bundled(["moby-dick"])).plant(256, 0.0, 0)
    text, question = list(prompt.haystack), list(prompt.question)
    with kvstow.attached(model, "turbo:k8v4"):
        cache = host.make_prompt_cache(model)
        model(mx.array(text)[None], cache=cache)
        Server(tmp_path, model, tokenizer).insert(text, cache)
        server = Server(tmp_path, model, tokenizer)
        hit, rest = server.fetch(text + question)
        assert (rest, server.stats.disk_hits) == (question, 1)
        steps = generation.generate_step(mx.array(rest), model, prompt_cache=hit, max_tokens=10)
        assert prompt.number in tokenizer.decode([int(token) for token, _ in steps])
