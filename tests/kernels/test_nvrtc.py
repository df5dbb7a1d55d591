"""The device source compiles for every architecture, and keeps its numbers in registers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstow.errors import MissingDependency
from kvstow.kernels import nvrtc
from kvstow.kernels.prefill import all_prefill_kernels, prefill_kernel
from kvstow.kernels.source import cuda_program
from kvstow.kernels.specialise import (
    SHARED_LIMITS,
    DecodeKernel,
    EncodeKernel,
    all_kernels,
    decode_kernel,
)
from kvstow.scheme import HEAD_DIMS

CAPABILITIES = [80, 89, 90, 100]
# Up to 16 query rows every kernel keeps its sums in registers; with 32 rows of 128 elements
# a few words of each thread go to memory. Launches are tuned on sm_90: on sm_100 two words go
# there of k8v3 with 8 rows, and four of prompts with 256. Of other widths and head_dims up to
# ten do, where registers are shortest: 16 warps, or 256 elements and more; a few of prompts,
# with two row tiles of 128.
MOST_TUNED_ROWS = 16
MOST_FRAME_BYTES = {80: 0, 89: 0, 90: 0, 100: 16}
MOST_OTHER_FRAME_BYTES = 40


def compile_or_skip(kernel, capability):
    try:
        return nvrtc.compile_program(cuda_program(kernel), f"sm_{capability}")
    except MissingDependency as error:
        pytest.skip(str(error))


def check(kernel, capability):
    compiled = compile_or_skip(kernel, capability)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert 0 < compiled.registers * kernel.threads <= 65_536, kernel.name
    if not isinstance(kernel, DecodeKernel) or kernel.rows <= MOST_TUNED_ROWS:
        is_default = (kernel.head_dim, kernel.key_bits, kernel.value_bits) == (128, 8, 3)
        is_other = not isinstance(kernel, EncodeKernel) and not is_default
        most = MOST_OTHER_FRAME_BYTES if is_other else MOST_FRAME_BYTES[capability]
        assert compiled.frame_bytes <= most, kernel.name


def decode(head_dim, pair, dtype, n_rows, capability=90, **options):
    return decode_kernel(pair, head_dim, dtype, n_rows, SHARED_LIMITS[capability], **options)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_default_scheme_compiles_for_every_architecture(capability):
    for stores in (False, True):
        check(decode(128, (8, 3), "bfloat16", 4, capability, stores=stores), capability)
    check(EncodeKernel(128, 8, 3, "bfloat16"), capability)


@pytest.mark.parametrize(
    ("head_dim", "pair", "dtype", "n_rows"),
    [
        (64, (4, 2), "float16", 8),
        (128, (5, 4), "float32", 16),
        (128, (2, 8), "bfloat16", 8),
        (256, (8, 5), "bfloat16", 16),
        (512, (4, 3), "float16", 8),
        (512, (5, 8), "float32", 4),
    ],
)
def test_a_sample_of_shapes_needs_no_memory_for_registers(head_dim, pair, dtype, n_rows):
    check(decode(head_dim, pair, dtype, n_rows), 90)


@pytest.mark.parametrize(
    ("head_dim", "pair", "dtype", "n_rows"),
    [(64, (4, 5), "float32", 8), (256, (2, 4), "float16", 8), (512, (8, 8), "bfloat16", 8)],
)
def test_a_sample_of_kernels_that_store_a_token_compiles(head_dim, pair, dtype, n_rows):
    check(decode(head_dim, pair, dtype, n_rows, stores=True), 90)


@pytest.mark.parametrize("n_rows", [1, None])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_prompts_of_the_default_scheme_compile_for_every_architecture(capability, n_rows):
    kernel = prefill_kernel((8, 3), 128, "bfloat16", SHARED_LIMITS[capability], n_rows)
    check(kernel, capability)


@pytest.mark.parametrize(
    ("head_dim", "pair", "dtype"),
    [(64, (8, 3), "bfloat16"), (128, (4, 8), "float32"), (256, (5, 2), "float16")],
)
def test_a_sample_of_kernels_for_prompts_compiles(head_dim, pair, dtype):
    check(prefill_kernel(pair, head_dim, dtype, SHARED_LIMITS[90]), 90)


@pytest.mark.parametrize(
    ("head_dim", "pair", "dtype"), [(64, (5, 8), "float32"), (512, (2, 5), "float16")]
)
def test_a_sample_of_encoders_compiles(head_dim, pair, dtype):
    check(EncodeKernel(head_dim, *pair, dtype), 90)


@pytest.mark.every_kernel
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_for_every_architecture(capability, head_dim):
    every = [*all_kernels(capability), *all_prefill_kernels(SHARED_LIMITS[capability])]
    kernels = [kernel for kernel in every if kernel.head_dim == head_dim]
    with ThreadPoolExecutor() as pool:
        list(pool.map(check, kernels, [capability] * len(kernels)))


def test_a_mistake_in_the_source_is_the_compilers_message():
    kernel = DecodeKernel(128, 8, 3, "bfloat16", 1, warps=8, tile=32)
    program = cuda_program(kernel).replace(str(kernel.shared_bytes), "1")
    try:
        with pytest.raises(ValueError, match=r"counted differently in specialise\.py"):
            nvrtc.compile_program(program, "sm_90")
    except MissingDependency as error:
        pytest.skip(str(error))


def test_memory_of_a_thread_is_read_from_the_machine_code():
    source = """
    extern "C" __global__ void spill(float* x, int n) {
      float kept[64];
      for (int i = 0; i < 64; ++i) kept[i] = x[i];
      for (int i = 0; i < n; ++i) kept[(int)x[i] & 63] += 1;
      for (int i = 0; i < 64; ++i) x[i] = kept[i];
    }
    """
    try:
        assert nvrtc.compile_program(source, "sm_90").frame_bytes == 256
    except MissingDependency as error:
        pytest.skip(str(error))
