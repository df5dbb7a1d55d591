"""mlx-lm's engine, where requests come tokenised and can be taken back at any time.

`ResponseGenerator` runs in one thread: continuous batching, and one at a time what cannot be
batched. It hands back everything through ``put`` of an object that came with the request: here
an `Outbox`, which knows whether anybody still waits. What mlx-lm does not do is done around it:

* A request that was given up before its turn is dropped unread.
* A prompt outside the batch is given up between two of its chunks.
* When nothing is computed for a request any more, and its memory is free, its outbox is told.
* If the thread dies, all that wait are told, at once.
* What the thread does and holds is seen by a `Watch`.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    ResponseGenerator,
)

from kvstow.integrations.mlx_lm.prompt_cache import TieredPromptCache
from kvstow.serve.provider import Provider
from kvstow.serve.rounds import Rounds
from kvstow.serve.tally import Tally
from kvstow.serve.watch import Watch

log = logging.getLogger("kvstow.serve")
Lane = Literal["batch", "single"]
GONE_S = 0.5


class EngineDead(RuntimeError):
    """The thread that generates has ended."""


class _GivenUp(Exception):
    """Raised in that thread, in the middle of a prompt that nobody waits for."""


@dataclass
class Tokenised(CompletionRequest):
    """A request of mlx-lm's, with what its ``_tokenize`` would return."""

    tokens: Any = None

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens[0])


class Outbox:
    """Where the engine puts what it has of one request.

    Args:
        deliver: Called with everything that is put, in the thread that generates.
        closed: Called there once, when nothing is computed for the request any more: what is
            left of it then is kept for later prompts, or nothing.
    """

    def __init__(self, deliver: Callable[[Any], None], closed: Callable[[], None]) -> None:
        self._deliver = deliver
        self._closed = closed
        self._context: Any = None
        self.given_up = False
        self.lane: Lane = "batch"
        self.leaves = False  # whether the batch drops it at the end of this round
        self._is_closed = False

    def put(self, item: Any) -> None:
        """Take a context, progress, tokens, an error, or None for the end.

        Raises:
            _GivenUp: To get out of a prompt that is read outside the batch.
        """
        given_up, is_context = self.given_up, isinstance(item, GenerationContext)
        if is_context:
            self._context = item
        if not given_up:
            self._deliver(item)
        elif self._context is not None:
            self._context.stop()
        if item is None or isinstance(item, Exception):
            self.leaves = True
            self.close()
        elif given_up and not is_context:
            self.leaves = True
            if self.lane == "single" and isinstance(item, tuple):
                raise _GivenUp

    def give_up(self) -> None:
        """Stop the request wherever it is. From any thread.

        The engine is told at the next `put`, in its own thread: were it told here, it might drop
        the request without a `put` that says so.
        """
        self.given_up = True

    def close(self) -> None:
        """Say that nothing is computed for it any more; once."""
        if not self._is_closed:
            self._is_closed = True
            self._closed()


class Engine(ResponseGenerator):
    """The thread that loads the model and generates.

    Args:
        provider: Of the model.
        prompt_cache: For prefixes of prompts, empty.

    Attributes:
        tally: Of what it does.
        watch: Of what it holds.
        failure: The error that it died of.
        is_ready: Whether the model is loaded.
    """

    model_provider: Provider

    def __init__(self, provider: Provider, prompt_cache: TieredPromptCache) -> None:
        self.tally = Tally()
        self.watch = Watch(self.tally, prompt_cache)
        self.failure: Exception | None = None
        self.is_ready = False
        self._may_start = threading.Event()
        self._on_ready: Callable[[], None] = lambda: None
        self._on_death: Callable[[], None] = lambda: None
        self._outboxes: set[Outbox] = set()
        self._lock = threading.Lock()
        provider.on_loaded = self._loaded
        super().__init__(provider, prompt_cache)
        self._time_budget: Any = Rounds()

    def start(self, *, on_ready: Callable[[], None], on_death: Callable[[], None]) -> None:
        """Let the thread load the model, and then generate.

        Args:
            on_ready: Called in the thread once the model is loaded.
            on_death: Called in the thread when it ends by an error.
        """
        self._on_ready, self._on_death = on_ready, on_death
        self._may_start.set()

    def stop_and_join(self) -> None:
        """End the thread, after the step that it is in."""
        self._stop = True
        self._may_start.set()
        self.join()
        _until_gone(self._generation_thread.native_id)

    def lane_of(self, args: GenerationArguments) -> Lane:
        """Whether a request can share the model with others."""
        return "batch" if self._is_batchable(args) else "single"

    def submit(self, request: Tokenised, args: GenerationArguments, outbox: Outbox) -> None:
        """Hand a request over.

        Raises:
            EngineDead: If nobody would take it.
        """
        outbox.lane = self.lane_of(args)
        with self._lock:
            if not self.generation_available():
                raise EngineDead(str(self.failure or "the server is stopping"))
            self._outboxes.add(outbox)
        self.requests.put((outbox, request, args))

    def _loaded(self) -> None:
        self.is_ready = True
        self._on_ready()

    def _run_generate(self) -> None:
        self._may_start.wait()
        try:
            if not self._stop:
                self._generate()
        except Exception as error:  # whatever model, tokenizer or memory it was
            self.failure = error
            if self.is_ready:
                log.exception("the generation thread died")
        finally:
            with self._lock:
                self._generation_failed = True
                left, self._outboxes = self._outboxes, set()
            for outbox in left:
                outbox.put(EngineDead(str(self.failure or "the server is stopping")))
                outbox.close()
            if self.failure is not None:
                self._on_death()

    def _next_request(self, timeout: float | None = None) -> Any:
        """The next that somebody waits for. Once in every round, so others leave here."""
        with self._lock:
            leaving = [outbox for outbox in self._outboxes if outbox.leaves]
        for outbox in leaving:
            self._close(outbox)
        self.watch.look()
        while (found := super()._next_request(timeout)) is not None:
            if not found[0].given_up:
                return found
            self._close(found[0])
        return None

    def _generate(self) -> None:
        self.watch.watched(ResponseGenerator._generate)(self)

    def _serve_single(self, request: Any, stream: Any) -> None:
        outbox, asked, args = request
        with self.model_provider.answering(asked.n_prompt + args.max_tokens):
            self.watch.watched(ResponseGenerator._serve_single)(self, request, stream)
        self._close(outbox)

    def _close(self, outbox: Outbox) -> None:
        with self._lock:
            self._outboxes.discard(outbox)
        outbox.close()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """What came with the request. mlx-lm uses the lists up, so each call has its own."""
        if request.tokens is None:
            return super()._tokenize(tokenizer, request, args)
        prompt, segments, kinds, *rest = request.tokens
        return (list(prompt), [list(s) for s in segments], list(kinds), *rest)

    def tokenise(self, request: Tokenised, args: GenerationArguments) -> None:
        """Add its tokens to a request; not in the thread that generates."""
        request.tokens = super()._tokenize(self.model_provider.tokenizer, request, args)

    def _make_state_machine(self, model_key: Any, tokenizer: Any, stop_words: Any) -> Any:
        """Stop words end the answer, and `kvstow.serve.answer` cuts them from its text."""
        stops, _ = super()._make_state_machine(model_key, tokenizer, stop_words)
        return stops, make_text_state_machine(tokenizer)


def _until_gone(native_id: int | None) -> None:
    """Wait for the end of a thread that Python has joined.

    mlx destroys what belongs to the thread after Python has left it, and needs Python for that:
    if the program ends meanwhile, the thread aborts it.
    """
    task = Path(f"/proc/self/task/{native_id}")
    if not task.parent.exists():  # not Linux
        time.sleep(GONE_S)
    end = time.monotonic() + GONE_S
    while task.exists() and time.monotonic() < end:
        time.sleep(0.001)
