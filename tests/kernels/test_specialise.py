"""Which kernels exist, how they are launched, and how their source is put together."""

import re

import pytest

from kvstow.errors import SchemeError, UnsupportedModel
from kvstow.kernels.arguments import DecodeArgs, EncodeArgs
from kvstow.kernels.metal_plan import MetalDevice
from kvstow.kernels.plan import LEAST_CHUNK, Device, Shape, plan_attention, plan_decode
from kvstow.kernels.prefill import all_prefill_kernels
from kvstow.kernels.source import cuda_header, cuda_program
from kvstow.kernels.specialise import (
    MOST_ROW_QUADS,
    SHARED_LIMITS,
    DecodeKernel,
    all_kernels,
    decode_kernel,
)
from kvstow.scheme import HEAD_DIMS

H200 = Device(90, 132)


@pytest.mark.parametrize("capability", SHARED_LIMITS)
def test_every_kernel_fits_and_has_a_name_of_its_own(capability):
    kernels = list(all_kernels(capability))
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert all(kernel.shared_bytes <= SHARED_LIMITS[capability] for kernel in kernels)
    assert all(re.fullmatch(r"\w+", kernel.name) for kernel in kernels)


def test_what_has_no_encoding_has_no_kernel():
    with pytest.raises(SchemeError, match="key bits"):
        decode_kernel((3, 3), 128, "float16", 1, 232_448)
    with pytest.raises(UnsupportedModel, match="head_dim"):
        decode_kernel((8, 3), 96, "float16", 1, 232_448)
    with pytest.raises(ValueError, match="fits in 1000 bytes"):
        decode_kernel((8, 3), 128, "float16", 1, 1000)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("n_rows", [1, 4, 5, 9, 17, 33, 100])
def test_blocks_cover_every_query_row(head_dim, n_rows):
    plan = plan_decode(Shape(1, n_rows, 1, 1, head_dim, 1000), (8, 3), "float16", H200)
    assert (plan.row_blocks - 1) * plan.kernel.rows < n_rows <= plan.row_blocks * plan.kernel.rows
    assert plan.kernel.row_quads <= MOST_ROW_QUADS[head_dim]


@pytest.mark.parametrize("n_tokens", [0, 1, 255, 256, 257, 4096, 65_535, 1_000_000])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_splits_cover_every_token_in_whole_tiles(n_tokens, batch):
    plan = plan_decode(Shape(batch, 32, 8, 1, 128, n_tokens), (8, 3), "bfloat16", H200)
    assert plan.chunk % plan.kernel.tile == 0
    assert plan.n_splits * plan.chunk >= n_tokens
    assert plan.n_splits == 1 or (plan.n_splits - 1) * plan.chunk < n_tokens
    assert plan.grid == (plan.n_splits, 8, batch)


@pytest.mark.parametrize(("n_tokens", "n_splits"), [(0, 1), (256, 1), (1000, 4), (1_000_000, 18)])
def test_rows_that_differ_in_length_take_one_share_for_each_processor(n_tokens, n_splits):
    shape = Shape(3, 32, 8, 1, 128, n_tokens, ragged=True)
    plan = plan_decode(shape, (8, 3), "bfloat16", H200)
    assert (plan.grid, plan.n_splits, plan.chunk) == ((132, 1, 1), n_splits, LEAST_CHUNK)
    assert plan.chunk % plan.kernel.tile == 0
    assert plan_decode(shape, (8, 3), "bfloat16", Device(90, 0)).grid == (1, 1, 1)


def test_a_short_batch_of_one_is_split_over_the_processors():
    plan = plan_decode(Shape(1, 32, 8, 1, 128, 65_536), (8, 3), "bfloat16", H200)
    assert plan.n_splits * 8 in range(120, 133)


def test_a_prompt_is_split_only_where_its_rows_leave_processors_idle():
    def plan(n_queries, batch=1):
        shape = Shape(batch, 32, 8, n_queries, 128, 65_536)
        return plan_attention(shape, (8, 3), "bfloat16", H200)

    assert (plan(1024).row_blocks, plan(1024).n_splits, plan(1024).grid) == (16, 1, (1, 128, 1))
    assert (plan(512).row_blocks, plan(512).n_splits, plan(512).grid) == (8, 2, (2, 64, 1))
    assert (plan(64).row_blocks, plan(64).n_splits) == (1, 16)
    assert plan(64, batch=16).n_splits == 1
    assert not plan(1024).writes_parts
    assert plan(64).writes_parts
    assert plan(8).kernel.name.startswith("kvstow_decode")
    assert plan(8).writes_parts
    assert plan(9).kernel.name == "kvstow_prefill_d128_k8v3_bfloat16_r128_w8"
    assert plan(9).chunk % plan(9).kernel.tile == 0


def test_a_prompt_whose_rows_fit_in_one_row_tile_of_each_warp_has_no_second():
    def rows_of_block(n_queries, capability):
        shape = Shape(1, 32, 8, n_queries, 128, 65_536)
        return plan_attention(shape, (8, 3), "bfloat16", Device.of(capability)).kernel.rows

    assert [rows_of_block(n, 90) for n in (9, 32, 33, 2048)] == [128, 128, 256, 256]
    assert [rows_of_block(n, 89) for n in (9, 16, 17, 2048)] == [64, 64, 128, 128]


def test_launches_of_the_default_scheme_on_sm_90_are_the_ones_it_was_timed_with():
    timed = {
        (64, 4): (16, 32),
        (64, 32): (8, 32),
        (128, 4): (8, 32),
        (128, 8): (12, 32),
        (128, 16): (8, 32),
        (128, 32): (8, 16),
        (256, 4): (8, 32),
        (256, 8): (8, 32),
        (256, 16): (8, 16),
        (512, 4): (8, 16),
    }
    for (head_dim, rows), launch in timed.items():
        kernel = decode_kernel((8, 3), head_dim, "bfloat16", rows, SHARED_LIMITS[90])
        assert (kernel.rows, kernel.warps, kernel.tile) == (rows, *launch), head_dim


def test_prompts_take_as_many_warps_and_row_tiles_as_there_is_room_for():
    for capability, head_dim, pair, launch in (
        (90, 64, (8, 3), (2, 8)),
        (90, 128, (8, 8), (2, 8)),
        (90, 256, (8, 8), (1, 8)),
        (80, 128, (8, 3), (2, 8)),
        (80, 128, (8, 5), (1, 8)),
        (80, 256, (8, 8), (1, 4)),
        (89, 64, (8, 3), (2, 4)),
        (89, 128, (8, 3), (2, 4)),
        (89, 128, (8, 8), (1, 4)),
    ):
        kernel = Device.of(capability).prefill_kernel(pair, head_dim, "float16")
        assert (kernel.row_tiles, kernel.warps) == launch, (capability, head_dim, pair)
    kernels = list(all_prefill_kernels(SHARED_LIMITS[89]))
    names = [kernel.name for kernel in kernels]
    assert len(names) == len(set(names)) == 60 * 3 - 4 * 3 + sum(k.row_tiles == 2 for k in kernels)
    with pytest.raises(ValueError, match="fits in 101376 bytes"):
        Device.of(89).prefill_kernel((2, 8), 256, "float16")
    with pytest.raises(UnsupportedModel, match="head_dim 64, 128, 256, got 512"):
        Device.of(90).prefill_kernel((8, 3), 512, "float16")
    with pytest.raises(ValueError, match="no kernel for Metal is for prompts"):
        MetalDevice().prefill_kernel((8, 3), 64, "float16")


def test_heads_that_do_not_divide_are_refused():
    for n_queries in (1, 100):
        with pytest.raises(ValueError, match="multiple of KV heads, got 7 and 2"):
            plan_attention(Shape(1, 7, 2, n_queries, 128, 10), (8, 3), "float16", H200)


def test_an_unknown_device_is_taken_for_the_last_known_before_it():
    assert Device.of(103).shared_limit == SHARED_LIMITS[100]
    assert Device.of(75).shared_limit == 0


@pytest.mark.parametrize("name", ["decode_attention.cuh", "encode.cuh", "prefill_attention.cuh"])
def test_the_header_holds_every_file_once_and_no_include(name):
    text = cuda_header(name)
    assert "#include" not in text
    assert text.count("KVSTOW_INLINE __device__") == 1


def test_arguments_are_those_of_the_device_source():
    for structure, file_name in ((DecodeArgs, "decode_shape.cuh"), (EncodeArgs, "group.cuh")):
        text = cuda_header(file_name)
        body = re.search(rf"struct {structure.__name__} {{(.*?)}};", text, re.DOTALL)[1]
        lines = [line.split("//")[0] for line in body.splitlines()]
        fields = re.findall(r"\*?(\w+)\s*[,;]", " ".join(lines))
        assert fields == [name for name, _ in structure._fields_]


def test_a_program_names_its_kernel():
    kernel = DecodeKernel(64, 4, 2, "float16", 1, warps=8, tile=32)
    assert f"\n{kernel.name}(const kvstow::DecodeArgs args)" in cuda_program(kernel)
