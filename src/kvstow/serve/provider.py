"""The one model of a server, loaded as the other commands load it, and attached."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider
from mlx_lm.tuner.utils import load_adapters

from kvstow.errors import ModelFileError, UnsupportedModel
from kvstow.integrations import AttachReport, attach
from kvstow.integrations.mlx_lm.probe import text_args
from kvstow.integrations.mlx_lm.speculative import (
    CachePair,
    disagreement,
    trimmable_tokens,
)
from kvstow.integrations.report import fetch_of
from kvstow.models import load
from kvstow.policy import Policy
from kvstow.serve.options import EngineOptions, ModelOptions


class Provider(ModelProvider):
    """mlx-lm's `ModelProvider` for a model that stays.

    Args:
        options: Of the model.
        engine: Read by mlx-lm's engine from here.

    Attributes:
        report: What `attach` said of the model, once it is loaded.
        draft_report: And of the draft model.
        on_loaded: Called then.
        speculation_tokens: The most tokens of a request that is decoded speculatively, None for
            any number: tokens that the model rejects cannot leave a full sliding window.
    """

    model: Any  # of any kind; mlx-lm declares nothing
    tokenizer: Any
    draft_model: Any
    model_key: Any

    def __init__(self, options: ModelOptions, engine: EngineOptions) -> None:
        super().__init__(_mlx_lm_arguments(options, engine))
        self.options = options
        self.report: AttachReport | None = None
        self.draft_report: AttachReport | None = None
        self.on_loaded: Callable[[], None] = lambda: None
        self.speculation_tokens: int | None = None

    def load_default(self) -> None:
        """Load and attach; mlx-lm asks for it first, in the thread that generates.

        Raises:
            KvstowError: If something cannot be loaded, or not be attached.
            UnsupportedModel: If the draft model has another tokenizer.
        """
        options = self.options
        model, tokenizer = load(options.model, dtype=options.dtype)
        if options.adapter_path is not None:
            _add_adapters(model, options.adapter_path)
        self.report = attach(model, options.stored, fetch=options.fetch)
        if options.chat_template is not None:
            tokenizer.chat_template = options.chat_template
            tokenizer.has_chat_template = True
            _check_template(tokenizer)
        if options.draft_model is not None:
            draft, its_tokenizer = load(options.draft_model, dtype=options.dtype)
            if why := disagreement(tokenizer.get_vocab(), its_tokenizer.get_vocab()):
                raise UnsupportedModel(
                    f"the draft model has another tokenizer than the model: {why}"
                )
            scheme = Policy.of(options.stored).default  # rules are about the other model's layers
            self.draft_report = attach(draft, scheme, fetch=fetch_of(scheme, options.fetch))
            self.draft_model = draft
            self.speculation_tokens = trimmable_tokens(model, draft)
        self.model, self.tokenizer = model, tokenizer
        self.model_key = (options.model, options.adapter_path, options.draft_model)
        caches = make_prompt_cache(model)
        self.is_batchable = self.draft_model is None and all(hasattr(c, "merge") for c in caches)
        self.on_loaded()

    def load(self, *_: Any) -> tuple[Any, Any]:
        """The model and its tokenizer, whatever is asked: requests are checked before."""
        return self.model, self.tokenizer

    @contextmanager
    def answering(self, n_tokens: int) -> Iterator[None]:
        """For the length of the block, there is a draft model only if `n_tokens` may be drafted.

        What is kept of a prompt then is kept apart, since it holds nothing of the draft model.
        """
        draft, key, limit = self.draft_model, self.model_key, self.speculation_tokens
        if draft is not None and limit is not None and n_tokens > limit:
            self.draft_model, self.model_key = None, (key, "without a draft model")
        try:
            yield
        finally:
            self.draft_model, self.model_key = draft, key

    def fresh_caches(self) -> list[Any] | None:
        """Caches of both models, where there is a draft model; mlx-lm joins them wrongly."""
        if self.draft_model is None:
            return None
        return CachePair(make_prompt_cache(self.model), make_prompt_cache(self.draft_model))

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model, `answering` without it or not. From any thread."""
        return self.draft_report is not None

    @cached_property
    def longest_token(self) -> int:
        """Most characters of a text that one token stands for, as vocabularies write them."""
        return max(map(len, self.tokenizer.get_vocab()))

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are that the model and the tokenizer know."""
        known = len(self.tokenizer)
        return int(min(known, getattr(text_args(self.model), "vocab_size", None) or known))


def _add_adapters(model: Any, path: str) -> None:
    try:
        load_adapters(model, path)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"mlx-lm cannot load the adapter {path}: {error}") from error
    model.eval()


def _check_template(tokenizer: Any) -> None:
    """Refuse what is no template; what one cannot say depends on the request.

    Raises:
        ModelFileError: If it is not Jinja.
    """
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ModelFileError(
            f"the chat template is not Jinja: {error.message}, in line {error.lineno}"
        ) from error
    except Exception:  # whatever a template raises, and this turn may be none that it takes
        return


def _mlx_lm_arguments(options: ModelOptions, engine: EngineOptions) -> Namespace:
    """What mlx-lm's engine reads of its own command line."""
    return Namespace(
        adapter_path=options.adapter_path,
        chat_template=None,
        chat_template_args={},
        decode_concurrency=engine.decode_concurrency,
        draft_model=options.draft_model,
        kv_bits=None,  # the scheme is attached instead
        kv_group_size=64,
        model=options.model,
        pipeline=False,
        prefill_step_size=engine.prefill_step_size,
        prompt_cache_bytes=None,  # see `kvstow.serve.prompt_cache`
        prompt_concurrency=engine.prompt_concurrency,
        quantized_kv_start=0,
        trust_remote_code=False,
        use_default_chat_template=False,
    )
