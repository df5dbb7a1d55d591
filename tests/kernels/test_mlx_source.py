"""What MLX is given compiles, without a GPU: MLX adds the signature, as here."""

import pytest

from kvstow.errors import MissingDependency
from kvstow.kernels import nvrtc
from kvstow.kernels.specialise import EncodeKernel, decode_kernel

pytest.importorskip("mlx.core")
mlx = pytest.importorskip("kvstow.kernels.mlx")

pytestmark = pytest.mark.mlx
# MLX's names of the element types; the kernels only cast pointers to them.
TYPES = """
typedef signed char int8_t; typedef unsigned char uint8_t; typedef int int32_t;
struct __half { unsigned short bits; }; struct __nv_bfloat16 { unsigned short bits; };
"""
ELEMENTS = {
    "key_codes": "uint8_t",
    "value_codes": "uint8_t",
    "queries": "__nv_bfloat16",
    "keys": "__nv_bfloat16",
    "values": "__nv_bfloat16",
    "output": "__nv_bfloat16",
    "signs": "int8_t",
    **dict.fromkeys(("key_scales", "key_zeros", "value_scales"), "__half"),
    **dict.fromkeys(("centroids", "boundaries", "sums", "weights"), "float"),
    **dict.fromkeys(("arrivals", "counts", "starts", "lengths"), "int32_t"),
}


@pytest.fixture
def programs(monkeypatch):
    """Whole programs of the kernels that are made meanwhile, in MLX's form."""

    def program(name, input_names, output_names, source, header, shared_memory):
        assert shared_memory > 0
        arguments = [f"const {ELEMENTS[n]}* {n}" for n in input_names]
        arguments += [f"{ELEMENTS[n]}* {n}" for n in output_names]
        return (
            f"{TYPES}{header}\nnamespace mlx::core::cu {{\n"
            f"__global__ void custom_kernel_{name}({', '.join(arguments)}) {{\n{source}\n}}\n}}\n"
        )

    monkeypatch.setattr(mlx.mx.fast, "cuda_kernel", program)
    for made in (mlx._decode, mlx._encode):
        monkeypatch.setattr(mlx, made.__name__, made.__wrapped__)
    return mlx


@pytest.mark.parametrize("ragged", [False, True])
def test_attention_compiles_with_the_signature_of_mlx(programs, ragged):
    kernel = decode_kernel((8, 3), 64, "bfloat16", 4, 232_448)
    compile_or_skip(programs._decode(kernel, ragged))


def test_the_encoder_compiles_with_the_signature_of_mlx(programs):
    compile_or_skip(programs._encode(EncodeKernel(64, 4, 3, "bfloat16")))


def compile_or_skip(program):
    try:
        made = nvrtc.compile_program(program, "sm_90")
    except MissingDependency as error:
        pytest.skip(str(error))
    assert made.registers
    assert made.frame_bytes == 0
