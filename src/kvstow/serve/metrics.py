"""The statistics for Prometheus: the same value as the JSON, under Prometheus' names.

Nothing is counted here. Every label has few values, all of them the program's own words.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstow.serve.stats import STATES, Latency, Stats

Labelled = Iterable[tuple[str, float]]


class Metrics(Collector):
    """Answers scrapes with what `read` says then.

    Args:
        read: The statistics now.
    """

    def __init__(self, read: Callable[[], Stats]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """The body in a format that `accept` names, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        """Nothing is read to find out names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
        stats = self._read()
        for family in (_about, _memory, _work, _tokens, _prefixes, _requests):
            yield from family(stats)


def _about(stats: Stats) -> Iterator[Metric]:
    said = {"model": stats.model, "scheme": stats.scheme}
    yield InfoMetricFamily(
        "kvstow",
        "What is served, and by what.",
        said | {k: v or "" for k, v in stats.versions.items()},
    )
    yield _gauge("uptime_seconds", "Since the server started.", stats.uptime_s)
    yield _gauges(
        "state",
        "1 for the state that the server is in.",
        "state",
        ((state, float(state == stats.state)) for state in STATES),
    )
    layers = GaugeMetricFamily(
        "kvstow_layers", "Caches of the model.", labels=("kind", "scheme", "path")
    )
    groups: dict[tuple[str, str, str], int] = {}
    for layer in stats.layers:
        group = layer.kind, layer.scheme, layer.path
        groups[group] = groups.get(group, 0) + 1
    for group, n in groups.items():
        layers.add_metric(group, n)
    yield layers
    yield _gauges(
        "kernel_check_passed",
        "Whether a fused kernel passed its check here.",
        "kernel",
        ((kernel.kernel, float(kernel.passed)) for kernel in stats.kernels),
    )
    by_kernel = stats.attention_calls.get("kernel", 0)
    others = sum(stats.attention_calls.values()) - by_kernel
    yield _counters(
        "attention_calls",
        "Calls of attention meant for a kernel, by what took them.",
        "by",
        (("kernel", by_kernel), ("deferred", others)),
    )


def _memory(stats: Stats) -> Iterator[Metric]:
    memory, budget = stats.memory, stats.budget
    places = (("in_flight", memory.in_flight), ("prefixes", memory.prefixes))
    for name, text, attribute in (
        ("kv_cache_bytes", "Allocated for keys and values.", "kv_bytes"),
        ("kv_cache_bf16_bytes", "What two-byte caches would take.", "kv_bytes_bf16"),
        ("kv_cache_tokens", "Tokens held.", "tokens"),
        ("kv_cache_sequences", "Texts held.", "sequences"),
    ):
        yield _gauges(
            name, text, "place", ((place, getattr(held, attribute)) for place, held in places)
        )
    yield _gauge(
        "nonfinite_groups", "Groups of kept numbers that are NaN or inf.", memory.nonfinite_groups
    )
    for name, text, n_bytes in (
        ("kv_budget_bytes", "What all caches may take.", budget.total_bytes),
        ("kv_reserved_bytes", "What admitted requests may come to take.", budget.reserved_bytes),
    ):
        yield _gauge(name, text, n_bytes)
    yield _gauge("mlx_active_bytes", "Allocated by mlx, weights included.", memory.mlx_active_bytes)
    yield _gauge("mlx_peak_bytes", "The most that mlx had allocated.", memory.mlx_peak_bytes)
    yield _gauge("mlx_cache_bytes", "Kept by mlx for later use.", memory.mlx_cache_bytes)


def _work(stats: Stats) -> Iterator[Metric]:
    work = stats.work
    yield _gauges(
        "requests_running",
        "Requests that the model works on.",
        "stage",
        (
            ("reading_prompts", work.reading_prompts),
            ("decoding", work.decoding),
            ("alone", work.alone),
        ),
    )
    yield _gauge("requests_waiting", "Requests that wait for memory or their turn.", work.waiting)


def _tokens(stats: Stats) -> Iterator[Metric]:
    for name, text, throughput in (
        ("prompt", "Tokens of prompts that were read.", stats.prompt),
        ("decode", "Tokens that were generated.", stats.decode),
    ):
        yield CounterMetricFamily(f"kvstow_{name}_tokens", text, throughput.tokens)
        yield CounterMetricFamily(
            f"kvstow_{name}_seconds", "Seconds of the model's work on them.", throughput.busy_s
        )


def _prefixes(stats: Stats) -> Iterator[Metric]:
    found = stats.prefixes
    yield _counters(
        "prefix_lookups",
        "Requests by where the start of their prompt was found.",
        "found",
        (
            ("memory", found.memory.requests),
            ("disk", found.disk.requests),
            ("nowhere", found.missed_requests),
        ),
    )
    yield _counters(
        "prefix_tokens",
        "Tokens that need not be read.",
        "found",
        (("memory", found.memory.tokens), ("disk", found.disk.tokens)),
    )
    yield _counters(
        "prefix_evictions",
        "Entries that had to leave.",
        "place",
        (("memory", found.memory_evictions), ("disk", found.disk_evictions)),
    )
    for name, text, n in (
        ("writes", "Prefixes written to disk.", found.disk_writes),
        ("written_bytes", "Their bytes.", found.disk_written_bytes),
        ("dropped", "Prefixes not written, since the writer was behind.", found.disk_dropped),
        ("errors", "Prefixes that could not be written, read or believed.", found.disk_errors),
    ):
        yield CounterMetricFamily(f"kvstow_prefix_disk_{name}", text, n)


def _requests(stats: Stats) -> Iterator[Metric]:
    requests = stats.requests
    yield _counters("requests", "Requests by how they ended.", "outcome", requests.outcomes.items())
    yield _counters(
        "requests_refused", "Requests that were not let in.", "reason", requests.refused.items()
    )
    yield _histogram(
        "time_to_first_token_seconds", "From arrival to the first token.", requests.first_token
    )
    yield _histogram("request_duration_seconds", "From arrival to the end.", requests.duration)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvstow_{name}", text, value)


def _gauges(name: str, text: str, label: str, values: Labelled) -> Metric:
    family = GaugeMetricFamily(f"kvstow_{name}", text, labels=(label,))
    for said, value in values:
        family.add_metric((said,), value)
    return family


def _counters(name: str, text: str, label: str, values: Labelled) -> Metric:
    family = CounterMetricFamily(f"kvstow_{name}", text, labels=(label,))
    for said, value in values:
        family.add_metric((said,), value)
    return family


def _histogram(name: str, text: str, latency: Latency) -> Metric:
    bounds = [*map(str, latency.bounds_s), "+Inf"]
    buckets = list(zip(bounds, latency.at_most, strict=True))
    return HistogramMetricFamily(f"kvstow_{name}", text, buckets=buckets, sum_value=latency.sum_s)
