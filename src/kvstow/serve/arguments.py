"""From OpenAI's words to those of mlx-lm's engine."""

from typing import Any

import mlx.core as mx
from mlx_lm.server import (
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from kvstow.serve.engine import Tokenised
from kvstow.serve.options import Defaults, ModelOptions
from kvstow.serve.refusal import BadRequest
from kvstow.serve.requests import ChatRequest, TextRequest

# mlx-lm's engine compares this to tell models apart, and here there is one.
THE_MODEL = ModelDescription("default_model", "default_model", "default_model")
LEAST = 1e-6  # of temperature and top_p: the likeliest token alone; less is none in float32
CONTEXT_SIZE = 20  # tokens that penalties look back at, as in mlx-lm's own server
# What the engine itself tells a chat template, or what would replace the template.
TAKEN = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)


def generation_arguments(
    request: ChatRequest | TextRequest,
    n_new: int,
    defaults: Defaults,
    model: ModelOptions,
    n_vocabulary: int,
) -> GenerationArguments:
    """How to generate.

    Args:
        request: Of the client.
        n_new: Most tokens of the answer.
        defaults: Where the request is silent.
        model: What is served.
        n_vocabulary: How many tokens the model knows.

    Raises:
        BadRequest: If the request names a token that there is not, or what only the engine may say.
    """
    temp = _or(request.temperature, defaults.temp)
    top_k = _or(request.top_k, defaults.top_k)
    return GenerationArguments(
        model=THE_MODEL,
        sampling=SamplingArguments(
            temperature=_input(max(temp, LEAST) if temp > 0 else 0.0),
            top_p=_input(max(_or(request.top_p, defaults.top_p), LEAST)),
            top_k=top_k if top_k < n_vocabulary else 0,  # that is, all
            min_p=_or(request.min_p, defaults.min_p),
            xtc_probability=_or(request.xtc_probability, 0.0),
            xtc_threshold=_or(request.xtc_threshold, 0.1),
        ),
        logits=LogitsProcessorArguments(
            logit_bias=_logit_bias(request, n_vocabulary),
            repetition_penalty=_or(request.repetition_penalty, 0.0),
            repetition_context_size=_or(request.repetition_context_size, CONTEXT_SIZE),
            presence_penalty=_or(request.presence_penalty, 0.0),
            presence_context_size=_or(request.presence_context_size, CONTEXT_SIZE),
            frequency_penalty=_or(request.frequency_penalty, 0.0),
            frequency_context_size=_or(request.frequency_context_size, CONTEXT_SIZE),
        ),
        stop_words=request.stop or [],
        max_tokens=n_new,
        num_draft_tokens=_or(request.num_draft_tokens, model.num_draft_tokens),
        logprobs=request.n_top_logprobs is not None,
        top_logprobs=request.n_top_logprobs or 0,
        # The likeliest token needs no seed, and without one the request can be batched.
        seed=request.seed if temp > 0 else None,
        chat_template_kwargs=_template_arguments(request, defaults),
    )


def engine_request(request: ChatRequest | TextRequest) -> Tokenised:
    """What to answer, not tokenised yet unless it came as tokens."""
    if isinstance(request, ChatRequest):
        offered = request.tools if request.tool_choice != "none" else None
        tools = [tool.model_dump(exclude_none=True) for tool in offered or ()]
        messages = [message.for_template() for message in request.messages]
        return Tokenised("chat", "", messages, tools or None, None)
    if isinstance(request.prompt, str):
        return Tokenised("text", request.prompt, [], None, None)
    tokens = (request.prompt, [request.prompt], ["assistant"], "normal", None)
    return Tokenised("text", "", [], None, None, tokens)


def _input(value: float) -> Any:
    """A number that mlx does not compile into a sampler: every other would be another sampler."""
    return mx.array(value)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _logit_bias(request: ChatRequest | TextRequest, n_vocabulary: int) -> dict[int, float] | None:
    found = {}
    for name, bias in (request.logit_bias or {}).items():
        is_short = len(name) <= len(str(n_vocabulary))  # Python reads no number of many digits
        if not (is_short and name.isdecimal() and int(name) < n_vocabulary):
            message = f"a token of logit_bias must be 0 to {n_vocabulary - 1}, got {name[:20]!r}"
            raise BadRequest("logit_bias", message)
        found[int(name)] = bias
    return found or None


def _template_arguments(request: ChatRequest | TextRequest, defaults: Defaults) -> dict[str, Any]:
    given = (request.chat_template_kwargs or {}) if isinstance(request, ChatRequest) else {}
    if taken := sorted(TAKEN & given.keys()):
        message = f"chat_template_kwargs may not hold {', '.join(taken)}"
        raise BadRequest("chat_template_kwargs", message)
    return {**defaults.chat_template_args, **given}
