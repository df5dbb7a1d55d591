"""OpenAI's JSON of answers: whole ones and chunks, of both endpoints."""

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvstow.serve.answer import Part
from kvstow.serve.logprobs import Likelihood

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt: Of the prompt.
        completion: Of the answer.
        cached: Of the prompt, those that were computed before.
    """

    prompt: int
    completion: int
    cached: int

    def as_dict(self) -> JSON:
        """OpenAI's object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of one answer share."""

    model: str
    prefix: str
    kind: str
    chunk_kind: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[JSON], *, chunk: bool) -> JSON:
        """Everything but the usage."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.chunk_kind if chunk else self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class ChatFormat:
    """Of ``/v1/chat/completions``."""

    def __init__(self, model: str) -> None:
        self._head = Head(model, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._calls = 0

    def whole(self, part: Part, finish_reason: str, usage: Usage) -> JSON:
        """An answer that is not streamed."""
        message: JSON = {"role": "assistant", "content": part.text or None, "refusal": None}
        if not part.tool_calls:
            message["content"] = part.text
        if part.reasoning:
            message["reasoning"] = part.reasoning
        if part.tool_calls:
            message["tool_calls"] = list(part.tool_calls)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _chat_logprobs(part),
            "finish_reason": finish_reason,
        }
        return {**self._head.body([choice], chunk=False), "usage": usage.as_dict()}

    def first(self) -> JSON | None:
        """The chunk that begins a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, part: Part) -> JSON:
        """A part of a stream."""
        delta: JSON = {}
        if part.text:
            delta["content"] = part.text
        if part.reasoning:
            delta["reasoning"] = part.reasoning
        if part.tool_calls:
            numbered = enumerate(part.tool_calls, self._calls)
            delta["tool_calls"] = [{"index": i, **call} for i, call in numbered]
            self._calls += len(part.tool_calls)
        return self._chunk(delta, logprobs=_chat_logprobs(part))

    def last(self, finish_reason: str) -> JSON:
        """The chunk that ends it."""
        return self._chunk({}, finish_reason=finish_reason)

    def usage(self, usage: Usage) -> JSON:
        """The chunk behind that, where it is wanted."""
        return {**self._head.body([], chunk=True), "usage": usage.as_dict()}

    def _chunk(self, delta: JSON, **more: Any) -> JSON:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return self._head.body([choice], chunk=True)


class TextFormat:
    """Of ``/v1/completions``: reasoning and calls do not occur there."""

    def __init__(self, model: str) -> None:
        self._head = Head(model, "cmpl", "text_completion", "text_completion")
        self._shown = 0  # characters before this part

    def whole(self, part: Part, finish_reason: str, usage: Usage) -> JSON:
        """See `ChatFormat.whole`."""
        body = self._body(part, finish_reason, chunk=False)
        return {**body, "usage": usage.as_dict()}

    def first(self) -> JSON | None:
        """See `ChatFormat.first`: there is none."""
        return None

    def chunk(self, part: Part) -> JSON:
        """See `ChatFormat.chunk`."""
        return self._body(part, None, chunk=True)

    def last(self, finish_reason: str) -> JSON:
        """See `ChatFormat.last`."""
        return self._body(Part(), finish_reason, chunk=True)

    def usage(self, usage: Usage) -> JSON:
        """See `ChatFormat.usage`."""
        return {**self._head.body([], chunk=True), "usage": usage.as_dict()}

    def _body(self, part: Part, finish_reason: str | None, *, chunk: bool) -> JSON:
        choice = {
            "index": 0,
            "text": part.text,
            "logprobs": self._logprobs(part.likelihoods),
            "finish_reason": finish_reason,
        }
        return self._head.body([choice], chunk=chunk)

    def _logprobs(self, likelihoods: Iterable[Likelihood]) -> JSON | None:
        tokens, offsets = [], []
        found = list(likelihoods)
        for one in found:
            offsets.append(self._shown)
            tokens.append(_text(one.data))
            self._shown += len(tokens[-1])
        if not found:
            return None
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{_text(data): p for data, p in one.top} for one in found],
            "text_offset": offsets,
        }


Format = ChatFormat | TextFormat


def _chat_logprobs(part: Part) -> JSON | None:
    if not part.likelihoods:
        return None
    content = [
        {
            **_token(one.data, one.logprob),
            "top_logprobs": [_token(data, p) for data, p in one.top],
        }
        for one in part.likelihoods
    ]
    return {"content": content, "refusal": None}


def _token(data: bytes, logprob: float) -> JSON:
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
