"""What may be asked: OpenAI's requests, checked before anything is done.

A parameter that would change the answer is either done or refused. Those that cannot change
it are taken and left alone; an unknown one is refused, since nobody knows what it would do.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import from_json

from kvstow.serve.messages import Message, Tool
from kvstow.serve.refusal import BadRequest

# They change nothing in an answer of this server.
HARMLESS = frozenset(
    {
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
    }
)
# What is not done, beside the values that ask for nothing.
NOT_DONE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "there is no audio"),
    "best_of": ((1,), "there is one answer per request"),
    "echo": ((False,), "the prompt is not part of the answer"),
    "function_call": (("none",), "use tools and tool_choice"),
    "functions": (([],), "use tools"),
    "modalities": ((["text"],), "there is only text"),
    "n": ((1,), "there is one answer per request"),
    "reasoning_effort": ((), "pass what the model's chat template knows in chat_template_kwargs"),
    "response_format": (({"type": "text"},), "answers are not held to a grammar"),
    "suffix": (("",), "there is no text after the answer"),
    "tool_choice": (("auto", "none"), "a call cannot be forced"),
    "verbosity": (("medium",), "models are not told how much to say"),
    "web_search_options": ((), "there is no search"),
}
KEPT = frozenset({"tool_choice"})  # of those, what a model below reads
MAX_STOPS = 16
MAX_SEED = 2**64 - 1
MAX_BIASES = 10_000
MAX_SHOWN = 80  # characters of what was got
# What pydantic says beside what is allowed.
_OF_PYDANTIC = re.compile(
    r"^Value error, |^\w+ (?=should )| after validation, not \d+$| or instance of \w+$"
)

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Window = Annotated[int, Field(ge=1, le=100_000)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """What a stream holds beside its text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers; none is sent


class Request(BaseModel):
    """What both kinds of requests have; None is the server's own default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = "default_model"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[list[Stop] | None, BeforeValidator(_listed), Field(max_length=MAX_STOPS)] = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_context_size: Window | None = None
    frequency_context_size: Window | None = None
    repetition_context_size: Window | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=1, le=64)] | None = None

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """The parameter that bounds the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def n_characters(self) -> int:
        """Of all text in the prompt."""
        raise NotImplementedError

    @property
    def n_top_logprobs(self) -> int | None:
        """How many alternatives each token comes with; None: without log-probabilities."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Request):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def new_tokens(self) -> tuple[str, int | None]:
        """See `Request.new_tokens`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().new_tokens

    @property
    def n_characters(self) -> int:
        """See `Request.n_characters`."""
        return sum(len(message.content or "") for message in self.messages)

    @property
    def n_top_logprobs(self) -> int | None:
        """See `Request.n_top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(Request):
    """Of ``/v1/completions``: one prompt, as text or as tokens."""

    prompt: str | list[int]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def n_characters(self) -> int:
        """See `Request.n_characters`."""
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    @property
    def n_top_logprobs(self) -> int | None:
        """See `Request.n_top_logprobs`."""
        return self.logprobs


AnyRequest = TypeVar("AnyRequest", bound=Request)


def read_chat(body: bytes) -> ChatRequest:
    """The request in a body.

    Raises:
        BadRequest: If it is not one that is answered; it names the parameter.
    """
    request = _read(ChatRequest, body)
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs", "top_logprobs needs logprobs: true")
    return request


def read_text(body: bytes) -> TextRequest:
    """As `read_chat`.

    Raises:
        BadRequest: As there.
    """
    fields = _fields(body)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if not isinstance(prompt, str) and not _are_tokens(prompt):
        message = f"prompt must be one text or one list of tokens, got {_shown(prompt)}"
        raise BadRequest("prompt", message)
    if not prompt:
        raise BadRequest("prompt", "the prompt is empty")
    return _checked(TextRequest, {**fields, "prompt": prompt})


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def _read(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    return _checked(kind, _fields(body))


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a body without those that change nothing.

    Raises:
        BadRequest: If there are none, or one asks for what is not done.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(None, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise BadRequest(None, f"the body must be a JSON object, got {_shown(fields)}")
    kept = {name: value for name, value in fields.items() if name not in HARMLESS}
    for name, (allowed, why) in NOT_DONE.items():
        value = kept.get(name)
        if value is not None and value not in allowed:
            may_be = " or ".join(_shown(a) for a in allowed) or "left out"
            message = f"{name} must be {may_be}, got {_shown(value)}: {why}"
            raise BadRequest(name, message, code="unsupported_parameter")
        if name not in KEPT:
            kept.pop(name, None)
    return kept


def _checked(kind: type[AnyRequest], fields: dict[str, Any]) -> AnyRequest:
    given = {name: value for name, value in fields.items() if value is not None}
    unknown = next((name for name in given if name not in kind.model_fields), None)
    if unknown is not None:  # pydantic would list them all
        raise _unknown(unknown)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> BadRequest:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return _unknown(param)
    if first["type"] == "missing":
        return BadRequest(param, f"{param} is missing", code="missing_required_parameter")
    said = _OF_PYDANTIC.sub("", first["msg"])
    return BadRequest(param, f"{param} {said}, got {_shown(first['input'])}")


def _unknown(param: str) -> BadRequest:
    message = f"there is no parameter {_shown(param)}"
    return BadRequest(param[:MAX_SHOWN], message, code="unknown_parameter")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
