"""``kvstow serve``: OpenAI's HTTP interface over one model and packed caches."""

import os
import warnings
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstow.blas import use_fast_blas
from kvstow.cli import draft as drafting
from kvstow.cli import params, prefix_cache
from kvstow.cli import serve_options as options_of
from kvstow.cli.console import say
from kvstow.cli.fit import size_text
from kvstow.cli.refuse import check_fetch, refuse
from kvstow.errors import KvstowError, KvstowWarning, UnsupportedModel
from kvstow.integrations.report import Fetch
from kvstow.models import ModelConfig, default_dtype, read_config, skeleton
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Scheme
from kvstow.serve.options import Defaults, EngineOptions, Limits, ModelOptions, PrefixFiles

if TYPE_CHECKING:
    from kvstow.serve.server import Setup
    from kvstow.serve.service import Service

LOCAL = ("localhost", "127.0.0.1", "::1")
Options = dict[str, Any]
How = tuple[Scheme | Policy, Fetch, str | None]  # what is stored, fetch and dtype


@click.command()
@params.model
@params.kv_quant
@params.kv_policy
@params.fetch
@params.dtype
@click.option(
    "--adapter-path", type=options_of.Adapter(exists=True), help="A directory with an adapter."
)
@drafting.options
@options_of.where
@options_of.limits
@options_of.engine
@prefix_cache.options
@options_of.defaults
def serve(
    *,
    model: str,
    kv_quant: Scheme,
    kv_policy: Policy | None,
    fetch: Fetch,
    host: str,
    port: int,
    drain_timeout: float,
    **options: Any,
) -> None:
    """Answer over HTTP, as OpenAI's interface does.

    One model, with continuous batching, over packed KV caches. Every request is let in, queued
    or refused before anything is computed, by the bytes that its caches take. Ends on SIGTERM
    or Ctrl-C, after the requests that run.
    """
    stored = params.stored_under(kv_quant, kv_policy)
    check_fetch(fetch, [stored])
    drafting.check_options(options["draft_model"], options["num_draft_tokens"], 1)
    _check_key(host, options)
    options["kept"].check_options(resume=None, draft=options["draft_model"], n_processes=1)
    for package in ("prometheus_client", "pydantic", "starlette", "uvicorn"):
        require(package, extra="serve")
    config = read_config(model)
    how = (stored, fetch, options["dtype"] or default_dtype(config.source))
    refuse(config.config, [stored], fetch, how[2])
    options["draft_model"] = _usable_draft(config, options["draft_model"], how)
    server = require("kvstow.serve.server")
    listener = server.listen(host, port)
    with listener:
        say(use_fast_blas().notice)
        setup = _setup(config, how, {"model": model, "host": host, **options})
        address = listener.getsockname()[:2]
        running = server.Server(
            setup,
            drain_timeout_s=drain_timeout,
            on_ready=lambda service: _announce(service, setup, address),
            on_leave=lambda service: _say_what_is_waited_for(service, drain_timeout),
        )
        has_ended = running.run(listener)
    if not has_ended:
        os._exit(0)  # Python itself would wait for the model
    if (failure := running.service.engine.failure) is not None:
        raise KvstowError(f"the thread that generates died: {failure!r}")


def _check_key(host: str, options: Options) -> None:
    if options["api_key"] is not None and not options["api_key"].strip():
        raise click.UsageError("--api-key is empty")
    if options["api_key"] is None and not _is_local(host):
        warnings.warn(
            f"--host {host} lets other machines ask, and there is no --api-key",
            KvstowWarning,
            stacklevel=2,
        )


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _usable_draft(config: ModelConfig, draft_model: str | None, how: How) -> str | None:
    """The draft model, if speculation can be done at all."""
    if draft_model is None:
        return None
    scheme, fetch, dtype = how
    of_draft = Policy.of(scheme).default
    if why := drafting.why_no_speculation(config, draft_model, (of_draft, fetch, dtype)):
        warnings.warn(
            f"--draft-model is not used, and requests are decoded without speculation: {why}",
            KvstowWarning,
            stacklevel=2,
        )
        return None
    return draft_model


def _setup(config: ModelConfig, how: How, options: Options) -> "Setup":
    server, budget = require("kvstow.serve.server"), require("kvstow.serve.budget")
    stored, fetch, dtype = how
    kept: prefix_cache.PrefixCache = options["kept"]
    models = [_sized(config, how)]
    contexts = [config.context_length]
    if (draft := options["draft_model"]) is not None:
        draft_config = read_config(draft)
        models.append(_sized(draft_config, (Policy.of(stored).default, fetch, dtype)))
        contexts.append(draft_config.context_length)
    caches = tuple(of for of, _ in models)
    budget_bytes = options["kv_budget_bytes"] or budget.default_budget(
        caches[0], sum(n for _, n in models), budget.usable_memory()
    )
    setup: Setup = server.Setup(
        model=ModelOptions(
            options["model"],
            stored,
            options["served_name"] or _name(options["model"]),
            min((n for n in contexts if n is not None), default=None),
            fetch=fetch,
            dtype=options["dtype"],
            adapter_path=options["adapter_path"],
            chat_template=options["chat_template"],
            draft_model=draft,
            num_draft_tokens=options["num_draft_tokens"] or drafting.DEFAULT_DRAFT_TOKENS,
        ),
        caches=caches,
        kv_budget_bytes=budget_bytes,
        engine=EngineOptions(**_taken(options, EngineOptions)),
        defaults=Defaults(**_taken(options, Defaults)),
        limits=Limits(
            max_queue=options["max_queue"],
            queue_timeout_s=options["queue_timeout"],
            request_timeout_s=options["request_timeout"],
            max_body_bytes=options["max_body_bytes"],
            api_key=options["api_key"],
            allowed_hosts=_hosts(options),
            allowed_origins=options["allowed_origins"],
        ),
        prefix_files=None
        if kept.directory is None
        else PrefixFiles(kept.directory, kept.max_bytes),
    )
    least = setup.cache_bytes(1)
    if budget_bytes < least:
        raise UnsupportedModel(
            f"the shortest request takes {size_text(least)} of KV cache, and the budget is "
            f"{size_text(max(budget_bytes, 0))}: see --kv-budget"
        )
    return setup


def _sized(config: ModelConfig, how: How) -> tuple[Any, int]:
    """What a request stores of a model, and the bytes of its weights."""
    scheme, _, dtype = how
    bare = skeleton(config.config, dtype)
    shape = require("kvstow.integrations.mlx_lm").read_shape(bare, config.context_length)
    n_bytes = config.weight_bytes or 0
    if config.n_weights is not None:
        n_bytes = config.n_weights * shape.dtype_bytes
    return require("kvstow.serve.budget").Stored(shape, scheme), n_bytes


def _taken(options: Options, kind: Any) -> Options:
    return {name: options[name] for name in kind.__dataclass_fields__}


def _name(model: str) -> str:
    """What a model is called: a file or a directory by its last name."""
    path = Path(model).expanduser()
    return path.name if path.exists() else model


def _hosts(options: Options) -> tuple[str, ...]:
    if options["allowed_hosts"]:
        return (*map(str.lower, options["allowed_hosts"]), *LOCAL)
    if options["api_key"] is None and _is_local(options["host"]):
        return (*LOCAL, options["host"].lower())
    return ()


def _say_what_is_waited_for(service: "Service", drain_timeout_s: float) -> None:
    n = service.gateway.n_running + service.gateway.n_waiting
    if n:
        noun = "request" if n == 1 else "requests"
        say(f"ending after {n} {noun}, within {drain_timeout_s:g} s; again to end at once")


def _announce(service: "Service", setup: "Setup", address: tuple[str, int]) -> None:
    host, port = address
    shown = f"[{host}]" if ":" in host else host
    provider = service.engine.model_provider
    if not provider.is_batchable:
        why = "a draft model" if provider.draft_model is not None else f"{setup.model.stored}"
        warnings.warn(
            f"{why} cannot be batched: one request is answered at a time",
            KvstowWarning,
            stacklevel=2,
        )
    if (limit := provider.speculation_tokens) is not None:
        warnings.warn(
            f"requests of more than {limit} tokens, prompt and answer, are decoded without "
            "speculation: they fill a sliding window, which cannot forget rejected tokens",
            KvstowWarning,
            stacklevel=2,
        )
    say(str(provider.report))
    say(
        f"{setup.model.served_name} at http://{shown}:{port}/v1, a page at http://{shown}:{port}/, "
        f"KV budget {size_text(setup.kv_budget_bytes)}"
    )
