"""What mlx-lm's engine does and holds, looked at in its own thread.

Only there may caches be touched. What was seen is published as one value that any thread reads.
Looking takes no number out of an array, so it waits for nothing, and it is done so seldom that
it takes at most a hundredth of the time.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, TypeVar
from weakref import ref

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, stream_generate

from kvstow.integrations.mlx_lm.prompt_cache import TieredPromptCache
from kvstow.integrations.mlx_lm.usage import allocated, tokens_held
from kvstow.serve.ledger import Ledger, WatchedPrompts, held_by
from kvstow.serve.stats import Held, Memory, Work
from kvstow.serve.tally import Tally

LEAST_S = 0.2  # between two looks
COST_SHARE = 100  # a look that took t comes again after 100 t at the earliest
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen, and when, by the clock of the tally."""

    at: float | None = None
    memory: Memory = field(default_factory=Memory)
    work: Work = field(default_factory=Work)
    evictions: int = 0


class Watch:
    """Looks at batches, at requests outside of them, and at kept prompts.

    Args:
        tally: Where steps are counted.
        prompt_cache: Still empty.

    Attributes:
        seen: What was seen last.
        prefixes: What the prompt cache counts itself.
    """

    def __init__(self, tally: Tally, prompt_cache: TieredPromptCache) -> None:
        self.prefixes = prompt_cache.stats
        self._tally = tally
        self._ledger = Ledger()
        prompt_cache._trie = WatchedPrompts(self._ledger)
        self._batch: Callable[[], BatchGenerator | None] = lambda: None
        self._alone: tuple[list[Any], int] | None = None
        self._next_look = self._soonest_look = 0.0
        self.seen = Seen()

    def watched(self, function: Function) -> Function:
        """A function of mlx-lm's server that makes batches and streams where they are seen.

        It finds both among the names of its module, so a copy of it is given other names;
        the module stays as it is, for whoever else uses it.
        """
        found: Any = function
        ours = {"BatchGenerator": self._batches, "stream_generate": self._stream}
        names = found.__globals__ | ours
        copy: Any = FunctionType(found.__code__, names, found.__name__, found.__defaults__)
        return copy  # type: ignore[no-any-return]

    def look(self, *, soon: bool = False) -> None:
        """Publish what is held, unless that was done a moment ago.

        Args:
            soon: Whether a step begins that may be long, and that is worth the time: only so much
                of it is waited for as keeps looking below its share.
        """
        start = self._tally.clock()
        if start < (self._soonest_look if soon else self._next_look):
            return
        began = time.perf_counter()
        in_flight, work = self._in_flight()
        memory = Memory(
            in_flight,
            self._ledger.held,
            self._ledger.nonfinite_groups,
            mx.get_active_memory(),
            mx.get_peak_memory(),
            mx.get_cache_memory(),
        )
        self.seen = Seen(start, memory, work, self._ledger.evictions)
        took = time.perf_counter() - began
        self._soonest_look = start + COST_SHARE * took
        self._next_look = max(start + LEAST_S, self._soonest_look)

    def _in_flight(self) -> tuple[Held, Work]:
        held, work = Held(), Work()
        if (batch := self._batch()) is not None:
            held, work = held_by_batch(batch)
        if self._alone is not None:
            held += held_by(*self._alone)
            work = replace(work, alone=1)
        return held, work

    def _batches(self, *args: Any, **options: Any) -> BatchGenerator:
        batch = _WatchedBatches(self, *args, **options)
        self._batch = ref(batch)
        return batch

    def step(self, before: "_Counted", after: "_Counted", n_last: int) -> None:
        """A batch has made a step.

        Args:
            before: What it had counted before.
            after: And after.
            n_last: How many prompts ended. Their last token, with which decoding begins, is one
                that mlx-lm does not count.
        """
        if n := after.prompt_tokens - before.prompt_tokens + n_last:
            self._tally.step("prompt", after.prompt_s - before.prompt_s, n)
        if n := after.decode_tokens - before.decode_tokens:
            self._tally.step("decode", after.decode_s - before.decode_s, n)
        self.look()

    def _stream(self, *, prompt: Any, prompt_cache: list[Any], **options: Any) -> Iterator[Any]:
        """mlx-lm's `stream_generate`, for one request outside a batch."""
        told, n_read, n_cached = options.pop("prompt_progress_callback"), 0, 0
        since = self._tally.clock()

        def count(kind: Any, n_tokens: int) -> None:
            nonlocal since
            now = self._tally.clock()
            self._tally.step(kind, now - since, n_tokens)
            since = now

        def progress(n_done: int, n_all: int) -> None:
            nonlocal n_read
            count("prompt", n_done - n_read)
            n_read = n_done
            self._alone = prompt_cache, n_cached + n_read
            self.look(soon=True)
            told(n_done, n_all)

        options |= {"prompt": prompt, "prompt_cache": prompt_cache}
        n_cached = tokens_held(prompt_cache)
        self._alone = prompt_cache, n_cached
        self.look(soon=True)
        try:
            for made in stream_generate(prompt_progress_callback=progress, **options):
                if n_read < len(prompt):  # a speculative stream says nothing of its prompt
                    count("prompt", len(prompt) - n_read)
                    n_read = len(prompt)
                count("decode", 1)
                self._alone = prompt_cache, n_cached + n_read + made.generation_tokens - 1
                self.look()
                yield made
        finally:
            self._alone = None


@dataclass(frozen=True, slots=True)
class _Counted:
    prompt_tokens: int
    prompt_s: float
    decode_tokens: int
    decode_s: float


class _WatchedBatches(BatchGenerator):
    def __init__(self, watch: Watch, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._watch = watch

    def next(self) -> Any:
        if self._currently_processing or self._unprocessed_sequences:
            self._watch.look(soon=True)
        before = self._counted()
        prompts, answers = super().next()
        n_last = sum(prompt.end_of_prompt for prompt in prompts)
        self._watch.step(before, self._counted(), n_last)
        return prompts, answers

    def _counted(self) -> _Counted:
        c = self._counters
        return _Counted(c.prompt_tokens, c.prompt_time, c.generation_tokens, c.decode_time)


def held_by_batch(batch: BatchGenerator) -> tuple[Held, Work]:
    """By the requests of a batch, those included that have not begun.

    As many of these as the next step takes are being read: it may be the next thing for minutes.
    """
    held = Held()
    for sequence in batch._unprocessed_sequences:
        caches, tokens = sequence[3:5]  # as `extract_cache` takes them out
        held += held_by(caches, len(tokens))
    prompts, answers = batch._prompt_batch, batch._generation_batch
    for part in (prompts, answers):
        n_tokens = sum(map(len, part.tokens))
        held += Held(len(part), n_tokens, *allocated(part.prompt_cache))
    n_reading = min(batch.prefill_batch_size, len(prompts) + len(batch._unprocessed_sequences))
    return held, Work(reading_prompts=n_reading, decoding=len(answers))
