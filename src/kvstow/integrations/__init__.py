"""Adapters to the frameworks that own the model.

The public functions find the adapter by the type of the model, and import
nothing that the caller has not.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from kvstow.errors import KvstowWarning, UnsupportedModel
from kvstow.integrations.report import AttachReport, Fetch, KVUsage
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Scheme
from kvstow.snapshot import Snapshot

__all__ = [
    "AttachReport",
    "KVUsage",
    "attach",
    "attached",
    "detach",
    "load_cache",
    "save_cache",
    "usage",
]

_HOSTS = {"mlx.nn": "mlx_lm"}  # package of the model's base class: adapter


def attach(
    model: Any, scheme: str | Scheme | Policy | None, *, fetch: Fetch = "auto"
) -> AttachReport:
    """Make `model` create caches under `scheme` for its attention layers.

    Sets ``model.make_cache``, the hook that mlx-lm itself asks, on this one
    instance: generate, chat and every other user of `make_prompt_cache` follow. A
    model that is attached already changes its scheme. ``None`` or ``"off"`` detaches.

    Under a scheme with fewer than 8 bits for keys the model runs once on some tokens, and
    a `KvstowWarning` says if its keys are too hard for them (see `mlx_lm.hardness`).

    Args:
        model: An mlx-lm model.
        scheme: See `Scheme`; or a `Policy`, where layers take different ones.
        fetch: ``"eager"`` decodes the window for the host's attention; ``"deferred"``
            un-rotates the output instead of every value, and is refused where the
            model's own code needs real arrays; ``"fused"`` lets kernels attend to what is
            stored, on a GPU, in steps of few tokens and on NVIDIA's in prompts too, and is
            deferred in others; ``"auto"`` takes fused on an NVIDIA GPU where it can, else
            deferred, else eager. A kernel is compared with the definition before it first
            serves on a machine.

    Returns:
        Per layer, what is quantised and what stays and why.

    Raises:
        SchemeError: If `scheme` is not in the grammar.
        PolicyError: If it is a policy about layers that the model does not have.
        ValueError: If `fetch` is not one of the four.
        UnsupportedModel: If the scheme cannot store this model's keys and values,
            or would apply to no layer, or the model or the machine cannot do `fetch`. Nothing
            has been changed then.
    """
    return _attach(model, scheme, fetch, stacklevel=3)


def detach(model: Any) -> None:
    """Undo `attach`: new caches are the host's own. A model not attached stays as it is.

    Raises:
        UnsupportedModel: If `model` belongs to no known framework.
    """
    _adapter(model).detach(model)


@contextmanager
def attached(
    model: Any, scheme: str | Scheme | Policy | None, *, fetch: Fetch = "auto"
) -> Iterator[AttachReport]:
    """`attach` for the length of a ``with`` block; an earlier attachment comes back after it.

    It warns as `attach` does.

    Raises:
        SchemeError: As `attach`.
        UnsupportedModel: As `attach`.
    """
    adapter = _adapter(model)
    before = adapter.attachment(model)
    report = _attach(model, scheme, fetch, stacklevel=4)
    try:
        yield report
    finally:
        adapter.restore(model, before)


def usage(cache: list[Any]) -> KVUsage:
    """Bytes and tokens of a prompt cache, whoever made it.

    Args:
        cache: As ``mlx_lm.models.cache.make_prompt_cache(model)`` returns it.
    """
    measured: KVUsage = require(f"{__name__}.mlx_lm").usage(cache)
    return measured


def save_cache(
    path: str | Path, cache: list[Any], tokens: Sequence[int], *, model: Any, tokenizer: Any
) -> int:
    """Save a prompt cache in a file, at once or not at all; returns the bytes of the file.

    The tokens are in the file too, so only its owner may read it. The model should be attached
    as it was when the cache was filled.

    Args:
        path: Where; a file that is there is replaced.
        cache: The model's, of one sequence.
        tokens: All that were appended to it; another number than its own is refused.
        model: The model that filled it.
        tokenizer: Of the tokens.

    Raises:
        SnapshotError: If the cache cannot be saved, or the file not written.
        UnsupportedModel: If `model` belongs to no known framework.
    """
    snapshots = require(f"{_adapter(model).__name__}.snapshots")
    saved: int = snapshots.save(Path(path), cache, tokens, model=model, tokenizer=tokenizer)
    return saved


def load_cache(path: str | Path, *, model: Any, tokenizer: Any) -> tuple[list[Any], list[int]]:
    """Load a prompt cache that `save_cache` or ``kvstow cache save`` wrote, and its tokens.

    Args:
        path: The file.
        model: The model that filled the cache, attached to the scheme of the file.
        tokenizer: Of the model.

    Raises:
        SnapshotError: One of its own kinds for each cause: another model, scheme or tokenizer,
            a damaged file.
        UnsupportedModel: If `model` belongs to no known framework.
    """
    snapshots = require(f"{_adapter(model).__name__}.snapshots")
    with Snapshot(Path(path)) as snapshot:
        return snapshots.load(snapshot, model=model, tokenizer=tokenizer), snapshot.tokens()


def _attach(model: Any, scheme: Any, fetch: Fetch, *, stacklevel: int) -> AttachReport:
    policy = Policy.of(scheme)
    if fetch not in get_args(Fetch):
        allowed = ", ".join(map(repr, get_args(Fetch)))
        raise ValueError(f"fetch must be one of {allowed}, got {fetch!r}")
    adapter = _adapter(model)
    before = adapter.attachment(model)
    report: AttachReport = adapter.attach(model, policy, fetch)
    try:
        for warning in report.warnings:
            warnings.warn(warning, KvstowWarning, stacklevel=stacklevel)
    except KvstowWarning:  # a filter makes it an error
        adapter.restore(model, before)
        raise
    return report


def _adapter(model: Any) -> Any:
    for base in type(model).__mro__:
        package = ".".join(base.__module__.split(".")[:2])
        if package in _HOSTS:
            return require(f"{__name__}.{_HOSTS[package]}")
    raise UnsupportedModel(f"expected an mlx-lm model, got {type(model).__name__}")
