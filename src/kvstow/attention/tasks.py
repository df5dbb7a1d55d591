"""What a kernel is asked to do: values that name a specialisation, for checks and reports."""

from dataclasses import asdict, dataclass
from typing import Any

from kvstow.kernels.metal_plan import MetalDevice
from kvstow.kernels.plan import Device
from kvstow.kernels.specialise import DTYPES, Dtype


@dataclass(frozen=True, slots=True)
class AttendTask:
    """Attention of some query rows of each KV head.

    Attributes:
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        head_dim: Elements of a key and of a value.
        dtype: Of the queries.
        group: Query heads of a KV head.
        n_queries: Query tokens.
        ragged: Whether rows begin at tokens of their own.
        sinks: Whether there are attention sinks.
    """

    key_bits: int
    value_bits: int
    head_dim: int
    dtype: str
    group: int
    n_queries: int
    ragged: bool
    sinks: bool = False

    def name(self, device: Device | MetalDevice) -> str:
        """Of what is compiled: other tasks may share it.

        Raises:
            ValueError: If nothing does it.
        """
        widths, rows = (self.key_bits, self.value_bits), self.group * self.n_queries
        kernel = device.decode_kernel(widths, self.head_dim, _dtype(self.dtype), rows)
        return kernel.name + _suffixes(self)


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """Attention of a prompt's query rows: any number of them, of any number of query heads.

    Attributes:
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        head_dim: Elements of a key and of a value.
        dtype: Of the queries.
        ragged: Whether rows begin at tokens of their own.
        sinks: Whether there are attention sinks.
    """

    key_bits: int
    value_bits: int
    head_dim: int
    dtype: str
    ragged: bool
    sinks: bool = False

    def name(self, device: Device | MetalDevice) -> str:
        """Of what is compiled.

        Raises:
            ValueError: If nothing does it.
            UnsupportedModel: If nothing does it with this head_dim.
        """
        widths = self.key_bits, self.value_bits
        kernel = device.prefill_kernel(widths, self.head_dim, _dtype(self.dtype))
        return kernel.name + _suffixes(self)


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """Encoding of keys and values.

    Attributes:
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        head_dim: Elements of a key and of a value.
        dtype: Of both.
        search: Whether it searches, as `scheme.Turbo.search`.
    """

    key_bits: int
    value_bits: int
    head_dim: int
    dtype: str
    search: bool

    def name(self, device: Device | MetalDevice) -> str:
        """Of what is compiled.

        Raises:
            ValueError: If nothing does it.
        """
        widths, dtype = (self.key_bits, self.value_bits), _dtype(self.dtype)
        return device.encode_kernel(widths, self.head_dim, dtype, search=self.search).name


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
