"""The options of ``kvstow serve``, by what they are about."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvstow.capacity import PREFILL_TOKENS
from kvstow.cli import params
from kvstow.serve.options import Defaults, EngineOptions, Limits

LIMITS, ENGINE, DEFAULTS = Limits(), EngineOptions(), Defaults()
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


def json_object(value: str | dict[str, Any]) -> dict[str, Any]:
    """Read ``{"enable_thinking": false}``."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object")
    return found


def origin(value: str) -> str:
    """Read ``https://chat.example``, as a browser writes it, or ``*``."""
    if value != "*" and not _ORIGIN.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is not an origin; expected * or scheme://host with or without :port, in "
            "lower case and with nothing behind, for example http://localhost:3000"
        )
    return value


class Adapter(click.Path):
    """A directory with an adapter of mlx-lm."""

    name = "directory"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Look whether it is one."""
        path = Path(str(super().convert(value, param, ctx)))
        lacks = [
            x for x in ("adapter_config.json", "adapters.safetensors") if not (path / x).exists()
        ]
        if lacks:
            self.fail(f"{path} holds no adapter: it lacks {' and '.join(lacks)}", param, ctx)
        return str(path)


class Text(click.Path):
    """The text of a file."""

    name = "file"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Read it."""
        path = Path(str(super().convert(value, param, ctx)))
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeError) as error:
            self.fail(f"{path} is no text in UTF-8: {error}", param, ctx)


def _grouped(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _count(name: str, default: int, text: str) -> Callable[[Any], Any]:
    return click.option(
        name, type=click.IntRange(min=1), default=default, show_default=True, help=text
    )


def _seconds(name: str, default: float, text: str) -> Callable[[Any], Any]:
    return click.option(
        name, type=params.Finite(min=0.1), default=default, show_default=True, help=text
    )


where = _grouped(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8080,
        show_default=True,
        help="Port to listen on; 0 is any that is free.",
    ),
    click.option(
        "--api-key",
        envvar="KVSTOW_API_KEY",
        help="What clients send as Authorization: Bearer. Other users of the machine can read a "
        "command line, so better the variable KVSTOW_API_KEY.",
    ),
    click.option(
        "--allowed-host",
        "allowed_hosts",
        multiple=True,
        help="A name that the server may be called by; may be repeated.  "
        "[default: any with an API key or beyond this machine, else localhost]",
    ),
    click.option(
        "--allowed-origin",
        "allowed_origins",
        type=origin,
        multiple=True,
        metavar="ORIGIN",
        help="A web page's origin that may ask (CORS), or *; may be repeated.  [default: none]",
    ),
    click.option("--served-name", help="What clients call the model.  [default: as --model]"),
)
limits = _grouped(
    click.option(
        "--kv-budget",
        "kv_budget_bytes",
        type=params.size,
        help="Memory for all KV caches, such as 8GB.  "
        "[default: what 80% of the free memory leaves beside the weights]",
    ),
    click.option(
        "--max-queue",
        type=click.IntRange(min=0),
        default=LIMITS.max_queue,
        show_default=True,
        help="Most requests that wait for memory or for their turn.",
    ),
    _seconds(
        "--queue-timeout", LIMITS.queue_timeout_s, "Longest time that a request waits, in seconds."
    ),
    _seconds(
        "--request-timeout",
        LIMITS.request_timeout_s,
        "Longest time that a request takes, in seconds.",
    ),
    _seconds("--drain-timeout", 30, "Time for running requests after SIGTERM, in seconds."),
    click.option(
        "--max-body-bytes",
        type=params.size,
        default=f"{LIMITS.max_body_bytes >> 20}MiB",
        show_default=True,
        help="Largest body of a request.",
    ),
)
engine = _grouped(
    _count(
        "--decode-concurrency", ENGINE.decode_concurrency, "Most requests that decode together."
    ),
    _count(
        "--prompt-concurrency", ENGINE.prompt_concurrency, "Most prompts that are read together."
    ),
    click.option(
        "--prefill-step-size",
        type=click.IntRange(1, PREFILL_TOKENS),
        default=ENGINE.prefill_step_size,
        show_default=True,
        help="Tokens of a prompt that are read at a time.",
    ),
    _count(
        "--prompt-cache-size",
        ENGINE.prompt_cache_size,
        "Most prompts whose caches are kept for later ones.",
    ),
)
defaults = _grouped(
    _count(
        "--max-tokens",
        DEFAULTS.max_tokens,
        "Most tokens of an answer, where a request does not say.",
    ),
    click.option(
        "--temp",
        type=params.Finite(0, 2),
        default=DEFAULTS.temp,
        show_default=True,
        help="Temperature where a request does not say; 0 takes the most likely token.",
    ),
    click.option(
        "--top-p",
        type=params.Finite(0, 1),
        default=DEFAULTS.top_p,
        show_default=True,
        help="The same.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=0),
        default=DEFAULTS.top_k,
        show_default=True,
        help="The same.",
    ),
    click.option(
        "--min-p",
        type=params.Finite(0, 1),
        default=DEFAULTS.min_p,
        show_default=True,
        help="The same.",
    ),
    click.option(
        "--chat-template-args",
        type=json_object,
        default="{}",
        show_default=True,
        help="Arguments of the chat template, as a JSON object.",
    ),
    click.option(
        "--chat-template-file",
        "chat_template",
        type=Text(exists=True, dir_okay=False),
        help="A Jinja file in the place of the model's own chat template.",
    ),
)
