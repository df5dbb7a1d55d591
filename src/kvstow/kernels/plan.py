"""How one call of attention is cut into blocks: which kernel, how many splits of the tokens.

A block takes the query rows of one KV head (at most as many as its kernel holds) and one
split of the tokens. Splits keep all processors of the device busy when batch and heads alone
do not; the last one to arrive merges them. In a step of rows that differ in length a block takes
an equal share of all their tokens instead, and cuts it into splits itself: the host knows only
the longest row.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstow.kernels.prefill import PrefillKernel, prefill_kernel
from kvstow.kernels.specialise import (
    SHARED_LIMITS,
    DecodeKernel,
    Dtype,
    EncodeKernel,
    decode_kernel,
)

# Multiprocessors by compute capability, where a framework does not say: A100, A10, L40, H100
# and H200, B200, RTX 5090. Another number only means less even splits.
N_PROCESSORS = {80: 108, 86: 72, 89: 142, 90: 132, 100: 148, 120: 170}
LEAST_CHUNK = 256  # splits of less take longer to merge than to read
# Query tokens of a step. More are a prompt, which other kernels are for.
MOST_STEP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan needs to know of a GPU.

    Attributes:
        capability: Compute capability, 90 for 9.0.
        n_processors: Multiprocessors.
    """

    capability: int
    n_processors: int

    @classmethod
    def of(cls, capability: int) -> "Device":
        """A GPU of a compute capability, with the processors of its largest common model."""
        return cls(capability, _at_most(N_PROCESSORS, capability))

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that a block may have."""
        return _at_most(SHARED_LIMITS, self.capability)

    def decode_kernel(
        self,
        widths: tuple[int, int],
        head_dim: int,
        dtype: Dtype,
        n_rows: int,
        *,
        stores: bool = False,
    ) -> DecodeKernel:
        """What attends `n_rows` query rows of a KV head; see `specialise.decode_kernel`."""
        limit = self.shared_limit
        return decode_kernel(widths, head_dim, dtype, n_rows, limit, stores=stores)

    def prefill_kernel(
        self, widths: tuple[int, int], head_dim: int, dtype: Dtype, n_rows: int | None = None
    ) -> PrefillKernel:
        """What attends the many query rows of a prompt; see `prefill.prefill_kernel`."""
        return prefill_kernel(widths, head_dim, dtype, self.shared_limit, n_rows)

    def encode_kernel(
        self, widths: tuple[int, int], head_dim: int, dtype: Dtype, *, search: bool
    ) -> EncodeKernel:
        """What encodes keys and values."""
        return EncodeKernel(head_dim, *widths, dtype, search=search)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one call.

    Attributes:
        batch: Rows of the batch.
        n_heads: Query heads.
        n_kv_heads: KV heads, a divisor of `n_heads`.
        n_queries: Query tokens of each row, the last ones stored.
        head_dim: Elements of a key and of a value.
        n_tokens: Tokens of the longest row.
        ragged: Whether rows differ in length.
        stores: Whether a token of each row is to be stored first.
    """

    batch: int
    n_heads: int
    n_kv_heads: int
    n_queries: int
    head_dim: int
    n_tokens: int
    ragged: bool = False
    stores: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head.

        Raises:
            ValueError: If they do not divide.
        """
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                "query heads must be a multiple of KV heads, "
                f"got {self.n_heads} and {self.n_kv_heads}"
            )
        return self.n_heads // self.n_kv_heads


_Kernel = TypeVar("_Kernel", covariant=True)
_AnyKernel = TypeVar("_AnyKernel")


@dataclass(frozen=True, slots=True)
class Plan(Generic[_Kernel]):
    """A kernel and its launch.

    Attributes:
        kernel: What is launched.
        group: Query heads of a KV head.
        row_blocks: Blocks that the query rows of a KV head take.
        n_splits: Splits of the tokens; of a share's rows the most there can be.
        chunk: Tokens of a split; in shares the least.
        grid: Blocks along x, y and z.
    """

    kernel: _Kernel
    group: int
    row_blocks: int
    n_splits: int
    chunk: int
    grid: tuple[int, int, int]

    @property
    def writes_parts(self) -> bool:
        """Whether sums and weights may be written, to be merged."""
        return self.n_splits > 1 or not isinstance(self.kernel, PrefillKernel)


DecodePlan = Plan[DecodeKernel]
PrefillPlan = Plan[PrefillKernel]
AttentionPlan = DecodePlan | PrefillPlan


def plan_attention(
    shape: Shape, widths: tuple[int, int], dtype: Dtype, device: Device
) -> AttentionPlan:
    """The best known launch of one call.

    Args:
        shape: Of the call.
        widths: Bits of a key code and of a value code.
        dtype: Of the queries.
        device: Where it runs.

    Raises:
        ValueError: If the heads do not divide, or nothing fits the device.
        UnsupportedModel: If there is no kernel of this head_dim.
    """
    if shape.n_queries > MOST_STEP_TOKENS:
        return plan_prefill(shape, widths, dtype, device)
    return plan_decode(shape, widths, dtype, device)


def plan_decode(shape: Shape, widths: tuple[int, int], dtype: Dtype, device: Device) -> DecodePlan:
    """The launch of a step; see `plan_attention`.

    Raises:
        ValueError: If the heads do not divide, or nothing fits the device.
        UnsupportedModel: If there is no kernel of this head_dim.
    """
    rows = shape.group * shape.n_queries
    kernel = device.decode_kernel(widths, shape.head_dim, dtype, rows, stores=shape.stores)
    if shape.ragged:
        return in_shares(shape, kernel, max(1, device.n_processors))
    splits = max(1, round(device.n_processors / _n_blocks(shape, kernel.rows)))
    chunk = _chunk(-(-shape.n_tokens // splits), kernel.tile)
    return _in_splits(shape, kernel, kernel.rows, chunk)


def in_shares(
    shape: Shape, kernel: DecodeKernel, n_shares: int, chunk: int = LEAST_CHUNK
) -> DecodePlan:
    """The launch of a step in which each block takes an equal share (``cuda/shares.cuh``).

    Args:
        shape: Of the call.
        kernel: What is launched.
        n_shares: Blocks.
        chunk: Tokens of the shortest split, a multiple of the kernel's tile.
    """
    columns = _n_blocks(shape, kernel.rows) // shape.batch
    # A share holds at least a part `columns / n_shares` of any row of one column, which may
    # begin and end within shares; and no split of several is shorter than a chunk.
    n_splits = max(1, min(n_shares // columns + 2, -(-shape.n_tokens // chunk)))
    row_blocks = columns // shape.n_kv_heads
    return Plan(kernel, shape.group, row_blocks, n_splits, chunk, (n_shares, 1, 1))


def plan_prefill(
    shape: Shape, widths: tuple[int, int], dtype: Dtype, device: Device
) -> PrefillPlan:
    """The launch of a prompt; see `plan_attention`.

    Raises:
        ValueError: If the heads do not divide, or nothing fits the device.
        UnsupportedModel: If there is no kernel of this head_dim.
    """
    rows = shape.group * shape.n_queries
    kernel = device.prefill_kernel(widths, shape.head_dim, dtype, rows)
    # Blocks take long: one more than there are processors would double the time.
    splits = max(1, device.n_processors // _n_blocks(shape, kernel.rows))
    chunk = _chunk(-(-shape.n_tokens // splits), kernel.tile)
    return _in_splits(shape, kernel, kernel.rows, chunk)


def _n_blocks(shape: Shape, rows: int) -> int:
    """Blocks of one split, if a block takes so many query rows."""
    return shape.batch * shape.n_kv_heads * -(-shape.group * shape.n_queries // rows)


def _chunk(tokens: int, tile: int) -> int:
    return max(LEAST_CHUNK, -(-tokens // tile) * tile)


def _in_splits(shape: Shape, kernel: _AnyKernel, rows: int, chunk: int) -> Plan[_AnyKernel]:
    n_splits = max(1, -(-shape.n_tokens // chunk))
    blocks = _n_blocks(shape, rows) // shape.batch
    row_blocks, grid = blocks // shape.n_kv_heads, (n_splits, blocks, shape.batch)
    return Plan(kernel, shape.group, row_blocks, n_splits, chunk, grid)


def _at_most(known: dict[int, int], capability: int) -> int:
    """What is known of the latest capability up to this one; 0 before the first."""
    return next((known[of] for of in sorted(known, reverse=True) if of <= capability), 0)
