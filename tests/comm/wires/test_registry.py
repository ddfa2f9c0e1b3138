"""Formats are found by their names, and kernels are used only if they equal plain torch."""

import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from megafrontier.comm.wires import block, registry
from megafrontier.comm.wires.block import INT4, INT8, BlockCodec
from megafrontier.comm.wires.registry import CastCodec, find_kernels, missing_kernels
from megafrontier.comm.wires.wire import make_wire
from megafrontier.config.layout import WireFormat

CODECS = [INT8, INT4]
ROTATING_INT8, ROTATING_INT4 = (codec.with_rotation() for codec in CODECS)


def test_the_configuration_accepts_exactly_the_registered_formats():
    names = {name for name, (codec, _) in registry.FORMATS.items() if not codec.is_sparse}
    assert set(get_args(WireFormat)) == names
    for name in names:
        assert make_wire(name).name == make_wire(name, rotates=True).name == name
        # The checks of a configuration know deltas by their name.
        assert make_wire(name).is_delta == name.startswith("delta")


def test_a_registered_codec_is_a_wire_format(monkeypatch):
    class Sign(CastCodec):
        name = "sign"
        is_cast = False
        delta_name = "delta1"

        def encode(self, values, messages, errors=None):
            messages.copy_(values.sign())

    codec = Sign(torch.float16)
    for name in (codec.name, codec.delta_name):
        monkeypatch.setitem(registry.FORMATS, name, None)  # removed after the test
    registry.register(codec)
    assert make_wire("sign").codec is codec
    assert not make_wire("sign").is_delta
    assert make_wire("delta1").is_delta
    assert make_wire("delta1").name == "delta1"


def test_a_cast_carries_no_errors():
    values = torch.ones(1, 3)
    with pytest.raises(ValueError, match="wire format bf16, need a quantized one"):
        make_wire("bf16").codec.encode(values, values.bfloat16(), values.bfloat16())


@pytest.fixture
def use_kernels(monkeypatch):
    """A function that makes its argument the kernels of a GPU, which is the processor here."""
    registry._load_kernels.cache_clear()
    on_cpu = lambda codec, kernels, _device: block._difference(kernels, codec, "cpu")  # noqa: E731
    monkeypatch.setattr(BlockCodec, "check_kernels", on_cpu)
    module = "megafrontier.comm.wires.block_triton"
    yield lambda kernels: monkeypatch.setitem(sys.modules, module, kernels)
    registry._load_kernels.cache_clear()


def make_kernels(**others):
    """Kernels that equal the reference, except for `others`."""
    equal = {
        "encode": lambda codec, *arguments: codec.encode(*arguments),
        "decode": lambda codec, *arguments: codec.decode(*arguments),
        "decode_sum": lambda codec, *arguments: codec.decode_sum(*arguments),
    }
    return SimpleNamespace(**equal | others)


def test_plain_torch_is_used_if_triton_cannot_build_its_kernels(use_kernels):
    """In a container without a C compiler, Triton fails at its first launch."""

    def encode(*_arguments):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    use_kernels(make_kernels(encode=encode))
    assert find_kernels(INT8, "cuda") is None
    reason = missing_kernels("cuda", [INT8])
    assert reason == "Failed to find C compiler. Please specify via CC"


def test_plain_torch_is_used_without_triton(use_kernels):
    use_kernels(None)  # as if the import failed
    assert find_kernels(INT8, "cuda") is None
    assert missing_kernels("cuda", [CastCodec(torch.bfloat16)]) is None
    assert "block_triton" in missing_kernels("cuda", [INT8])


def test_kernels_that_equal_the_reference_are_used(use_kernels):
    kernels = make_kernels()
    use_kernels(kernels)
    for codec in CODECS:
        assert find_kernels(codec, "cuda") is kernels
        assert find_kernels(codec, "cpu") is None
    assert missing_kernels("cuda", CODECS) is None


def test_kernels_that_differ_from_the_reference_are_not_used(use_kernels):
    """A compiler may build wrong ones for an untested device: 4-bit sums without the last row,
    rotated values with a wrong tail, rotated errors that are added but not replaced."""

    def encode(codec, values, messages, errors):
        kept = None if errors is None else errors.clone()
        codec.encode(values, messages, errors)
        if codec is ROTATING_INT4 and errors is not None:
            errors.copy_(kept)

    def decode_sum(codec, messages, out, accumulate):
        codec.decode_sum(messages[:-1] if codec is INT4 else messages, out, accumulate)

    def decode(codec, messages, out, accumulate):
        codec.decode(messages, out, accumulate)
        out[:, -1] += codec is ROTATING_INT8

    use_kernels(make_kernels(encode=encode, decode_sum=decode_sum, decode=decode))
    codecs = [*CODECS, ROTATING_INT8, ROTATING_INT4]
    reasons = [missing_kernels("cuda", [codec]) for codec in codecs]
    assert [find_kernels(codec, "cuda") is None for codec in codecs] == [False, True, True, True]
    assert reasons == [
        None,
        "Triton's 4-bit sums differ from those of plain torch",
        "Triton's 8-bit values differ from those of plain torch",
        "Triton's 4-bit errors differ from those of plain torch",
    ]
    assert missing_kernels("cuda", codecs) == reasons[1]
