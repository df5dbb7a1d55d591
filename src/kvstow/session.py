"""An attached model and its tokenizer to a stream of text, and the numbers of that run.

Each `Session.generate` is one `Run` with a fresh cache through mlx-lm's own
`stream_generate`, speculative if the session has a `Draft`.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from kvstow.capacity import PREFILL_TOKENS
from kvstow.errors import PromptError, UnsupportedModel
from kvstow.integrations import AttachReport
from kvstow.integrations.mlx_lm.disk_prefixes import ModelPrefixes
from kvstow.integrations.mlx_lm.probe import text_args
from kvstow.integrations.mlx_lm.speculative import CachePair, why_untrimmable
from kvstow.run import Draft, Drafting, Prefix, Run, Sampling, Summary

_BETWEEN = "\ue000\ue001"  # marks a place in a chat turn; no text has it: private use

__all__ = ["Draft", "Prefix", "Run", "Sampling", "Session", "Summary"]


class Session:
    """A model that is attached, its tokenizer, and the length of its context.

    Args:
        model: An mlx-lm model.
        tokenizer: The tokenizer that mlx-lm loaded with it.
        report: What `kvstow.attach` said of it.
        context_tokens: The longest context that the model's config allows, where it says.
        draft: For speculative decoding.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        report: AttachReport,
        *,
        context_tokens: int | None = None,
        draft: Draft | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.report = report
        # Beyond its own context a draft model may look up positions that it does not have.
        limits = (context_tokens, None if draft is None else draft.context_tokens)
        self.context_tokens = min((n for n in limits if n is not None), default=None)
        self.draft = draft

    def encode(
        self, prompt: str, *, system_prompt: str | None = None, chat_template: bool = True
    ) -> list[int]:
        """Tokens of `prompt`, as a chat turn where the tokenizer has a template.

        Raises:
            PromptError: If there is no text, no template for a system prompt, the template
                refuses the messages, or the prompt leaves no room in the model's context.
        """
        if not prompt.strip():
            raise PromptError("the prompt is empty")
        templated = chat_template and self.tokenizer.has_chat_template
        if system_prompt is not None and not templated:
            why = "this tokenizer has none" if chat_template else "it is turned off"
            raise PromptError(f"a system prompt needs the chat template, and {why}")
        tokens = self._templated(prompt, system_prompt) if templated else None
        return self._checked(self.tokenizer.encode(prompt) if tokens is None else tokens)

    def encode_part(
        self,
        text: str,
        *,
        continued: bool,
        system_prompt: str | None = None,
        chat_template: bool = True,
    ) -> list[int]:
        """Tokens of a part of a prompt, which is read in two parts.

        As a chat turn both parts are of one user turn: the first ends where its text ends, and
        the second begins with its own. The two are tokenised apart.

        Args:
            text: The part's.
            continued: Whether it is the second.
            system_prompt: Of the first.
            chat_template: Whether there is a turn, where the tokenizer has a template.

        Raises:
            PromptError: As `encode`, or if the template does not leave the text as it is.
        """
        if not text.strip():
            raise PromptError("the prompt is empty")
        if not (chat_template and self.tokenizer.has_chat_template):
            if continued:
                return list(self.tokenizer.encode(text, add_special_tokens=False))
            return self.encode(text, system_prompt=system_prompt, chat_template=chat_template)
        whole = f"{_BETWEEN}{text}" if continued else f"{text}{_BETWEEN}"
        rendered: str = self._templated(whole, system_prompt, tokenize=False)
        before, between, after = rendered.partition(_BETWEEN)
        if not between:
            raise PromptError("the model's chat template changes the text of a turn")
        part = after if continued else before
        return self._checked(self.tokenizer.encode(part, add_special_tokens=False))

    def read(
        self, tokens: list[int], *, on_prefill: Callable[[int, int], None] | None = None
    ) -> list[Any]:
        """A prompt cache that holds `tokens`, read in the same chunks as a prompt.

        Args:
            tokens: The prompt, or its first part.
            on_prefill: Called with the tokens read so far and in all.

        Raises:
            PromptError: If there are none, or they leave no room in the model's context.
        """
        tokens = self._checked(tokens)
        cache = make_prompt_cache(self.model)
        for start in range(0, len(tokens), PREFILL_TOKENS):
            chunk = tokens[start : start + PREFILL_TOKENS]
            self.model(mx.array(chunk)[None], cache=cache)
            mx.eval([c.state for c in cache])
            mx.clear_cache()
            if on_prefill:
                on_prefill(start + len(chunk), len(tokens))
        return cache

    def generate(
        self,
        tokens: list[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        prefix: Prefix | None = None,
    ) -> Run:
        """Start a run; nothing is computed before it is iterated over.

        Args:
            tokens: The prompt, from `encode`, or what follows `prefix`.
            max_tokens: Most tokens to generate; fewer where the model's context ends.
            sampling: How to draw them; the most likely ones if None.
            on_prefill: Called with the prompt tokens processed so far and in all; mlx-lm
                never calls it when there is a draft.
            prefix: What the cache holds already; it is a fresh one if None.

        Raises:
            PromptError: If the prompt is empty or leaves no room in the model's context.
            UnsupportedModel: If there is a draft, and so many tokens fill a sliding window,
                from which no rejected token could be taken back, or a prefix, which the draft
                model has not read.
            ValueError: If `max_tokens` is not positive.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        held = 0 if prefix is None else len(prefix.tokens)
        tokens = self._checked(tokens, held)
        if self.context_tokens is not None:
            max_tokens = min(max_tokens, self.context_tokens - held - len(tokens))
        sampling = sampling or Sampling()
        top_k = sampling.top_k if sampling.top_k < self._vocabulary else 0  # that is, all
        if sampling.seed is not None:
            mx.random.seed(sampling.seed)
        if prefix is not None and self.draft is not None:
            raise UnsupportedModel("the draft model has not read the prefix that is resumed")
        cache = make_prompt_cache(self.model) if prefix is None else prefix.cache
        drafting, options = self._drafting(cache, len(tokens), max_tokens)
        mx.reset_peak_memory()
        responses = stream_generate(
            self.model,
            self.tokenizer,
            tokens,
            max_tokens=max_tokens,
            sampler=make_sampler(sampling.temp, sampling.top_p, sampling.min_p, 1, top_k),
            prefill_step_size=PREFILL_TOKENS,
            prompt_progress_callback=on_prefill,
            **options,
        )
        return Run(responses, self.report, cache, drafting, held)

    def generate_kept(
        self,
        prefixes: ModelPrefixes,
        tokens: list[int],
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Run:
        """As `generate`, from the longest prefix on disk; what is read of the prompt goes there.

        A file holds a prompt without its last token, which is always read.

        Args:
            prefixes: Those of this model, as it is attached.
            tokens: The whole prompt.
            on_prefill: Called with the tokens read so far, and those that there are to read.
            options: Of `generate`.

        Raises:
            PromptError: As `generate`.
            UnsupportedModel: If there is a draft model, which would not have read the prefix.
        """
        held = prefixes.nearest(tokens[:-1])
        if held is None:
            prefix = Prefix([], make_prompt_cache(self.model))
        else:
            prefix = Prefix(tokens[: held.n_tokens], held.trimmed())

        def noted(done: int, n_tokens: int) -> None:
            if on_prefill is not None:
                on_prefill(done, n_tokens)
            if done == n_tokens - 1 > 0:
                prefixes.put(tokens[:-1], prefix.cache)

        rest = tokens[len(prefix.tokens) :]
        return self.generate(rest, prefix=prefix, on_prefill=noted, **options)

    def _drafting(
        self, cache: list[Any], n_prompt: int, max_tokens: int
    ) -> tuple[Drafting | None, dict[str, Any]]:
        """The draft model's part of a run, and the options of mlx-lm that say so.

        Raises:
            UnsupportedModel: If a cache cannot forget rejected tokens.
        """
        draft = self.draft
        if draft is None:
            return None, {"prompt_cache": cache}
        for name, model in (("model", self.model), ("draft model", draft.model)):
            if why := why_untrimmable(model, n_prompt + max_tokens):
                raise UnsupportedModel(
                    f"the {name} cannot decode speculatively a prompt of {n_prompt} tokens and "
                    f"{max_tokens} more: {why}"
                )
        caches = CachePair(cache, make_prompt_cache(draft.model))
        part = Drafting(draft.report, caches.draft, draft.num_draft_tokens, max_tokens)
        return part, {
            "prompt_cache": caches,
            "draft_model": draft.model,
            "num_draft_tokens": draft.num_draft_tokens,
        }

    @property
    def _vocabulary(self) -> int:
        return int(getattr(text_args(self.model), "vocab_size", None) or len(self.tokenizer.vocab))

    def _templated(self, prompt: str, system_prompt: str | None, *, tokenize: bool = True) -> Any:
        messages = [{"role": "user", "content": prompt}]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            turn = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=tokenize
            )
        except Exception as error:  # jinja2's own, raised by the text of a model's template
            raise PromptError(f"the model's chat template refuses the prompt: {error}") from error
        return list(turn) if tokenize else turn

    def _checked(self, tokens: list[int], held: int = 0) -> list[int]:
        """`tokens`, if there are some and they leave room for one more behind `held` others.

        Raises:
            PromptError: If not.
        """
        if not tokens:
            raise PromptError("the prompt is empty")
        limit = self.context_tokens
        if limit is not None and held + len(tokens) >= limit:
            raise PromptError(
                f"the prompt has {held + len(tokens)} tokens and leaves no room for an answer: "
                f"the model's context is {limit} tokens"
            )
        return list(tokens)
