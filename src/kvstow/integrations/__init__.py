"""Adapters to the frameworks that own the model.

The public functions find the adapter by the type of the model, and import
nothing that the caller has not.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from kvstow.errors import KvstowWarning, UnsupportedModel
from kvstow.integrations.report import AttachReport, Fetch, KVUsage
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Scheme

__all__ = ["AttachReport", "KVUsage", "attach", "attached", "detach", "usage"]

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
            stored in steps of few tokens, on an NVIDIA GPU, and is deferred in others;
            ``"auto"`` takes fused where it can, else deferred, else eager. A kernel is compared
            with the definition before it first serves on a machine.

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
