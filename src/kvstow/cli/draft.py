"""The draft model of a command: its options, its refusals before weights load, and its load."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from kvstow.cli.progress import progress_bar
from kvstow.cli.refuse import refuse
from kvstow.errors import KvstowError, UnsupportedModel
from kvstow.integrations import attached
from kvstow.integrations.report import Fetch, fetch_of
from kvstow.models import ModelConfig, load, read_config, skeleton
from kvstow.models.vocabulary import read_vocabulary
from kvstow.require import require
from kvstow.scheme import Scheme

DEFAULT_DRAFT_TOKENS = 3  # mlx-lm's own programs have this too
How = tuple[Scheme, Fetch, str | None]  # scheme, fetch and dtype, which both models share


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--draft-model`` and ``--num-draft-tokens``."""
    number = click.option(
        "--num-draft-tokens",
        type=click.IntRange(1, 64),
        help=f"Tokens that the draft model proposes at a time.  [default: {DEFAULT_DRAFT_TOKENS}]",
    )
    model = click.option(
        "--draft-model",
        help="A small model with the same tokenizer that proposes tokens for --model to verify "
        "(speculative decoding). Its KV cache is stored as --kv-quant says too.",
    )
    return model(number(command))


def check_options(draft_model: str | None, num_draft_tokens: int | None, n_processes: int) -> None:
    """Refuse a number of draft tokens that no model would draft, and what was never tried.

    Raises:
        click.UsageError: If there is no draft model beside the number, or one beside several
            processes.
    """
    if draft_model is not None and n_processes > 1:
        raise click.UsageError(
            f"--draft-model works in one process, and {n_processes} were started"
        )
    if draft_model is None and num_draft_tokens is not None:
        raise click.UsageError("--num-draft-tokens needs --draft-model, got none")


def refuse_draft(model: ModelConfig, draft_model: str | None, how: How) -> None:
    """Refuse two models that cannot decode speculatively, from their configs.

    Args:
        model: What is known of the model.
        draft_model: The draft model's name; None where none is asked.
        how: Of both.

    Raises:
        ModelNotFound: As `read_config`.
        ModelFileError: As `read_config` and `skeleton`.
        UnsupportedModel: If `attach` refuses the draft model, a cache cannot be trimmed, or
            their vocabularies differ.
    """
    if draft_model is None:
        return
    if why := why_no_speculation(model, draft_model, how):
        raise UnsupportedModel(why)


def why_no_speculation(model: ModelConfig, draft_model: str, how: How) -> str:
    """Why the two models' caches cannot forget rejected tokens; empty if they can.

    Args:
        model: What is known of the model.
        draft_model: The draft model's name.
        how: Of both.

    Raises:
        ModelNotFound: As `read_config`.
        ModelFileError: As `read_config` and `skeleton`.
        UnsupportedModel: If `attach` refuses the draft model, or their vocabularies differ.
    """
    scheme, fetch, dtype = how
    try:
        draft = read_config(draft_model)
        refuse(draft.config, [scheme], fetch, dtype)
    except KvstowError as error:
        raise type(error)(f"the draft model: {error}") from error
    tokens, draft_tokens = map(read_vocabulary, (model.source, draft.source))
    if tokens is not None and draft_tokens is not None:
        _check_vocabularies(tokens, draft_tokens)
    widths = _vocab_size(model), _vocab_size(draft)
    if widths[1] > widths[0] > 0:
        raise UnsupportedModel(
            f"the draft model may propose any of {widths[1]} tokens, "
            f"and the model has embeddings of {widths[0]}"
        )
    speculative = require("kvstow.integrations.mlx_lm.speculative")
    for name, config in (("model", model), ("draft model", draft)):
        unloaded = skeleton(config.config, dtype)
        with attached(unloaded, scheme, fetch=fetch_of(scheme, fetch)):
            if why := speculative.why_untrimmable(unloaded):
                return f"the {name} cannot decode speculatively: {why}"
    return ""


@contextmanager
def loaded_draft(
    draft_model: str | None, num_draft_tokens: int | None, tokenizer: Any, how: How
) -> Iterator[Any]:
    """The draft model, loaded and attached for the length of the block; None where none is asked.

    Args:
        draft_model: Its name.
        num_draft_tokens: How many tokens it proposes at a time.
        tokenizer: The model's.
        how: How both are run.

    Raises:
        ModelFileError: If what is there cannot be loaded.
        UnsupportedModel: If the loaded tokenizers differ: not every kind can be read before.
    """
    if draft_model is None:
        yield None
        return
    scheme, fetch, dtype = how
    with progress_bar("loading the draft model") as step:
        loaded, own_tokenizer = load(draft_model, dtype=dtype, progress=step)
    _check_vocabularies(tokenizer.get_vocab(), own_tokenizer.get_vocab())
    with attached(loaded, scheme, fetch=fetch_of(scheme, fetch)) as report:
        number = num_draft_tokens or DEFAULT_DRAFT_TOKENS
        context = read_config(draft_model).context_length
        yield require("kvstow.session").Draft(loaded, report, number, context)


def _check_vocabularies(model: Mapping[str, int], draft: Mapping[str, int]) -> None:
    speculative = require("kvstow.integrations.mlx_lm.speculative")
    if why := speculative.disagreement(model, draft):
        raise UnsupportedModel(f"the draft model has another tokenizer than the model: {why}")


def _vocab_size(config: ModelConfig) -> int:
    inner = config.config.get("text_config")
    parts = (config.config, inner) if isinstance(inner, Mapping) else (config.config,)
    sizes = [part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)]
    return int(sizes[-1]) if sizes else 0
