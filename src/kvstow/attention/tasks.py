"""What a kernel is asked to do: values that name a specialisation, for checks and reports."""

from dataclasses import asdict, dataclass
from typing import Any

from kvstow.kernels.metal_plan import MetalDevice
from kvstow.kernels.plan import Device
from kvstow.kernels.specialise import DTYPES, Dtype


@dataclass(frozen=True, slots=True)
class _Stored:
    """What every kernel is compiled for.

    Attributes:
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        head_dim: Elements of a key and of a value.
        dtype: Of the queries, or of the keys and values to encode.
    """

    key_bits: int
    value_bits: int
    head_dim: int
    dtype: str

    @property
    def widths(self) -> tuple[int, int]:
        """Of a key code and a value code."""
        return self.key_bits, self.value_bits


@dataclass(frozen=True, slots=True)
class AttendTask(_Stored):
    """Attention of some query rows of each KV head.

    Attributes:
        group: Query heads of a KV head.
        n_queries: Query tokens.
        ragged: Whether rows begin at tokens of their own.
        sinks: Whether there are attention sinks.
        stores: Whether a token of each row is stored first.
    """

    group: int
    n_queries: int
    ragged: bool
    sinks: bool = False
    stores: bool = False

    def name(self, device: Device | MetalDevice) -> str:
        """Of what is compiled: other tasks may share it.

        Raises:
            ValueError: If nothing does it.
        """
        rows, dtype = self.group * self.n_queries, _dtype(self.dtype)
        stored = self.widths, self.head_dim, dtype
        kernel = device.decode_kernel(*stored, rows, stores=self.stores)
        return kernel.name + _suffixes(self)


@dataclass(frozen=True, slots=True)
class PrefillTask(_Stored):
    """Attention of a prompt's query rows: any number of them, of any number of query heads.

    Attributes:
        ragged: Whether rows begin at tokens of their own.
        sinks: Whether there are attention sinks.
    """

    ragged: bool
    sinks: bool = False

    def name(self, device: Device | MetalDevice) -> str:
        """Of what is compiled for many rows. What there is for few is checked with it.

        Raises:
            ValueError: If nothing does it.
            UnsupportedModel: If nothing does it with this head_dim.
        """
        kernel = device.prefill_kernel(self.widths, self.head_dim, _dtype(self.dtype))
        return kernel.name + _suffixes(self)


@dataclass(frozen=True, slots=True)
class EncodeTask(_Stored):
    """Encoding of keys and values.

    Attributes:
        search: Whether it searches, as `scheme.Turbo.search`.
        append: Whether it writes into planes that are there, instead of making some.
    """

    search: bool
    append: bool = False

    def name(self, device: Device | MetalDevice) -> str:
        """Of what is compiled.

        Raises:
            ValueError: If nothing does it.
        """
        dtype = _dtype(self.dtype)
        kernel = device.encode_kernel(self.widths, self.head_dim, dtype, search=self.search)
        return kernel.name + ("_append" if self.append else "")


Task = AttendTask | PrefillTask | EncodeTask
_OPS: dict[str, type[Task]] = {
    "attend": AttendTask,
    "prefill": PrefillTask,
    "encode": EncodeTask,
}


def as_dict(task: Task) -> dict[str, Any]:
    """For JSON."""
    op = next(name for name, kind in _OPS.items() if isinstance(task, kind))
    return {"op": op, **asdict(task)}


def from_dict(fields: dict[str, Any]) -> Task:
    """What `as_dict` was made of.

    Raises:
        KeyError: If there is no such op.
        TypeError: If its fields are others.
    """
    given = dict(fields)
    return _OPS[given.pop("op")](**given)


def _suffixes(task: AttendTask | PrefillTask) -> str:
    return ("_ragged" if task.ragged else "") + ("_sinks" if task.sinks else "")


def _dtype(name: str) -> Dtype:
    if name not in DTYPES:
        raise ValueError(f"kernels take {', '.join(DTYPES)}, got {name}")
    return name
