"""One run of a session: what it takes, its text as it comes, and what it did and took."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx

from kvstow.attention import fused
from kvstow.integrations import AttachReport, KVUsage, usage
from kvstow.integrations.mlx_lm.speculative import proposed


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
class Draft:
    """The draft model of speculative decoding.

    Attributes:
        model: An mlx-lm model, attached, with the vocabulary of the session's.
        report: What `kvstow.attach` said of it.
        num_draft_tokens: How many tokens it proposes at a time.
        context_tokens: The longest context that its config allows, where it says.
    """

    model: Any
    report: AttachReport
    num_draft_tokens: int
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that were computed before.

    Attributes:
        tokens: All of them.
        cache: A prompt cache that holds them; the run that continues it changes it.
    """

    tokens: list[int]
    cache: list[Any]


@dataclass(frozen=True, slots=True)
class DraftSummary:
    """What the draft model did in one run, and what its own cache took."""

    report: AttachReport
    kv: KVUsage
    num_draft_tokens: int
    proposed_tokens: int
    accepted_tokens: int

    @property
    def acceptance_rate(self) -> float:
        """The share of proposed tokens that are in the text; 0 if none was proposed."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The object ``draft`` of ``kvstow generate --json``."""
        return {
            **_of_model(self.report, self.kv),
            "num_draft_tokens": self.num_draft_tokens,
            "proposed_tokens": self.proposed_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": round(self.acceptance_rate, 4),
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """What one run did. Rates are tokens per second; memory is mlx's own peak, weights included.

    The first token counts to the prompt, so the rate of a run of one token is 0. The prompt is
    without the `resumed_tokens`, which came out of a file. Of several `processes`, bytes and
    memory are those of this one. `attention_calls` counts, under the fused path, calls of
    attention over packed tokens: ``"kernel"`` those that kernels took, and under a reason those
    that they did not. The draft model's are among them.
    """

    report: AttachReport
    kv: KVUsage
    prompt_tokens: int
    generation_tokens: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    peak_memory_bytes: int
    finish_reason: str
    draft: DraftSummary | None = None
    processes: int = 1
    resumed_tokens: int = 0
    attention_calls: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The fields of ``kvstow generate --json``, all but the text."""
        run = {f.name: getattr(self, f.name) for f in fields(self)}
        del run["report"], run["kv"]
        run["draft"] = self.draft and self.draft.as_dict()
        return {**_of_model(self.report, self.kv), **run}


def _of_model(report: AttachReport, kv: KVUsage) -> dict[str, Any]:
    return {
        "scheme": str(report.scheme),
        "fetch": report.fetch,
        "layers": report.as_dict(),
        "warnings": list(report.warnings),
        "kv_tokens": kv.tokens,
        "kv_capacity_tokens": kv.capacity_tokens,
        "kv_bytes": kv.kv_bytes,
        "kv_bytes_bf16": kv.kv_bytes_bf16,
        "kv_nonfinite_groups": kv.nonfinite_groups,
    }


def _rate(last: Any) -> float:
    """Tokens per second after the first, whose time is the prompt's; mlx-lm counts it in."""
    n: int = last.generation_tokens
    return float(last.generation_tps * (n - 1) / n)


@dataclass(slots=True)
class Drafting:
    """The draft model's part of a run.

    Attributes:
        report: What `kvstow.attach` said of the draft model.
        cache: Its prompt cache.
        num_draft_tokens: How many tokens it proposes at a time.
        max_tokens: Most tokens of the text.
        from_draft: Of every token so far, whether it was a proposal.
    """

    report: AttachReport
    cache: list[Any]
    num_draft_tokens: int
    max_tokens: int
    from_draft: list[bool] = field(default_factory=list)

    def summary(self) -> DraftSummary:
        """What was proposed up to now, and how much of it was taken."""
        return DraftSummary(
            report=self.report,
            kv=usage(self.cache),
            num_draft_tokens=self.num_draft_tokens,
            proposed_tokens=proposed(self.from_draft, self.num_draft_tokens, self.max_tokens),
            accepted_tokens=sum(self.from_draft),
        )


class Run:
    """One run of a session: iterate over it for pieces of text, then ask for the `summary`.

    Args:
        responses: mlx-lm's, one per token.
        report: What `kvstow.attach` said of the model.
        cache: The model's prompt cache.
        drafting: What the draft model does, if there is one.
        resumed_tokens: Tokens that the cache held before.
    """

    def __init__(
        self,
        responses: Iterator[Any],
        report: AttachReport,
        cache: list[Any],
        drafting: "Drafting | None" = None,
        resumed_tokens: int = 0,
    ) -> None:
        self._responses = responses
        self._report = report
        self._cache = cache
        self._drafting = drafting
        self._resumed_tokens = resumed_tokens
        self._last: Any = None
        self._calls = fused.counts()

    def __iter__(self) -> Iterator[str]:
        """The text as it comes."""
        for response in self._responses:
            self._last = response
            if self._drafting is not None:
                self._drafting.from_draft.append(response.from_draft)
            if response.text:
                yield response.text

    def summary(self) -> Summary:
        """What was done up to the last piece that was taken.

        Raises:
            RuntimeError: If none was.
        """
        last = self._last
        if last is None:
            raise RuntimeError("nothing was generated yet: iterate over the run first")
        return Summary(
            report=self._report,
            kv=usage(self._cache),
            prompt_tokens=last.prompt_tokens,
            generation_tokens=last.generation_tokens,
            prompt_tokens_per_s=round(last.prompt_tps, 2),
            generation_tokens_per_s=round(_rate(last), 2),
            peak_memory_bytes=int(mx.get_peak_memory()),
            finish_reason=last.finish_reason,
            draft=None if self._drafting is None else self._drafting.summary(),
            resumed_tokens=self._resumed_tokens,
            attention_calls=dict(fused.counts() - self._calls),
        )
