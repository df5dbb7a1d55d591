"""Kernels for Metal: what they are specialised for, and how a call is cut into threadgroups.

See `specialise` and `plan`, which say the same of CUDA. None of the numbers here was measured: no
kernel has run on a Mac.
"""

from dataclasses import dataclass

from kvstow.codec.layout import check_keys, check_values
from kvstow.kernels.plan import Plan, Shape
from kvstow.kernels.specialise import Dtype
from kvstow.scheme import GROUP_SIZE

SIMDGROUP = 32  # lanes
ROWS = (1, 2, 4)  # query rows of a simdgroup; each takes 16 registers of every lane
SIMDGROUPS = 4  # of a threadgroup that attends
# Simdgroups that keep a GPU busy; and tokens of a split, below which merging takes longer.
ENOUGH_SIMDGROUPS = 1024
LEAST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class MetalDecodeKernel:
    """Attention of a block of query rows to one split, ``metal/decode_attention.metal``.

    Attributes:
        head_dim: Elements of a key and of a value.
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        dtype: Of queries and output.
        rows: Query rows of a simdgroup.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    dtype: Dtype
    rows: int

    file_name = "decode_attention.metal"
    threads = SIMDGROUP * SIMDGROUPS

    @property
    def name(self) -> str:
        """A C identifier, one for each specialisation."""
        widths = f"d{self.head_dim}_k{self.key_bits}v{self.value_bits}"
        return f"kvstow_metal_decode_{widths}_{self.dtype}_r{self.rows}"

    @property
    def shape(self) -> str:
        """The C++ type that describes it."""
        widths = f"{self.head_dim}, {self.key_bits}, {self.value_bits}"
        return f"kvstow::DecodeShape<{widths}, {self.rows}, {SIMDGROUPS}>"

    @property
    def shared_floats(self) -> int:
        """Memory of a threadgroup: queries and centroids."""
        return self.rows * self.head_dim + (1 << self.value_bits)


@dataclass(frozen=True, slots=True)
class MetalEncodeKernel:
    """Keys and values of new tokens into planes, ``metal/encode.metal``; guarded.

    Attributes:
        head_dim: Elements of a key and of a value.
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        dtype: Of keys and values.
        search: Whether each group takes the best of several grids.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    dtype: Dtype
    search: bool = False

    file_name = "encode.metal"
    threads = 128

    @property
    def name(self) -> str:
        """A C identifier, one for each specialisation."""
        widths = f"d{self.head_dim}_k{self.key_bits}v{self.value_bits}"
        return f"kvstow_metal_encode_{widths}_{self.dtype}" + ("_search" if self.search else "")

    @property
    def shared_floats(self) -> int:
        """Memory of a threadgroup: boundaries."""
        return 1 << self.value_bits

    @property
    def groups(self) -> int:
        """Groups of a vector, each in one thread."""
        return self.head_dim // GROUP_SIZE


@dataclass(frozen=True, slots=True)
class MetalDevice:
    """A GPU of Apple. All of them take the same kernels."""

    def decode_kernel(
        self,
        widths: tuple[int, int],
        head_dim: int,
        dtype: Dtype,
        n_rows: int,
        *,
        stores: bool = False,
    ) -> MetalDecodeKernel:
        """What attends `n_rows` query rows of a KV head.

        Raises:
            SchemeError: If a width has no encoding.
            UnsupportedModel: If `head_dim` has none.
            ValueError: If it is to append.
        """
        if stores:
            raise ValueError("no kernel for Metal stores tokens before it attends")
        key_bits, value_bits = widths
        check_keys(key_bits, head_dim)
        check_values(value_bits, head_dim)
        rows = next((rows for rows in ROWS if rows >= n_rows), ROWS[-1])
        return MetalDecodeKernel(head_dim, key_bits, value_bits, dtype, rows)

    def prefill_kernel(
        self, widths: tuple[int, int], head_dim: int, dtype: Dtype
    ) -> MetalDecodeKernel:
        """What attends the many query rows of a prompt: there is no such kernel.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"no kernel for Metal is for prompts ({widths}, {head_dim}, {dtype})")

    def encode_kernel(
        self, widths: tuple[int, int], head_dim: int, dtype: Dtype, *, search: bool
    ) -> MetalEncodeKernel:
        """What encodes keys and values."""
        return MetalEncodeKernel(head_dim, *widths, dtype, search)


MetalPlan = Plan[MetalDecodeKernel]


def plan_metal(shape: Shape, widths: tuple[int, int], dtype: Dtype, window: int) -> MetalPlan:
    """The launch of one call.

    Args:
        shape: Of the call.
        widths: Bits of a key code and of a value code.
        dtype: Of the queries.
        window: Tokens that a query sees at most, itself included; 0: all.

    Raises:
        ValueError: If the heads do not divide.
    """
    group = shape.group
    n_rows = group * shape.n_queries
    kernel = MetalDevice().decode_kernel(widths, shape.head_dim, dtype, n_rows)
    row_blocks = -(-n_rows // kernel.rows)
    blocks = shape.n_kv_heads * row_blocks
    seen = shape.n_tokens  # of one row of a block; a window slides over the query tokens
    if window:
        seen = min(seen, window + shape.n_queries - 1)
    wanted = max(1, ENOUGH_SIMDGROUPS // (shape.batch * blocks))
    chunk = max(LEAST_CHUNK, -(-seen // wanted))
    n_splits = max(1, -(-seen // chunk))
    grid = -(-n_splits // SIMDGROUPS), blocks, shape.batch
    return Plan(kernel, group, row_blocks, n_splits, chunk, grid)
