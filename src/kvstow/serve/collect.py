"""The statistics of a service, put together from those who count. From any thread."""

import platform
from dataclasses import replace
from functools import cache
from importlib import metadata

from kvstow.attention import fused, selfcheck
from kvstow.policy import Policy
from kvstow.serve.service import Service
from kvstow.serve.stats import Budget, Hits, KernelStats, Prefixes, Stats, Work, layers_of


def read_stats(service: Service) -> Stats:
    """Everything now; what is held as it was last seen."""
    engine, tally, model = service.engine, service.tally, service.model
    seen = engine.watch.seen
    prompt, decode, requests = tally.read()
    return Stats(
        state=service.state,
        uptime_s=tally.uptime_s,
        measured_s_ago=None if seen.at is None else tally.clock() - seen.at,
        versions=_versions(),
        model=model.served_name,
        context_tokens=model.context_tokens,
        scheme="policy" if isinstance(model.stored, Policy) else str(model.stored),
        layers=layers_of(engine.model_provider.report),
        kernels=_kernels(),
        attention_calls=dict(fused.counts()),
        memory=seen.memory,
        budget=Budget(service.gateway.budget_bytes, service.gateway.reserved_bytes),
        work=_work(service, seen.work),
        prompt=prompt,
        decode=decode,
        prefixes=_prefixes(service),
        requests=requests,
    )


@cache
def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("kvstow", "mlx", "mlx-lm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # on the path without being installed
            found[package] = None
    return found


def _kernels() -> tuple[KernelStats, ...]:
    by_name = {found.kernel or "none": found for found in selfcheck.outcomes()}
    return tuple(KernelStats(name, found.passed, found.why) for name, found in by_name.items())


def _work(service: Service, seen: Work) -> Work:
    """With those that wait for memory, and those that wait for the engine."""
    in_engine = max(0, service.gateway.n_running - seen.running)
    return replace(seen, waiting=service.gateway.n_waiting + in_engine)


def _prefixes(service: Service) -> Prefixes:
    watch = service.engine.watch
    counted = watch.prefixes
    return Prefixes(
        memory=Hits(counted.memory_hits, counted.memory_tokens),
        disk=Hits(counted.disk_hits, counted.disk_tokens),
        missed_requests=counted.misses,
        memory_evictions=watch.seen.evictions,
        disk_evictions=counted.evictions,
        disk_writes=counted.writes,
        disk_written_bytes=counted.written_bytes,
        disk_dropped=counted.dropped,
        disk_errors=counted.errors,
    )
