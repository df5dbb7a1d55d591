"""`DiskPrefixes`: prompt caches of mlx-lm in a directory, found again by the tokens they hold.

A cache is put there without waiting: its arrays are evaluated and kept, and a thread of its
own, which knows numpy alone, writes them. Files are read where they are asked for.
"""

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from kvstow.errors import KvstowWarning, SnapshotError
from kvstow.integrations.mlx_lm import records, snapshots
from kvstow.integrations.mlx_lm.attach import attachment
from kvstow.snapshot import Snapshot, Source
from kvstow.snapshot.prefixes import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MIN_TOKENS,
    HEAD_TOKENS,
    Job,
    PrefixDirectory,
    PrefixStats,
    Tokens,
    WriteBehind,
    as_tokens,
    is_worth,
    key_of,
)

# Files that are looked into for one prompt: one may be damaged, and one may just have given way
# to a longer one. Reading the prompt takes longer than another look.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Held:
    """A cache that came out of a file.

    Attributes:
        tokens: All that it holds.
        cache: The prompt cache; nothing else refers to it.
        n_tokens: How many of them the prompt begins with.
    """

    tokens: list[int]
    cache: list[Any]
    n_tokens: int

    def trimmed(self) -> list[Any]:
        """The cache, which holds those tokens alone from now on."""
        if self.n_tokens < len(self.tokens):
            trim_prompt_cache(self.cache, len(self.tokens) - self.n_tokens)
        return self.cache


class DiskPrefixes:
    """Prefixes on disk, of any number of models; close it, or use it in a ``with`` block.

    What goes wrong with a file is a `KvstowWarning` in the thread of the next call, and no error.

    Args:
        directory: Where; it is made when the first file is written. Others may use it too.
        max_bytes: What its files may take; those that were not used for the longest time go first.
        min_tokens: Fewer are neither written nor read.

    Attributes:
        directory: As given.
        stats: What it did.

    Raises:
        ValueError: If `min_tokens` is below what tells files apart, or `max_bytes` negative.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        min_tokens: int = DEFAULT_MIN_TOKENS,
    ) -> None:
        if min_tokens < HEAD_TOKENS or max_bytes < 0:
            raise ValueError(
                f"min_tokens must be at least {HEAD_TOKENS} and max_bytes not negative, "
                f"got {min_tokens} and {max_bytes}"
            )
        self.directory = directory
        self.min_tokens = min_tokens
        self.stats = PrefixStats()
        self._problems: deque[str] = deque()
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self.files = PrefixDirectory(directory, self.problem)
        self.writer = WriteBehind(self.files, max_bytes, self.stats, self.problem)
        self._models: list[ModelPrefixes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(
        self, model: Any, tokenizer: Any, notes: Mapping[str, str] | None = None
    ) -> "ModelPrefixes":
        """The prefixes of one model, as it is attached now.

        Args:
            model: The model; its weights do not change as long as it is used. It is not kept alive.
            tokenizer: Of the model.
            notes: What its files shall remember, such as its name under ``"model"``.
        """
        self._models = [known for known in self._models if known.is_alive]
        for known in self._models:
            if known.is_of(model, tokenizer):
                return known
        self._models.append(ModelPrefixes(self, model, tokenizer, notes))
        return self._models[-1]

    def flush(self) -> None:
        """Wait until all that was put is written."""
        self.writer.flush()
        self.tell()

    def close(self) -> None:
        """`flush`, and write no more."""
        self.writer.close()
        self.tell()

    def problem(self, what: str) -> None:
        """Count a problem, and remember to `tell` it; from any thread."""
        with self._lock:
            self.stats.errors += 1
            if what not in self._told:
                self._told.add(what)
                self._problems.append(what)

    def tell(self) -> None:
        """Warn of what went wrong meanwhile, of each thing once."""
        while self._problems:
            warnings.warn(f"prefix cache: {self._problems.popleft()}", KvstowWarning, stacklevel=3)


class ModelPrefixes:
    """The prefixes of one model, tokenizer and policy; made by `DiskPrefixes.of`."""

    def __init__(
        self, disk: DiskPrefixes, model: Any, tokenizer: Any, notes: Mapping[str, str] | None
    ) -> None:
        self._disk = disk
        self._notes = notes
        self._model = weakref.ref(model)
        self._tokenizer = weakref.ref(tokenizer)
        self._attachment = attachment(model)
        self._identity = snapshots.identity(model, tokenizer)
        self._key = key_of(self._identity.model, self._identity.tokenizer, self._identity.policy)
        self._n_caches = len(make_prompt_cache(model))

    @property
    def is_alive(self) -> bool:
        """Whether the model is still there."""
        return self._model() is not None

    def is_of(self, model: Any, tokenizer: Any) -> bool:
        """Whether these are the prefixes of a model as it is attached now."""
        same = self._model() is model and self._tokenizer() is tokenizer
        return same and self._attachment is attachment(model)

    def nearest(self, tokens: Sequence[int], in_memory: int = 0) -> Held | None:
        """The cache of a prefix of `tokens` in a file.

        Args:
            tokens: A prompt, without those tokens that shall be left to read.
            in_memory: How many of them are held already; a file has to spare much more.
        """
        model, asked = self._model(), as_tokens(tokens)
        held = None if model is None or asked is None else self._read(model, asked, in_memory)
        stats = self._disk.stats
        if held is not None:
            stats.disk_hits += 1
            stats.disk_tokens += held.n_tokens
        elif not in_memory:
            stats.misses += 1
        self._disk.tell()
        return held

    def put(self, tokens: Sequence[int], cache: Sequence[Any]) -> None:
        """Have `cache` written to a file soon; it may be changed meanwhile.

        Nothing is written of fewer than `min_tokens`, nor of what files hold already or all but
        an eighth. A cache that no file can hold is warned of.

        Args:
            tokens: All that were appended to it.
            cache: A prompt cache of the model's.
        """
        held = as_tokens(tokens)
        if held is None or len(held) < self._disk.min_tokens:
            return
        try:
            self._disk.writer.put(partial(self._job, held, cache))
        except SnapshotError as error:
            self._disk.problem(str(error))
        self._disk.tell()

    def _job(self, held: Tokens, cache: Sequence[Any]) -> Job:
        if len(cache) != self._n_caches:
            raise SnapshotError(f"the cache has {len(cache)} layers, the model {self._n_caches}")
        sources = {"tokens": Source("U32", held.shape, lambda: held)}
        layers = []
        for i, layer in enumerate(cache):
            record, arrays = records.describe(layer)
            layers.append(record)
            sources |= records.sources_now(arrays, f"{i}.")
        return Job(held, self._identity.manifest(layers, sources, self._notes), sources)

    def _read(self, model: Any, asked: Tokens, in_memory: int) -> Held | None:
        def restored(snapshot: Snapshot) -> list[Any]:
            return snapshots.restored(snapshot, make_prompt_cache(model))

        for _ in range(TRIES):
            found = self._disk.files.nearest(self._key, asked)
            if found is None or found.n_tokens < self._disk.min_tokens:
                return None
            if not is_worth(found.n_tokens, in_memory):
                return None
            cache = self._disk.files.take(found.entry, restored)
            if cache is not None:
                trims = found.n_tokens < len(found.entry.tokens)
                if trims and not can_trim_prompt_cache(cache):
                    return None
                return Held(found.entry.tokens.tolist(), cache, found.n_tokens)
        return None
