"""Everything that the server was told at its start, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstow.capacity import PREFILL_TOKENS
from kvstow.integrations.report import Fetch
from kvstow.policy import Policy
from kvstow.scheme import Scheme


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What is served.

    Attributes:
        model: As `kvstow.models.load` takes it.
        stored: How its keys and values are kept.
        served_name: What clients call it.
        context_tokens: The longest context that its config allows, where it says.
        fetch: How attention reaches packed tokens.
        dtype: Of weights and activations; None: as they are stored.
        adapter_path: A directory with adapter weights of mlx-lm.
        chat_template: The text of one that takes the place of the model's own.
        draft_model: A model that proposes tokens; None for no speculation.
        num_draft_tokens: How many at a time, where the request does not say.
    """

    model: str
    stored: Scheme | Policy
    served_name: str
    context_tokens: int | None = None
    fetch: Fetch = "auto"
    dtype: str | None = None
    adapter_path: str | None = None
    chat_template: str | None = None
    draft_model: str | None = None
    num_draft_tokens: int = 3


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets that does not say otherwise; the names are mlx-lm's."""

    max_tokens: int = 512
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """mlx-lm's engine.

    Attributes:
        decode_concurrency: Most requests that decode together.
        prompt_concurrency: Most prompts that are read together.
        prefill_step_size: Tokens of a prompt that are read at a time.
        prompt_cache_size: Most caches of finished prompts that are kept in memory.
    """

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = PREFILL_TOKENS
    prompt_cache_size: int = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask for.

    Attributes:
        max_queue: Most requests that wait for memory.
        queue_timeout_s: The longest that one waits.
        request_timeout_s: The longest that one may take, its waiting included.
        max_body_bytes: Of a request.
        api_key: What a client has to know; None: nothing.
        allowed_hosts: Names that the server may be called by; empty: any.
        allowed_origins: Of web pages that may ask.
    """

    max_queue: int = 64
    queue_timeout_s: float = 60
    request_timeout_s: float = 600
    max_body_bytes: int = 16 * 2**20
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixFiles:
    """Where prompts outlive the server.

    Attributes:
        directory: See `kvstow.snapshot.prefixes`.
        max_bytes: Of all files in it.
    """

    directory: Path
    max_bytes: int
