"""The Triton kernels compile for NVIDIA and AMD devices to exact instructions, without a device."""

import re
from itertools import product

import pytest

from megafrontier.comm.wires.block import INT4, INT8

triton = pytest.importorskip("triton")
ALL = [INT8, INT4, INT8.with_rotation(), INT4.with_rotation()]


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize(
    ("target", "alignment", "accumulate"),
    [
        *product(("sm_90", "gfx90a"), ("any", "as launched"), (True,)),
        ("gfx90a", "as launched", False),
        ("gfx1100", "as launched", True),
    ],
)
def test_kernels_compile_with_exact_divisions_and_no_fusion_of_inexact_products(
    codec, target, alignment, accumulate
):
    """For NVIDIA, and for AMD with wavefronts of 64 and of 32, without such a device. At a launch,
    Triton compiles for what it finds out about the arguments, by other passes."""
    encode, decode_sum = (
        compile_for(target, codec, name, alignment == "as launched", accumulate=accumulate)
        for name in ("_encode", "_decode_sum")
    )
    if target == "sm_90":
        assert "div.rn.f32" in encode
        assert "div.full" not in encode
        assert "div.approx" not in encode
        assert ".ftz" not in encode + decode_sum
        assert "fma.rn" not in encode
    else:
        assert "v_div_fixup_f32" in encode  # the last of the exact division's instructions
        assert "float_denorm_mode_32 3" in encode
    if target == "gfx90a" and alignment == "as launched":
        # Codes move 8 or 16 bytes at a time, whatever multiple of 128 a shard is. Only the zeros at
        # the end of a message are stored one by one.
        assert not re.search(r"_load_[us]byte", encode + decode_sum)
        assert encode.count("_store_byte") == 2


@pytest.mark.parametrize("codec", [INT8, INT4])
@pytest.mark.parametrize("target", ["sm_90", "gfx90a"])
@pytest.mark.parametrize(("out", "accumulate"), [("*bf16", True), ("*fp16", False)])
def test_decoding_into_weights_compiles(codec, target, out, accumulate):
    assert compile_for(target, codec, "_decode_sum", True, out, accumulate)


def compile_for(target, codec, name, is_launched, out="*fp32", accumulate=False):
    """Assembly of one kernel, compiled without the GPU that it is for. `is_launched`: for aligned
    tensors of up to 2 GiB, shards of a multiple of 128 elements, and one row. With `accumulate`,
    encoding adds errors, and decoding adds to the output."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megafrontier.comm.wires import block_triton as kernels

    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target[3:]), 32)
    else:
        gpu = GPUTarget("hip", target, 32 if target == "gfx1100" else 64)
    tile = kernels.SMALL_TILE[gpu.backend]
    if name == "_encode":
        tile = kernels.encode_tile(codec, accumulate, gpu.backend)
    kernel, constants = getattr(kernels, name), kernels._constants(codec, tile)
    constants |= {"FEEDS_BACK" if name == "_encode" else "ACCUMULATE": accumulate}
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    errors = "*i16" if accumulate else "*u8"
    pointers = {"values": "*bf16", "messages": "*u8", "errors": errors, "out": out}
    signature |= {key: kind for key, kind in pointers.items() if key in signature}
    attributes = {}
    if is_launched:
        small = [["tt.pointer_range", 32]] if gpu.backend == "hip" else []
        aligned = {key: [["tt.divisibility", 16], *small] for key in pointers}
        aligned |= {
            key: [["tt.divisibility", 16]]
            for key in ("values_stride", "message_bytes", "count", "code_bytes", "scale_start")
        }
        names = kernel.arg_names
        attributes = {(names.index(k),): found for k, found in aligned.items() if k in names}
        if "rows" in names:
            signature["rows"], constants = "constexpr", constants | {"rows": 1}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu, options=dict(kernels.LAUNCH))
    return compiled.asm["ptx" if gpu.backend == "cuda" else "amdgcn"]
