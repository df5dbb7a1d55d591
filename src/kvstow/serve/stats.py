"""What the server is doing, as one value: what ``/v1/kvstow/stats`` and ``/metrics`` both show.

Numbers carry their unit in the name; a plain name counts requests, layers or entries. Counts
begin at 0 when the server starts. docs/stats.md says what each field means.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvstow.integrations.report import AttachReport

DOCUMENT_VERSION = 1
State = Literal["loading", "ok", "unavailable"]
Outcome = Literal["answered", "disconnected", "timed_out", "failed"]
STATES: tuple[State, ...] = ("loading", "ok", "unavailable")
OUTCOMES: tuple[Outcome, ...] = ("answered", "disconnected", "timed_out", "failed")


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One cache of the model: its attention, scheme and path, and why it has no better ones."""

    index: int
    kind: str
    scheme: str
    path: str
    reason: str
    path_reason: str


@dataclass(frozen=True, slots=True)
class KernelStats:
    """What became of the check of a fused kernel on this machine."""

    kernel: str
    passed: bool
    why: str


@dataclass(frozen=True, slots=True)
class Held:
    """What the caches in one place hold.

    Attributes:
        sequences: How many texts.
        tokens: Of all of them together.
        kv_bytes: Allocated, unused capacity included.
        kv_bytes_bf16: What two-byte caches of the same capacity would take.
    """

    sequences: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    kv_bytes_bf16: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.kv_bytes + other.kv_bytes,
            self.kv_bytes_bf16 + other.kv_bytes_bf16,
        )

    def __sub__(self, other: "Held") -> "Held":
        return Held(
            self.sequences - other.sequences,
            self.tokens - other.tokens,
            self.kv_bytes - other.kv_bytes,
            self.kv_bytes_bf16 - other.kv_bytes_bf16,
        )

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than bf16; 1.0 where nothing is held."""
        return self.kv_bytes_bf16 / self.kv_bytes if self.kv_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Where keys and values lie, measured in the thread that generates.

    Attributes:
        in_flight: Caches of requests that are being answered.
        prefixes: Caches that are kept for later prompts.
        nonfinite_groups: Groups of numbers in `prefixes` that the model filled with NaN or inf.
        mlx_active_bytes: All that mlx has allocated, weights included.
        mlx_peak_bytes: The most that it ever had.
        mlx_cache_bytes: Freed by the program and not yet given back to the system.
    """

    in_flight: Held = field(default_factory=Held)
    prefixes: Held = field(default_factory=Held)
    nonfinite_groups: int = 0
    mlx_active_bytes: int = 0
    mlx_peak_bytes: int = 0
    mlx_cache_bytes: int = 0

    @property
    def held(self) -> Held:
        """All caches."""
        return self.in_flight + self.prefixes


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that caches may take, and those that admitted requests may come to take."""

    total_bytes: int = 0
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Requests by where they are now."""

    waiting: int = 0
    reading_prompts: int = 0
    decoding: int = 0
    alone: int = 0

    @property
    def running(self) -> int:
        """Those that the model works on."""
        return self.reading_prompts + self.decoding + self.alone


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens, the seconds of work they took, and tokens per second of the last `window_s`."""

    tokens: int = 0
    busy_s: float = 0.0
    per_s: float = 0.0
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hits:
    """Requests that found something, and the tokens that need not be read for it."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What the caches of earlier prompts saved.

    Attributes:
        memory: Prefixes found in memory.
        disk: Prefixes found on disk.
        missed_requests: Those for which there was none.
        memory_evictions: Entries that had to leave memory for others.
        disk_evictions: Files that had to leave the disk.
        disk_writes: Files written.
        disk_written_bytes: Their bytes.
        disk_dropped: Entries that were not written, since the writer was behind.
        disk_errors: Entries that could not be written, read or believed.
    """

    memory: Hits = field(default_factory=Hits)
    disk: Hits = field(default_factory=Hits)
    missed_requests: int = 0
    memory_evictions: int = 0
    disk_evictions: int = 0
    disk_writes: int = 0
    disk_written_bytes: int = 0
    disk_dropped: int = 0
    disk_errors: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """A histogram: how many took at most so many seconds, the last without limit."""

    bounds_s: tuple[float, ...] = ()
    at_most: tuple[int, ...] = (0,)
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return self.at_most[-1]


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by how they ended.

    Attributes:
        outcomes: Of those that were let in.
        refused: Of those that were not, by reason.
        first_token: From arrival to the first token.
        duration: From arrival to the end.
    """

    outcomes: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    first_token: Latency = field(default_factory=Latency)
    duration: Latency = field(default_factory=Latency)


@dataclass(frozen=True, slots=True)
class Stats:
    """Everything, at one moment.

    Attributes:
        state: Whether requests are answered.
        uptime_s: Since the server started.
        measured_s_ago: How old `memory` and `work` are; the thread that generates says them
            between two steps, and a step can be a long prompt.
        versions: Of the packages that matter.
        model: What clients call it.
        context_tokens: The longest context.
        scheme: What the server was told to store keys and values under.
        layers: One for each cache of the model; none before it is loaded.
        kernels: Checked in this process.
        attention_calls: Calls that were meant for a kernel, by ``"kernel"`` where it took them, and
            by the reason where it did not.
        memory: Where keys and values lie.
        budget: What they may take.
        work: Requests by where they are.
        prompt: Tokens of prompts that were read; those of found prefixes are not.
        decode: Tokens that were generated.
        prefixes: What earlier prompts saved.
        requests: Requests by how they ended.
    """

    state: State
    uptime_s: float
    measured_s_ago: float | None
    versions: Mapping[str, str | None]
    model: str
    context_tokens: int | None
    scheme: str
    layers: tuple[LayerStats, ...] = ()
    kernels: tuple[KernelStats, ...] = ()
    attention_calls: Mapping[str, int] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    budget: Budget = field(default_factory=Budget)
    work: Work = field(default_factory=Work)
    prompt: Throughput = field(default_factory=Throughput)
    decode: Throughput = field(default_factory=Throughput)
    prefixes: Prefixes = field(default_factory=Prefixes)
    requests: Requests = field(default_factory=Requests)

    def as_dict(self) -> dict[str, Any]:
        """The JSON document."""
        found = {"version": DOCUMENT_VERSION, **asdict(self)}
        found["layers"] = {
            "total": len(self.layers),
            "quantised": sum(not layer.reason for layer in self.layers),
            **{f"by_{name}": self.layers_by(name) for name in ("kind", "scheme", "path")},
            "each": found["layers"],
        }
        memory = self.memory
        found["memory"] |= {
            name: asdict(held) | {"compression_ratio": held.compression_ratio}
            for name, held in (
                ("held", memory.held),
                ("in_flight", memory.in_flight),
                ("prefixes", memory.prefixes),
            )
        }
        found["work"]["running"] = self.work.running
        for name, latency in (
            ("first_token", self.requests.first_token),
            ("duration", self.requests.duration),
        ):
            found["requests"][name]["count"] = latency.count
        return found

    def layers_by(self, name: str) -> dict[str, int]:
        """How many layers have each value of a field of `LayerStats`."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            value = str(getattr(layer, name))
            counts[value] = counts.get(value, 0) + 1
        return counts


def layers_of(report: AttachReport | None) -> tuple[LayerStats, ...]:
    """The layers of what `attach` said; none before it said something."""
    if report is None:
        return ()
    return tuple(
        LayerStats(
            layer.index,
            layer.kind or "other",
            str(layer.scheme),
            layer.fetch,
            layer.reason,
            layer.fetch_reason,
        )
        for layer in report.layers
    )
