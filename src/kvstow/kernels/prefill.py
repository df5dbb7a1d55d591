"""What kernels of many queries are specialised for; `specialise` is about few.

Here too nothing knows a framework or a device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from kvstow.codec.layout import check_keys, check_values
from kvstow.errors import UnsupportedModel
from kvstow.kernels.specialise import DTYPES, Dtype
from kvstow.scheme import GROUP_SIZE, KEY_BITS, VALUE_BITS

HEAD_DIMS = (64, 128, 256)  # the sums of 16 rows of 512 elements leave no registers
# Row tiles and warps, the best first. What a warp reads of a decoded tile serves all its row tiles,
# and the tile all warps of a block; of eight warps half decode while the others attend.
LAUNCHES = ((2, 8), (1, 8), (2, 4), (1, 4))
MOST_ROW_TILES = {64: 2, 128: 2, 256: 1}  # whose sums leave registers for the rest
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
        return f"kvstow_prefill_d{self.head_dim}_{widths}_{self.dtype}_r{self.rows}_w{self.warps}"

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
        widths = f"{self.head_dim}, {self.key_bits}, {self.value_bits}"
        return f"kvstow::PrefillShape<{widths}, {self.row_tiles}, {self.warps}>"

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
    """The kernel for a shape: the best that fits, of one row tile if that has room for all rows.

    With two row tiles a block takes longer, but not twice as long: it is faster wherever there
    would be fewer blocks.

    Args:
        widths: Bits of a key code and of a value code.
        head_dim: One of `HEAD_DIMS`.
        dtype: Of the queries.
        shared_limit: Bytes of shared memory that a block may have.
        n_rows: Query rows of a KV head; None is any number, more than a block has room for.

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
    kernel = _largest(widths, head_dim, dtype, shared_limit)
    if kernel is None:
        raise ValueError(f"no launch of {widths}, head_dim {head_dim} fits in {shared_limit} bytes")
    small = replace(kernel, row_tiles=1)
    return kernel if n_rows is None or n_rows > small.rows else small


def all_prefill_kernels(shared_limit: int) -> Iterator[PrefillKernel]:
    """Every kernel that exists for so much shared memory."""
    for head_dim, *widths in product(HEAD_DIMS, KEY_BITS, VALUE_BITS):
        for dtype in DTYPES:
            if kernel := _largest((widths[0], widths[1]), head_dim, dtype, shared_limit):
                yield from (replace(kernel, row_tiles=n + 1) for n in range(kernel.row_tiles))


def _largest(
    widths: tuple[int, int], head_dim: int, dtype: Dtype, shared_limit: int
) -> PrefillKernel | None:
    """The first of `LAUNCHES` that fits."""
    for row_tiles, warps in LAUNCHES:
        kernel = PrefillKernel(head_dim, *widths, dtype, row_tiles, warps)
        if row_tiles <= MOST_ROW_TILES[head_dim] and kernel.shared_bytes <= shared_limit:
            return kernel
    return None
