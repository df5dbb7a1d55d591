"""What kernels are specialised for, which of them exist, and the shapes they are launched in.

A kernel is compiled for its widths, head_dim, element type and, for attention, how many query
rows a block takes; lengths, strides and counts are arguments. Nothing here knows a
framework or a device: `decode_kernel` is told how much shared memory a block may have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from kvstow.codec.layout import check_keys, check_values
from kvstow.scheme import GROUP_SIZE, HEAD_DIMS, KEY_BITS, VALUE_BITS

Dtype = Literal["float16", "bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

# Bytes of shared memory that one block may have, by compute capability.
SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# Rows of queries that a block takes, in fours, and the most of them that leave registers
# for the sums: D / 16 x rows / 2 of them.
ROW_QUADS = (1, 2, 4, 8)
MOST_ROW_QUADS = {64: 8, 128: 8, 256: 4, 512: 2}
# Warps and tokens of a tile, the best first; the first is taken that registers (`most_warps`) and
# shared memory allow.
LAUNCHES = ((16, 32), (12, 32), (8, 32), (8, 16), (4, 32), (4, 16), (2, 16), (1, 16))
# Tiles that a warp holds at once. With more, processors near the memory get more of it than others.
STAGES = 2


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """Attention of a block of query rows over packed planes, ``cuda/decode_attention.cuh``.

    Attributes:
        head_dim: Elements of a key and of a value.
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        dtype: Of queries and output.
        row_quads: Query rows of a block, in fours.
        warps: Of a block.
        tile: Tokens of a tile.
        stores: Whether it stores a token of each row before it reads it, for one query token.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    dtype: Dtype
    row_quads: int
    warps: int
    tile: int
    stores: bool = False

    file_name = "decode_attention.cuh"

    @property
    def name(self) -> str:
        """A C identifier, one for each specialisation."""
        return (
            f"kvstow_decode_d{self.head_dim}_k{self.key_bits}v{self.value_bits}_{self.dtype}"
            f"_r{self.rows}_{self.warps}x{self.tile}{'_store' * self.stores}"
        )

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 4 * self.row_quads

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor that registers must suffice for."""
        return 1

    @property
    def shape(self) -> str:
        """The C++ type that describes it."""
        widths = f"{self.head_dim}, {self.key_bits}, {self.value_bits}"
        launch = f"{self.row_quads}, {self.warps}, {self.tile}"
        return f"kvstow::DecodeShape<{widths}, {launch}>"

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: ``DecodeShape::SHARED_BYTES``, computed again."""
        groups = self.head_dim // GROUP_SIZE
        token = self.head_dim * (self.key_bits + self.value_bits) // 8 + 6 * groups
        stage = _round_up(self.tile * token, 128)
        rows = self.rows * (2 * self.head_dim + 4 * groups + 4)
        merge = (32 * (self.head_dim // 8) * self.row_quads + 2 * self.rows) * 4
        # WHOLE_IN_SHARED
        in_shared = merge <= stage and self.head_dim <= 128 and self.head_dim * self.row_quads < 512
        queries = _round_up(rows + 48 * self.warps + 4, 16)
        whole = in_shared * self.rows * (4 * self.head_dim + 16)
        table = {3: 0, 5: 65536}.get(self.value_bits, 32768)
        return _round_up(queries + whole, 128) + table + self.warps * max(STAGES * stage, merge)

    @property
    def is_possible(self) -> bool:
        """Whether tiles can be copied, and sums and scores of a tile kept in registers."""
        # Keys are copied by whole warps, 16 bytes a lane, but for the unaligned rows of 5 bits.
        copied = self.key_bits == 5 or self.tile * self.head_dim * self.key_bits // 8 % 512 == 0
        kept = self.tile == 16 or self.head_dim * self.row_quads < 1024
        return copied and kept and self.warps <= self.most_warps

    @property
    def most_warps(self) -> int:
        """How many warps have enough registers, and make use of it.

        More hide the time of decoding codes, which counts where there are few bytes to wait
        for; with wide keys and narrow values, eight are enough and finish sooner.
        """
        sums = self.head_dim * self.row_quads  # an eighth of it, in registers
        if self.head_dim > 128 or sums > 256 or (self.widths == (8, 3) and sums == 128):
            return 8
        few_bytes = self.value_bits <= 3 or self.key_bits == 2
        return 16 if sums <= 128 and few_bytes else 12

    @property
    def widths(self) -> tuple[int, int]:
        """Bits of a key code and of a value code."""
        return self.key_bits, self.value_bits

    @property
    def checks(self) -> str:
        """A statement that does not compile where this class and the C++ type differ."""
        return (
            f"static_assert({self.shape}::SHARED_BYTES == {self.shared_bytes}, "
            f'"shared memory is counted differently in specialise.py");'
        )

    def call(self, args: str, shared: str) -> str:
        """The C++ expression that does its work."""
        dtype = f"kvstow::{self.dtype.upper()}"
        types = f"{self.shape}, {dtype}, {str(self.stores).lower()}"
        return f"kvstow::decode_attention<{types}>({args}, {shared})"


@dataclass(frozen=True, slots=True)
class EncodeKernel:
    """Keys and values of new tokens into planes, ``cuda/encode.cuh``.

    Attributes:
        head_dim: Elements of a key and of a value.
        key_bits: Width of a key code.
        value_bits: Width of a value code.
        dtype: Of keys and values.
        guard: Whether groups are re-coded that would be lost, as a cache wants it.
        search: Whether each group takes the best of several grids.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    dtype: Dtype
    guard: bool = True
    search: bool = False

    file_name = "encode.cuh"
    threads = 128
    checks = ""

    @property
    def name(self) -> str:
        """A C identifier, one for each specialisation."""
        options = ("" if self.guard else "_parity") + ("_search" if self.search else "")
        widths = f"d{self.head_dim}_k{self.key_bits}v{self.value_bits}"
        return f"kvstow_encode_{widths}_{self.dtype}{options}"

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor that registers must suffice for: latency is hidden by many."""
        return 4 if self.search else 6 if self.dtype == "float32" else 8

    @property
    def vectors(self) -> int:
        """Keys, or values, that a block encodes."""
        return self.threads // (self.head_dim // GROUP_SIZE)

    def n_blocks(self, n_vectors: int) -> int:
        """Blocks of a launch for so many keys, and as many values."""
        return 2 * -(-n_vectors // self.vectors)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the boundaries."""
        return 4 << self.value_bits

    def call(self, args: str, shared: str) -> str:
        """The C++ expression that does its work."""
        numbers = f"{self.head_dim}, {self.key_bits}, {self.value_bits}"
        options = f"{self.guard}, {self.search}".lower()
        dtype = f"kvstow::{self.dtype.upper()}"
        return f"kvstow::encode<{numbers}, {dtype}, {options}>({args}, (float*){shared})"


Kernel = DecodeKernel | EncodeKernel


def decode_kernel(
    widths: tuple[int, int],
    head_dim: int,
    dtype: Dtype,
    n_rows: int,
    shared_limit: int,
    *,
    stores: bool = False,
) -> DecodeKernel:
    """The kernel for a shape, with the most rows that fit, and then the best launch.

    Args:
        widths: Bits of a key code and of a value code.
        head_dim: One of `scheme.HEAD_DIMS`.
        dtype: Of the queries.
        n_rows: Query rows of one KV head; beyond what a block takes there are more blocks.
        shared_limit: Bytes of shared memory that a block may have.
        stores: See `DecodeKernel`.

    Raises:
        SchemeError: If a width has no encoding.
        UnsupportedModel: If `head_dim` has none.
        ValueError: If not even the smallest launch fits.
    """
    key_bits, value_bits = widths
    stored = head_dim, key_bits, value_bits, dtype
    check_keys(key_bits, head_dim)
    check_values(value_bits, head_dim)
    most = min(_least_of(ROW_QUADS, -(-n_rows // 4)), MOST_ROW_QUADS[head_dim])
    for quads in sorted((n for n in ROW_QUADS if n <= most), reverse=True):
        for warps, tile in LAUNCHES:
            kernel = DecodeKernel(*stored, quads, warps, tile, stores)
            if kernel.is_possible and kernel.shared_bytes <= shared_limit:
                return kernel
    raise ValueError(f"no launch of {widths}, head_dim {head_dim} fits in {shared_limit} bytes")


def all_kernels(capability: int) -> Iterator[Kernel]:
    """Every kernel that exists for a compute capability of `SHARED_LIMITS`."""
    limit = SHARED_LIMITS[capability]
    for head_dim, key_bits, value_bits in product(HEAD_DIMS, KEY_BITS, VALUE_BITS):
        widths = key_bits, value_bits
        for dtype in DTYPES:
            for search in (False, True):
                yield EncodeKernel(head_dim, *widths, dtype, search=search)
            for rows in (4 * quads for quads in ROW_QUADS if quads <= MOST_ROW_QUADS[head_dim]):
                kernel = decode_kernel(widths, head_dim, dtype, rows, limit)
                if kernel.rows == rows:  # else so many do not fit
                    yield from (kernel, replace(kernel, stores=True))


def _least_of(choices: tuple[int, ...], wanted: int) -> int:
    return next((c for c in choices if c >= wanted), choices[-1])


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
