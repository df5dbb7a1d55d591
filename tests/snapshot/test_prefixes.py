"""A directory of prefixes serves the longest one that is really held, and nothing else."""

import hashlib
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow import Policy
from kvstow.snapshot import Fingerprint, Record, header
from kvstow.snapshot.prefixes import HEAD_TOKENS, PrefixDirectory, files
from kvstow.snapshot.prefixes.names import Name, as_tokens
from tests.snapshot.made_prefixes import (
    MODEL,
    RECURRENT,
    add,
    key,
    paths,
    read,
    sources_of,
    tokens_of,
)


def held(directory, *more):
    return directory.nearest(key(), tokens_of(*more)).n_tokens == HEAD_TOKENS + len(more)


@pytest.fixture
def problems():
    return []


@pytest.fixture
def directory(tmp_path, problems):
    return PrefixDirectory(tmp_path / "prefixes", problems.append)


# --- what is found


def test_the_longest_common_beginning_is_found(directory):
    for more in ([1, 2, 3], [1, 2, 9, 9, 9], [5]):
        add(directory, tokens_of(*more))
    for asked, n, whose in (([1, 2, 3, 4], 3, [1, 2, 3]), ([1, 2, 9], 3, [1, 2, 9, 9, 9])):
        found = directory.nearest(key(), tokens_of(*asked))
        assert (found.n_tokens, found.entry.tokens.tolist()) == (
            HEAD_TOKENS + n,
            tokens_of(*whose).tolist(),
        )
    assert directory.nearest(key(), tokens_of(5, 6)).n_tokens == HEAD_TOKENS + 1
    assert directory.nearest(key(), np.arange(1, 99, dtype=np.uint32)) is None


def test_of_two_that_spare_as_many_tokens_the_smaller_file_is_read(directory):
    add(directory, tokens_of(1, 2, 7, 7, 7))
    add(directory, tokens_of(1, 2, 8))
    assert directory.nearest(key(), tokens_of(1, 2, 3)).entry.tokens.tolist()[-1] == 8


def test_a_cache_that_cannot_be_trimmed_is_used_at_its_length_alone(directory):
    add(directory, tokens_of(1, 2, 3), RECURRENT)
    assert directory.nearest(key(RECURRENT), tokens_of(1, 2)) is None
    assert directory.nearest(key(RECURRENT), tokens_of(1, 2, 4)) is None
    assert directory.nearest(key(RECURRENT), tokens_of(1, 2, 3)).n_tokens == HEAD_TOKENS + 3
    assert directory.nearest(key(RECURRENT), tokens_of(1, 2, 3, 4)).n_tokens == HEAD_TOKENS + 3


@pytest.mark.parametrize(
    ("record", "least"),
    [
        (Record("full", {"offset": 9}), 1),
        (Record("sliding", {"offset": 9, "keep": 0, "max_size": 10, "index": 9}), 1),
        (Record("sliding", {"offset": 9, "keep": 0, "max_size": 9, "index": 9}), 9),
        (Record("chunked", {"offset": 9, "chunk_size": 4, "start_position": 0}), 1),
        (Record("chunked", {"offset": 9, "chunk_size": 4, "start_position": 4}), 9),
        (Record("arrays", {"size": 1}), 9),
        (Record("full", {"offset": 9}, Policy.of("turbo+start5").default, "packed", "F32"), 5),
        (Record("full", {"offset": 9}, Policy.of("turbo+start50").default, "exact", "F32"), 1),
    ],
)
def test_every_kind_of_cache_says_to_how_few_tokens_it_can_be_trimmed(record, least):
    """Below N tokens of +start<N> a row would not be packed yet."""
    assert record.least_tokens(9) == least
    assert Record("list", members=(record, Record("full", {"offset": 9}))).least_tokens(9) == least


def test_names_are_made_as_the_page_says(directory):
    """docs/prefix-cache.md: another program can find a file."""
    add(directory, tokens_of(1, 2))
    (path,) = paths(directory)
    said = '[1,"lloyd-max-v1","made",["full 1 x 2"],"' + "w" * 32 + '","' + "t" * 32 + '","off"]'
    raw = np.array([*range(32), 1, 2], "<u4").tobytes()
    head, whole = xxhash.xxh3_64_hexdigest(raw[:128]), xxhash.xxh3_128_hexdigest(raw)
    assert path == (
        directory.root
        / hashlib.sha256(said.encode()).hexdigest()[:32]
        / f"{head}-34-{whole}.safetensors"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"model": Fingerprint("other", MODEL.layers, MODEL.weights)},
        {"model": Fingerprint("made", ("full 2 x 2",), MODEL.weights)},
        {"model": Fingerprint("made", MODEL.layers, "v" * 32)},  # an adapter, or other weights
        {"tokenizer": "u" * 32},
        {"policy": Policy.of("turbo:k8v3")},
        {"policy": Policy.of("turbo:k8v3+search")},
        {"policy": Policy.parse("policy(turbo:k8v3; 0: off)")},
    ],
    ids=str,
)
def test_nothing_is_shared_with_another_model_tokenizer_or_policy(directory, other):
    add(directory, tokens_of(1))
    assert directory.nearest(key(**other), tokens_of(1, 2)) is None
    assert directory.nearest(key(), tokens_of(1, 2)) is not None


def test_an_option_of_the_encoder_alone_is_another_key():
    assert key(policy=Policy.of("turbo")) != key(policy=Policy.of("turbo+search"))


def test_a_longer_prefix_takes_the_place_of_the_shorter_one_if_it_can_be_trimmed(directory):
    for model in (MODEL, RECURRENT):
        for more in ([1], [1, 2], [1, 3]):
            add(directory, tokens_of(*more), model)
    held = {(p.parent.name, Name.parse(p.name).n_tokens) for p in paths(directory)}
    n = HEAD_TOKENS
    assert held == {(key(), n + 2), *((key(RECURRENT), m) for m in (n + 1, n + 2))}
    assert len(paths(directory)) == 5  # two of [1, 2] and [1, 3] for each


def test_numbers_that_are_no_tokens_are_none():
    assert as_tokens([0, 1 << 31, (1 << 32) - 1]).dtype == np.uint32
    for wrong in ([-5], [1 << 32], [], ["a"], [[1]], [None], [1 << 70]):
        assert as_tokens(wrong) is None


# --- what is not believed


@pytest.mark.parametrize("at", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("known", [False, True])
def test_a_flipped_byte_is_never_served(directory, problems, at, known):
    add(directory, tokens_of(1, 2))
    asked = tokens_of(1, 2, 3)
    found = directory.nearest(key(), asked) if known else None
    (path,) = paths(directory)
    raw = bytearray(path.read_bytes())
    raw[int(at * len(raw))] ^= 4
    path.write_bytes(raw)
    found = found or directory.nearest(key(), asked)
    assert read(directory, found) is None
    assert paths(directory) == []
    assert len(problems) == 1
    assert "it was removed" in problems[0]
    assert directory.nearest(key(), asked) is None
    assert len(problems) == 1


@pytest.mark.parametrize("size", [0, 20, 100, -1])
def test_a_truncated_file_is_removed_and_may_be_written_again(directory, problems, size):
    add(directory, tokens_of(1, 2))
    (path,) = paths(directory)
    path.write_bytes(path.read_bytes()[:size])
    assert read(directory, directory.nearest(key(), tokens_of(1, 2))) is None
    assert (paths(directory), len(problems)) == ([], 1)
    add(directory, tokens_of(1, 2))
    assert read(directory, directory.nearest(key(), tokens_of(1, 2))) is not None


def test_a_file_under_another_files_name_is_removed(directory, problems):
    """As a hash that collides would be: the tokens in the file decide."""
    add(directory, tokens_of(1))
    (path,) = paths(directory)
    path.rename(path.with_name(str(Name.of(tokens_of(2)))))
    assert directory.nearest(key(), tokens_of(2)) is None
    assert "something else than its name says" in problems[0]
    add(directory, tokens_of(1), policy=Policy.of("turbo"))
    (path,) = paths(directory)
    shutil.move(path, directory.root / key() / path.name)
    assert directory.nearest(key(), tokens_of(1)) is None
    assert paths(directory) == []


def test_a_file_that_is_replaced_after_it_was_found_is_not_served(directory, problems):
    add(directory, tokens_of(1))
    found = directory.nearest(key(), tokens_of(1, 2))
    (path,) = paths(directory)
    other = PrefixDirectory(directory.root.parent / "other")
    add(other, tokens_of(2))
    shutil.copy(paths(other)[0], path)
    assert read(directory, found) is None
    assert len(problems) == 1


def test_a_file_that_is_gone_is_a_miss_and_no_problem(directory, problems):
    add(directory, tokens_of(1))
    found = directory.nearest(key(), tokens_of(1))
    paths(directory)[0].unlink()
    assert read(directory, found) is None
    assert directory.nearest(key(), tokens_of(1)) is None
    assert problems == []


def test_a_file_of_a_newer_version_is_left_to_those_who_can_read_it(directory, problems):
    add(directory, tokens_of(1))
    (path,) = paths(directory)
    raw = path.read_bytes()
    n = header.length(raw[: header.FIXED_BYTES], len(raw))
    newer = raw[:44] + b"0002" + raw[48:n]
    newer = newer[:58] + header._checksum(newer).encode() + newer[74:]
    path.write_bytes(newer + raw[n:])
    assert read(directory, directory.nearest(key(), tokens_of(1))) is None
    assert directory.nearest(key(), tokens_of(1)) is None
    assert len(problems) == 1
    assert "it is not used" in problems[0]
    assert path.exists()


def test_files_of_others_are_neither_read_nor_removed(directory, problems):
    add(directory, tokens_of(1))
    (path,) = paths(directory)
    strangers = [
        directory.root / "notes.txt",
        path.parent / "notes.txt",
        directory.root / "photos" / path.name,
    ]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_bytes(b"x")
    assert directory.nearest(key(), tokens_of(1)) is not None
    assert files.evict(directory.root, 0) == [path]
    assert all(stranger.exists() for stranger in strangers)
    assert problems == []


# --- how much is kept


def test_what_was_not_used_for_the_longest_time_goes_first(directory):
    for i in range(4):
        add(directory, tokens_of(i))
    n_bytes = sum(x.n_bytes for x in files.entries(directory.root))
    assert read(directory, directory.nearest(key(), tokens_of(0, 5))) is not None
    files.evict(directory.root, n_bytes - 1)
    assert [i for i in range(4) if held(directory, i)] == [0, 2, 3]
    files.evict(directory.root, n_bytes // 4)
    assert [i for i in range(4) if held(directory, i)] == [0]


def test_a_clock_that_jumps_does_not_change_who_goes_first(directory, monkeypatch):
    clock = [2_000_000_000]
    monkeypatch.setattr(files.time, "time_ns", lambda: clock[0] * 10**9)
    for i, now in enumerate([2_000_000_000, 1_000_000_000, 3_000_000_000, 5]):
        clock[0] = now
        add(directory, tokens_of(i))
    sizes = [x.n_bytes for x in files.entries(directory.root)]
    for keep in (3, 2, 1):
        files.evict(directory.root, sum(sizes[:keep]))
        assert [i for i in range(4) if held(directory, i)] == list(range(4))[-keep:]


def test_what_a_killed_writer_left_goes_and_what_is_being_written_counts(directory):
    add(directory, tokens_of(1))
    (path,) = paths(directory)
    old, young = (path.with_name(f".{path.name}.{x}") for x in ("old", "young"))
    for file in (old, young):
        file.write_bytes(b"x" * 100)
    files.os.utime(old, (1, 1))
    n_bytes = path.stat().st_size + 100
    assert files.evict(directory.root, n_bytes) == []
    assert (old.exists(), young.exists()) == (False, True)
    assert files.evict(directory.root, n_bytes - 1) == [path]
    assert young.exists()


def test_a_directory_that_is_not_there_holds_nothing(directory):
    assert directory.nearest(key(), tokens_of(1)) is None
    assert files.evict(directory.root, 0) == []


# --- any sequence of these

WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("add"), WORDS, st.sampled_from([MODEL, RECURRENT])),
    st.tuples(st.just("get"), WORDS, st.sampled_from([MODEL, RECURRENT])),
    st.tuples(st.just("evict"), st.integers(0, 5)),
    st.tuples(st.just("corrupt"), st.integers(0, 9), st.floats(0, 0.999)),
    st.tuples(st.just("delete"), st.integers(0, 9)),
    st.tuples(st.just("restart")),
)


@dataclass
class Plain:
    """What a list of pairs, the last used one at the end, would hold."""

    held: list

    def add(self, words, model):
        known = [x for x in self.held if x != (model, words)]
        if model is MODEL:
            known = [x for x in known if not (x[0] is MODEL and words[: len(x[1])] == x[1])]
        self.held = [*known, (model, words)]

    def best(self, words, model):
        """How many words may be spared."""
        sizes = [0]
        for whose, known in self.held:
            common = 0
            while common < min(len(words), len(known)) and words[common] == known[common]:
                common += 1
            if whose is model and (model is MODEL or common == len(known)):
                sizes.append(common + HEAD_TOKENS)
        return max(sizes)

    def use(self, tokens, model):
        used = (model, tuple(tokens[HEAD_TOKENS:].tolist()))
        assert used in self.held
        self.held = [*(x for x in self.held if x != used), used]


def path_of(root, model, words):
    return root / key(model) / str(Name.of(tokens_of(*words)))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(STEPS, max_size=14))
def test_any_sequence_of_steps_is_that_of_a_list(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("prefixes")
    problems: list[str] = []
    directory, plain, broken = PrefixDirectory(root, problems.append), Plain([]), set()
    for step, *args in steps:
        if step == "add":
            words, model = args
            add(directory, tokens_of(*words), model)
            plain.add(words, model)
            broken.discard((model, words))
        elif step == "get":
            check_get(directory, plain, broken, *args)
        elif step == "evict":
            sizes = [path_of(root, *x).stat().st_size for x in plain.held]
            n = len(sizes)
            removed = files.evict(root, sum(sizes[max(0, n - args[0]) :]))
            assert removed == [path_of(root, *x) for x in plain.held[: max(0, n - args[0])]]
            plain.held = plain.held[max(0, n - args[0]) :]
        elif step == "corrupt" and plain.held:
            victim = plain.held[args[0] % len(plain.held)]
            corrupt(path_of(root, *victim), args[1])
            broken.add(victim)
        elif step == "delete" and plain.held:
            path_of(root, *plain.held.pop(args[0] % len(plain.held))).unlink()
        elif step == "restart":
            directory = PrefixDirectory(root, problems.append)
        plain.held = [x for x in plain.held if path_of(root, *x).exists()]
        broken &= set(plain.held)


def corrupt(path, at):
    stat, raw = path.stat(), bytearray(path.read_bytes())
    raw[int(at * len(raw))] ^= 1
    path.write_bytes(raw)
    files.os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def check_get(directory, plain, broken, words, model):
    asked = tokens_of(*words)
    found = directory.nearest(key(model), asked)
    n = 0 if found is None else found.n_tokens
    sound = Plain([x for x in plain.held if x not in broken])
    assert sound.best(words, model) <= n <= plain.best(words, model)
    arrays = read(directory, found)
    if arrays is None:
        assert found is None or (model, tuple(found.entry.tokens[HEAD_TOKENS:].tolist())) in broken
        return
    assert arrays["tokens"][:n].tolist() == asked[:n].tolist()
    for name, source in sources_of(found.entry.tokens, model).items():
        np.testing.assert_array_equal(arrays[name], source.read())
    plain.use(found.entry.tokens, model)
