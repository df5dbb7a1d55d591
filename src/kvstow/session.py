"""Model, tokenizer and scheme to a stream of text, and the numbers of that run.

A `Session` is one attached model; each `generate` is one run with a fresh cache
through mlx-lm's own `stream_generate`.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from kvstow.capacity import PREFILL_TOKENS
from kvstow.errors import PromptError
from kvstow.integrations import AttachReport, KVUsage, attach, usage
from kvstow.integrations.report import Fetch
from kvstow.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn; the names and meanings are mlx-lm's.

    Attributes:
        temp: Temperature; 0 takes the most likely token.
        top_p: Nucleus; 0 for off.
        top_k: The k most likely tokens; 0 for all.
        min_p: Least probability, relative to the most likely token's.
        seed: Of the random generator; None leaves it as it is.
    """

    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """What one run did. Rates are tokens per second; memory is mlx's own peak, weights included."""

    report: AttachReport
    kv: KVUsage
    prompt_tokens: int
    generation_tokens: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    peak_memory_bytes: int
    finish_reason: str

    def as_dict(self) -> dict[str, Any]:
        """The fields of ``kvstow generate --json``, all but the text."""
        run = asdict(self)
        del run["report"], run["kv"]
        return {
            "scheme": str(self.report.scheme),
            "fetch": self.report.fetch,
            "layers": self.report.as_dict(),
            **run,
            "kv_tokens": self.kv.tokens,
            "kv_capacity_tokens": self.kv.capacity_tokens,
            "kv_bytes": self.kv.bytes,
            "kv_bytes_bf16": self.kv.bytes_bf16,
            "kv_nonfinite_groups": self.kv.nonfinite_groups,
        }


class Session:
    """One model under one scheme.

    Args:
        model: An mlx-lm model; it is attached, and stays so.
        tokenizer: The tokenizer that mlx-lm loaded with it.
        scheme: See `kvstow.Scheme`.
        fetch: See `kvstow.attach`.
        context_tokens: The longest context that the model allows; None for what its args
            say, which for many architectures is nothing: its config knows.

    Attributes:
        report: What `attach` did.
        context_tokens: The longest context, where it is known.
        summary: Of the last run that `generate` finished; None before.

    Raises:
        UnsupportedModel: As `kvstow.attach`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        scheme: str | Scheme | None,
        *,
        fetch: Fetch = "auto",
        context_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.report = attach(model, scheme, fetch=fetch)
        self.context_tokens = context_tokens or _context_of(model)
        self.summary: Summary | None = None

    def encode(
        self, prompt: str, *, system_prompt: str | None = None, chat_template: bool = True
    ) -> list[int]:
        """Tokens of `prompt`, as a chat turn where the tokenizer has a template.

        Raises:
            PromptError: If there is no text, no template for a system prompt, or the prompt
                leaves no room in the model's context.
        """
        if not prompt.strip():
            raise PromptError("the prompt is empty")
        templated = chat_template and self.tokenizer.has_chat_template
        if system_prompt is not None and not templated:
            why = "this tokenizer has none" if chat_template else "it is turned off"
            raise PromptError(f"a system prompt needs the chat template, and {why}")
        if templated:
            messages = [{"role": "user", "content": prompt}]
            if system_prompt is not None:
                messages.insert(0, {"role": "system", "content": system_prompt})
            tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        else:
            tokens = self.tokenizer.encode(prompt)
        limit = self.context_tokens
        if limit is not None and len(tokens) >= limit:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and leaves no room for an answer: "
                f"the model's context is {limit} tokens"
            )
        return list(tokens)

    def generate(
        self,
        tokens: list[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[str]:
        """Yield pieces of text as they come; `summary` is set when they end.

        Args:
            tokens: The prompt, from `encode`.
            max_tokens: Most tokens to generate; fewer where the model's context ends.
            sampling: How to draw them; the most likely ones if None.
            on_prefill: Called with the prompt tokens processed so far and in all.
        """
        sampling = sampling or Sampling()
        if sampling.seed is not None:
            mx.random.seed(sampling.seed)
        if (limit := self.context_tokens) is not None:
            max_tokens = min(max_tokens, limit - len(tokens))
        cache = make_prompt_cache(self.model)
        mx.reset_peak_memory()
        last = None
        for last in stream_generate(
            self.model,
            self.tokenizer,
            tokens,
            max_tokens=max_tokens,
            sampler=make_sampler(sampling.temp, sampling.top_p, sampling.min_p, 1, sampling.top_k),
            prompt_cache=cache,
            prefill_step_size=PREFILL_TOKENS,
            prompt_progress_callback=on_prefill,
        ):
            if last.text:
                yield last.text
        self.summary = self._summarise(last, usage(cache))

    def _summarise(self, last: Any, kv: KVUsage) -> Summary:
        return Summary(
            report=self.report,
            kv=kv,
            prompt_tokens=last.prompt_tokens,
            generation_tokens=last.generation_tokens,
            prompt_tokens_per_s=round(last.prompt_tps, 2),
            generation_tokens_per_s=round(last.generation_tps, 2),
            peak_memory_bytes=int(mx.get_peak_memory()),
            finish_reason=last.finish_reason,
        )


def _context_of(model: Any) -> int | None:
    for owner in (model, getattr(model, "language_model", None)):
        limit = getattr(getattr(owner, "args", None), "max_position_embeddings", None)
        if isinstance(limit, int):
            return limit
    return None
