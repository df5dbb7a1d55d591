"""What MLX is given compiles, without a GPU: MLX adds the signature, as here."""

import pytest

from kvstow.errors import MissingDependency
from kvstow.kernels import nvrtc
from kvstow.kernels.prefill import prefill_kernel
from kvstow.kernels.specialise import EncodeKernel, decode_kernel

pytest.importorskip("mlx.core")
build = pytest.importorskip("kvstow.kernels.mlx_build")

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
    "new_keys": "__nv_bfloat16",
    "new_values": "__nv_bfloat16",
    "output": "__nv_bfloat16",
    "signs": "int8_t",
    **dict.fromkeys(("key_scales", "key_zeros", "value_scales"), "__half"),
    **dict.fromkeys(("centroids", "boundaries", "parts", "sinks"), "float"),
    **dict.fromkeys(("key_errors", "value_errors"), "unsigned long long"),
    **dict.fromkeys(
        ("arrivals", "constants", "counts", "starts", "lengths", "written", "done"), "int32_t"
    ),
}


@pytest.fixture
def as_program(monkeypatch):
    """Kernels that are made meanwhile are whole programs, in MLX's form."""

    def program(name, input_names, output_names, source, header, shared_memory):
        assert shared_memory > 0
        arguments = [f"const {ELEMENTS[n]}* {n}" for n in input_names]
        arguments += [f"{ELEMENTS[n]}* {n}" for n in output_names]
        return (
            f"{TYPES}{header}\nnamespace mlx::core::cu {{\n"
            f"__global__ void custom_kernel_{name}({', '.join(arguments)}) {{\n{source}\n}}\n}}\n"
        )

    monkeypatch.setattr(build.mx.fast, "cuda_kernel", program)


@pytest.mark.parametrize("options", [(False, False), (True, True)])
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.usefixtures("as_program")
def test_attention_compiles_with_the_signature_of_mlx(options, stores):
    ragged, with_sinks = options
    kernel = decode_kernel((8, 3), 64, "bfloat16", 4, 232_448, stores=stores)
    compile_or_skip(build.decode_callable.__wrapped__(kernel, ragged, with_sinks))


@pytest.mark.usefixtures("as_program")
def test_attention_of_prompts_compiles_with_the_signature_of_mlx():
    kernel = prefill_kernel((8, 3), 64, "bfloat16", 232_448)
    compile_or_skip(build.decode_callable.__wrapped__(kernel, ragged=True, with_sinks=False))


@pytest.mark.usefixtures("as_program")
@pytest.mark.parametrize("search", [False, True])
def test_the_encoder_compiles_with_the_signature_of_mlx(search):
    kernel = EncodeKernel(64, 4, 3, "bfloat16", search=search)
    compile_or_skip(build.encode_callable.__wrapped__(kernel))
    compile_or_skip(build.append_callable.__wrapped__(kernel))


def compile_or_skip(program):
    try:
        made = nvrtc.compile_program(program, "sm_90")
    except MissingDependency as error:
        pytest.skip(str(error))
    assert made.registers
    assert made.frame_bytes == 0
