"""What kernels of many queries are specialised for; `specialise` is about few.

Here too nothing knows a framework or a device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kvstow.codec.layout import check_keys, check_values
from kvstow.errors import UnsupportedModel
from kvstow.kernels.specialise import DTYPES, Dtype
from kvstow.scheme import GROUP_SIZE, KEY_BITS, VALUE_BITS

HEAD_DIMS = (64, 128, 256)  # the sums of 16 rows of 512 elements leave no registers
MOST_SUMS = 256  # of a lane, times two: row tiles x head_dim
# Row tiles of a warp and warps of a block. A decoded tile serves all query rows of a block, and an
# operand that is read from it all row tiles of a warp: the best first.
LAUNCHES = ((2, 8), (1, 8), (1, 4))
STAGES = 2


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """Attention of a block of many query rows, ``cuda/prefill_attention.cuh``.

    Attributes:
        head_dim: Elements of a key and of a value.
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        dtype: Of queries and output.
        row_tiles: Of 16 query rows, of a warp.
        warps: Of a block.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    dtype: Dtype
    row_tiles: int
    warps: int

    file_name = "prefill_attention.cuh"

    @property
    def name(self) -> str:
        """A C identifier, one for each specialisation."""
        widths = f"k{self.key_bits}v{self.value_bits}"
        return f"kvstow_prefill_d{self.head_dim}_{widths}_{self.dtype}_r{self.rows}"

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 16 * self.row_tiles * self.warps

    @property
    def tile(self) -> int:
        """Tokens that are decoded at once: each lane decodes a group of one."""
        return self.threads // (self.head_dim // GROUP_SIZE)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor that registers must suffice for."""
        return 8 // self.warps

    @property
    def shape(self) -> str:
        """The C++ type that describes it."""
        numbers = f"{self.head_dim}, {self.key_bits}, {self.value_bits}, {self.row_tiles}, {self.warps}"
        return f"kvstow::PrefillShape<{numbers}>"

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: ``PrefillShape::SHARED_BYTES``, computed again."""
        queries = self.rows * (2 * self.head_dim + 16)  # and what is known of each
        table = 0 if self.value_bits <= 3 else 128 << self.value_bits
        decoded = 2 * 2 * self.tile * 2 * self.head_dim
        stage = 128 * (self.key_bits + self.value_bits + 2)
        return queries + table + decoded + self.warps * STAGES * stage

    @property
    def checks(self) -> str:
        """A statement that does not compile where this class and the C++ type differ."""
        return (
            f"static_assert({self.shape}::SHARED_BYTES == {self.shared_bytes} && "
            f"{self.shape}::TILE == {self.tile}, "
            f'"shared memory is counted differently in prefill.py");'
        )

    def call(self, args: str, shared: str) -> str:
        """The C++ expression that does its work."""
        dtype = f"kvstow::{self.dtype.upper()}"
        return f"kvstow::prefill_attention<{self.shape}, {dtype}>({args}, {shared})"


def prefill_kernel(
    widths: tuple[int, int],
    head_dim: int,
    dtype: Dtype,
    shared_limit: int,
    n_rows: int | None = None,
) -> PrefillKernel:
    """The kernel for a shape: the best that fits, and that no smaller one has room enough for.

    Blocks of many rows take longer, but by less than they have more rows: where half as many
    rows take as many blocks, they are faster.

    Args:
        widths: Bits of a key code and of a value code.
        head_dim: One of `HEAD_DIMS`.
        dtype: Of the queries.
        shared_limit: Bytes of shared memory that a block may have.
        n_rows: Query rows of a KV head; None is any number of them.

    Raises:
        SchemeError: If a width has no encoding.
        UnsupportedModel: If `head_dim` has none, or no kernel.
        ValueError: If not even the fewest warps fit.
    """
    key_bits, value_bits = widths
    check_keys(key_bits, head_dim)
    check_values(value_bits, head_dim)
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise UnsupportedModel(f"prompts have kernels for head_dim {known}, got {head_dim}")
    kernels = _fitting(head_dim, widths, dtype, shared_limit)
    if not kernels:
        raise ValueError(f"no launch of {widths}, head_dim {head_dim} fits in {shared_limit} bytes")
    if n_rows is None:
        return kernels[0]
    return next((kernel for kernel in reversed(kernels) if kernel.rows >= n_rows), kernels[0])


def all_prefill_kernels(shared_limit: int) -> Iterator[PrefillKernel]:
    """Every kernel that exists for so much shared memory."""
    for head_dim, key_bits, value_bits in product(HEAD_DIMS, KEY_BITS, VALUE_BITS):
        for dtype in DTYPES:
            yield from _fitting(head_dim, (key_bits, value_bits), dtype, shared_limit)


def _fitting(
    head_dim: int, widths: tuple[int, int], dtype: Dtype, shared_limit: int
) -> list[PrefillKernel]:
    """With one and two row tiles, as far as registers suffice, each with as many warps as fit."""
    kernels: list[PrefillKernel] = []
    for row_tiles, warps in LAUNCHES:
        kernel = PrefillKernel(head_dim, *widths, dtype, row_tiles, warps)
        fits = kernel.shared_bytes <= shared_limit and row_tiles * head_dim <= MOST_SUMS
        if fits and all(other.row_tiles != row_tiles for other in kernels):
            kernels.append(kernel)
    return kernels
