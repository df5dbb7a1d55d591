"""From the tokens of mlx-lm's engine to the parts of an answer.

Text goes through two filters: `Stops` ends it, and mlx-lm's own `TextStateMachine` tells text
from reasoning and tool calls. Streaming or not, the parts are the same.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine

from kvstow.serve.logprobs import Likelihood, likelihood, token_bytes
from kvstow.serve.stops import Stops

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Part:
    """What some tokens added to an answer.

    Attributes:
        text: Of the answer.
        reasoning: Text that came before it.
        tool_calls: In OpenAI's shape, without an index.
        likelihoods: Of the tokens, if they are wanted.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    likelihoods: tuple[Likelihood, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.likelihoods)

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
            self.likelihoods + other.likelihoods,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of an answer the client wants.

    Attributes:
        stops: Words that end it.
        n_top_logprobs: Alternatives of each token; None: no log-probabilities.
        tools: That the model was told of.
        one_call: Whether the answer ends with its first tool call.
        raw: Whether it is the rest of a text: it may begin with a space, and markers of reasoning
            and of tools are text like any other.
    """

    stops: Sequence[str] = ()
    n_top_logprobs: int | None = None
    tools: list[Any] | None = None
    one_call: bool = False
    raw: bool = False


class Answer:
    """An answer as it comes.

    Args:
        context: mlx-lm's, of the request.
        tokenizer: mlx-lm's wrapper.
        wanted: By the client.

    Attributes:
        finish_reason: Why it ended; None before.
        n_tokens: Tokens so far, the one that ended it included.
    """

    def __init__(self, context: Any, tokenizer: Any, wanted: Wanted) -> None:
        self.finish_reason: FinishReason | None = None
        self.n_tokens = 0
        self._context = context
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._stops = Stops(wanted.stops)
        self._state = (
            TextStateMachine().make_state()
            if wanted.raw
            else context.text_sm.make_state(context.initial_state)
        )
        self._tool_text: str | None = None  # of a call that has begun
        self._calls = 0
        self._lacks_space = False
        self._shown_bytes = self._drawn_bytes = 0
        self._waiting: list[tuple[int, Likelihood]] = []  # tokens by where they begin

    def feed(self, response: Any) -> Part:
        """Take one token; returns what is certain by now."""
        self.n_tokens += 1
        is_last = response.finish_reason is not None
        ended_by_eos = is_last and response.token in self._tokenizer.eos_token_ids
        if not ended_by_eos:
            self._remember(response)
        text = self._stops.feed(self._spaced(response))
        if response.finish_reason == "stop" and not ended_by_eos:
            text += self._end_at_word(response)
        elif is_last:
            text += self._stops.flush()
        if self._stops.found:
            self.finish_reason = "stop"
        elif is_last:
            self.finish_reason = response.finish_reason
        self._shown_bytes += len(text.encode())
        part = self._sort(text) + Part(likelihoods=self._released())
        if self._has_its_call or (self._calls and self.finish_reason == "stop"):
            self.finish_reason = "tool_calls"
        return part

    @property
    def _has_its_call(self) -> bool:
        """Whether nothing is wanted any more behind a tool call."""
        return self._wanted.one_call and self._calls > 0

    def _spaced(self, response: Any) -> str:
        """The text of a response. mlx-lm leaves out a space in front of all."""
        text: str = response.text
        if self.n_tokens == 1:
            first = token_bytes(self._tokenizer, response.token)
            self._lacks_space = first.startswith(b" ")
        if text and self._lacks_space:
            self._lacks_space = False
            if not text.startswith(" "):
                if self._wanted.raw:
                    return f" {text}"
                self._shown_bytes += 1  # as if it had been shown
        return text

    def _end_at_word(self, response: Any) -> str:
        """The last of the text before a stop word, whose last token mlx-lm may leave out."""
        text = ""
        if not self._stops.found:
            last = token_bytes(self._tokenizer, response.token).decode("utf-8", "replace")
            text = self._stops.feed(last)
        self._stops.found = True
        return text

    def _remember(self, response: Any) -> None:
        if (n_top := self._wanted.n_top_logprobs) is not None:
            found = likelihood(self._tokenizer, response, n_top)
            self._waiting.append((self._drawn_bytes, found))
            self._drawn_bytes += len(found.data)

    def _released(self) -> tuple[Likelihood, ...]:
        """Those whose text is out; at the end all, but those of a stop word."""
        ended = self.finish_reason is not None and not self._stops.found
        out = [f for start, f in self._waiting if ended or start < self._shown_bytes]
        self._waiting = self._waiting[len(out) :]
        return tuple(out)

    def _sort(self, text: str) -> Part:
        """Tell text from reasoning and tool calls."""
        self._state, segments = TextStateMachine.split(self._state, text)
        if self.finish_reason is not None:
            self._state, rest, name = TextStateMachine.flush(self._state)
            segments.append((name, rest))
        part = Part()
        for name, clean in segments:
            part += self._take(name, clean)
        if self.finish_reason is not None and self._tool_text is not None:
            part += self._call()
        return part

    def _take(self, name: str, text: str) -> Part:
        """Take the text of a state. Those that are not named here are headers between messages."""
        part = Part()
        if name == "tool" and not self._has_its_call:
            self._tool_text = (self._tool_text or "") + text
            return part
        if self._tool_text is not None:
            part = self._call()
        if name == "normal" and not self._has_its_call:
            part += Part(text=text)
        elif name == "reasoning" and not self._has_its_call:
            part += Part(reasoning=text)
        return part

    def _call(self) -> Part:
        """The calls in the text of one; the text itself where it cannot be read."""
        text, self._tool_text = self._tool_text or "", None
        if not text.strip():
            return Part()
        try:
            parsed = self._context.tool_parser(text, self._wanted.tools)
            calls = tuple(map(_shaped, parsed if isinstance(parsed, list) else [parsed]))
        except Exception:  # a parser of mlx-lm's on whatever a model wrote, or half of it
            return Part(text=text)
        if self._wanted.one_call:
            calls = calls[:1]
        self._calls += len(calls)
        return Part(tool_calls=calls)


def _shaped(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
