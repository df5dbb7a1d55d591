"""From a checked request to a job in the engine."""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import GenerationArguments

from kvstow.serve.answer import Answer, Part, Wanted
from kvstow.serve.arguments import engine_request, generation_arguments
from kvstow.serve.engine import Engine, Tokenised
from kvstow.serve.gateway import Gateway
from kvstow.serve.job import Job
from kvstow.serve.options import Defaults, Limits, ModelOptions
from kvstow.serve.refusal import BadRequest, GenerationFailed, Refusal, Stopping, TooSlow
from kvstow.serve.requests import ChatRequest, TextRequest
from kvstow.serve.responses import Usage
from kvstow.serve.stats import State
from kvstow.serve.tally import Tally, Visit

LOADING_S = 5  # after which it is worth asking again


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request whose turn has come.

    Attributes:
        job: In the engine.
        context: mlx-lm's, of the request.
        answer: As it comes.
        visit: Where its end is counted.
    """

    job: Job
    context: Any
    answer: Answer
    visit: Visit

    @property
    def usage(self) -> Usage:
        """Tokens up to now."""
        cached = max(self.context.prompt_cache_count, 0)
        return Usage(len(self.context.prompt), self.answer.n_tokens, cached)

    def feed(self, token: Any) -> Part:
        """Take a token; returns what is certain by now."""
        self.visit.token()
        return self.answer.feed(token)


class Service:
    """One model, its engine, and who is let in.

    Args:
        engine: Where requests run.
        gateway: Which are let in.
        model: What is served.
        defaults: Where a request is silent.
        limits: Of requests.
    """

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        *,
        model: ModelOptions,
        defaults: Defaults,
        limits: Limits,
    ) -> None:
        self.engine = engine
        self.gateway = gateway
        self.model = model
        self.limits = limits
        self.started = int(time.time())
        self._defaults = defaults
        self._jobs: set[Job] = set()
        self._tokenising = threading.Lock()  # a tokenizer serves one thread at a time

    @property
    def tally(self) -> Tally:
        """Where requests and their tokens are counted."""
        return self.engine.tally

    @property
    def state(self) -> State:
        """``loading``, ``ok``, or ``unavailable`` once the engine has died."""
        if not self.engine.generation_available():
            return "unavailable"
        return "ok" if self.engine.is_ready else "loading"

    def is_served(self, model: str) -> bool:
        """Whether that is a name of the model."""
        return model in (self.model.served_name, self.model.model, "default_model")

    def check_model(self, model: str) -> None:
        """Refuse another model.

        Raises:
            Refusal: If it is one.
        """
        if not self.is_served(model):
            message = f"the model {model[:100]!r} is not served here, {self.model.served_name!r} is"
            raise Refusal(404, message, code="model_not_found", param="model")

    async def open(
        self, request: ChatRequest | TextRequest, deadline: float, visit: Visit
    ) -> Exchange:
        """Let a request in, and wait for its turn.

        Args:
            request: Checked by itself.
            deadline: When its answer has to be whole, in the event loop's time.
            visit: Of the request.

        Raises:
            Refusal: If it is not let in, or the engine fails.
            TooSlow: If that takes too long.
        """
        self.check_model(request.model)
        self._check_ready()
        self._check_able(request)
        self._check_characters(request)
        # The length of the answer is known once the prompt's is.
        args = generation_arguments(
            request, 1, self._defaults, self.model, self.engine.model_provider.vocabulary_size
        )
        try:
            async with asyncio.timeout_at(deadline):
                asked = await asyncio.to_thread(self._tokenised, request, args)
        except TimeoutError as error:
            raise TooSlow from error
        args.max_tokens = self._room_for_answer(request, asked.n_prompt)
        job = await self._start(asked, args, deadline)
        try:
            context = await job.context()
        except BaseException:
            job.give_up()
            raise
        return Exchange(job, context, self._answer(request, asked, context), visit)

    def interrupt(self) -> None:
        """End all requests, those that wait too. In the event loop."""
        self.gateway.refuse_all(Stopping())
        for job in self._jobs:
            job.end(Stopping())

    def _check_ready(self) -> None:
        if self.state == "loading":
            message = "the model is loading"
            raise Refusal(503, message, code="model_loading", retry_after_s=LOADING_S)
        if self.state != "ok":
            raise GenerationFailed(self.engine.failure) if self.engine.failure else Stopping()

    def _check_able(self, request: ChatRequest | TextRequest) -> None:
        provider = self.engine.model_provider
        if request.num_draft_tokens is not None and not provider.has_draft:
            raise BadRequest(
                "num_draft_tokens", "num_draft_tokens needs a server with --draft-model"
            )
        if not isinstance(request, ChatRequest):
            return
        if not provider.tokenizer.has_chat_template:
            message = "this model has no chat template: use /v1/completions"
            raise BadRequest("messages", message, code="no_chat_template")
        if request.tools and not provider.tokenizer.has_tool_calling:
            message = "this model's chat template has no tool calls that mlx-lm can read"
            raise BadRequest("tools", message, code="no_tool_calling")

    def _check_characters(self, request: ChatRequest | TextRequest) -> None:
        """Refuse what is too long whatever its tokens are: to find them takes long, too."""
        least = request.n_characters // self.engine.model_provider.longest_token
        if (limit := self.model.context_tokens) is not None and least >= limit:
            raise self._too_long(request, f"at least {least}", 1)

    def _tokenised(
        self, request: ChatRequest | TextRequest, args: GenerationArguments
    ) -> Tokenised:
        asked = engine_request(request)
        if asked.tokens is None:
            try:
                with self._tokenising:
                    self.engine.tokenise(asked, args)
            except Exception as error:  # jinja2's own, raised by the text of a model's template
                param = "messages" if asked.request_type == "chat" else "prompt"
                message = f"no prompt can be made of {param}: {error}"
                raise BadRequest(param, message, code="invalid_prompt") from error
        n_vocabulary = self.engine.model_provider.vocabulary_size
        if not asked.n_prompt:
            raise BadRequest("prompt", "the prompt is empty")
        if not all(0 <= token < n_vocabulary for token in asked.tokens[0]):
            raise BadRequest("prompt", f"tokens of a prompt must be 0 to {n_vocabulary - 1}")
        return asked

    def _room_for_answer(self, request: ChatRequest | TextRequest, n_prompt: int) -> int:
        """Most tokens of the answer.

        Raises:
            Refusal: If prompt and answer do not fit in the model's context, or in the budget.
        """
        param, n_new = request.new_tokens
        limit = self.model.context_tokens
        if limit is not None and n_prompt + (n_new or 1) > limit:
            raise self._too_long(request, n_prompt, n_new or 1)
        if n_new is None:
            n_new = self._defaults.max_tokens
            if limit is not None:
                n_new = min(n_new, limit - n_prompt)
        self.gateway.check(n_prompt, n_new, param)
        return n_new

    def _too_long(
        self, request: ChatRequest | TextRequest, n_prompt: int | str, n_new: int
    ) -> BadRequest:
        return BadRequest(
            "messages" if isinstance(request, ChatRequest) else "prompt",
            f"the model's context is {self.model.context_tokens} tokens, got {n_prompt} of prompt "
            f"and {n_new} of answer",
            code="context_length_exceeded",
        )

    async def _start(self, asked: Tokenised, args: GenerationArguments, deadline: float) -> Job:
        n_tokens = asked.n_prompt + args.max_tokens
        try:
            async with asyncio.timeout_at(deadline):
                ticket = await self.gateway.admit(n_tokens, self.engine.lane_of(args))
        except TimeoutError as error:
            raise TooSlow from error
        job = Job(
            self.engine, asked, args, deadline=deadline, ticket=ticket, release=self.gateway.release
        )
        self._jobs = {known for known in self._jobs if not known.is_done} | {job}
        return job

    def _answer(self, request: ChatRequest | TextRequest, asked: Tokenised, context: Any) -> Answer:
        wanted = Wanted(
            stops=request.stop or (),
            n_top_logprobs=request.n_top_logprobs,
            tools=asked.tools,
            one_call=isinstance(request, ChatRequest) and request.parallel_tool_calls is False,
            raw=isinstance(request, TextRequest),
        )
        return Answer(context, self.engine.model_provider.tokenizer, wanted)
