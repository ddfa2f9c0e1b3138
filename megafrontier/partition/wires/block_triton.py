"""The block codecs as Triton kernels, for CUDA and ROCm: one pass over memory each way.

`encode` reads every value, and its error, once and writes the whole message, and what that fails to
say; `decode_sum` reads every message once and writes the sum once. Both say the same as the plain
torch of `codec.py` to the last bit, on wavefronts of 32 and 64 alike. What that takes:

- The largest magnitude is a maximum of integers: the bits of |x| order as |x| does, with infinity
  and NaN on top, while a maximum of floats drops NaN on some targets.
- Divisions are `div_rn`: plain `/` is an approximation in Triton's CUDA back end.
- Rounding half to even is the addition of 1.5 · 2^23, after which the low bits of the sum's bit
  pattern are the integer. No `rint`, whose name differs between CUDA and HIP, and no subtraction
  that a compiler could fold into the addition.
- bf16 is written and read as integers: rounding to bf16 is an addition to the bits, widening a
  shift. Triton's interpreter, which the tests run, is wrong about halves and subnormals there.
- Bytes of codes come from the host: a `count` that fits into 32 bits is of 32 bits here, and so
  would be 8 · `count`, which does not fit from 2^28 elements on.
- A rotation is seven rounds of sums and differences of pairs without a pass over memory, where a
  matrix product would have to write all values in fp32 before. Here alone is the last bit of a sum
  not the reference's, whose order is its library's; what one message says is, for it is exact.
- `enable_fp_fusion=False`, so that a compiler fuses none but what is written as `fma` here: the
  product of a code and a scale is exact in fp32 (15 bits, and see `codec.TOO_LARGE`), so that with
  a sum it is rounded once in either case.
- Triton compiles a kernel anew for arguments that are 1 or multiples of 16. Shards are multiples of
  128 elements, so all lengths in training are such multiples alike; by `scale_stop`, and by `rows`
  but for 1, nothing is gained, and they are not looked at. So what a run compares before its first
  step (`codec._difference`) is what it launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from megafrontier.partition.wires import rotation

if TYPE_CHECKING:
    from megafrontier.partition.wires.block import BlockCodec

ENCODED = 4096
"""Elements of a program: whole blocks, and per thread 16 bytes or more of fp32 at a time."""

FEWER = {"cuda": 2048, "hip": 4096}
"""The same where rows are summed, or rotated and errors kept, by back end, whose wavefronts mostly
are of 32 and of 64: 16 for each thread. With 32 fewer programs share a processor, for want of
registers, and too few bytes are on their way to it."""

TOO_LARGE = tl.constexpr(0x7F000000)
"""The bits of `codec.TOO_LARGE`."""

ROTATION = tl.constexpr(rotation.ROTATION)
THERE, BACK = tl.constexpr(rotation.THERE), tl.constexpr(rotation.BACK)

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""Four warps: of `ENCODED` elements 32 a thread on a wavefront of 32, 16 on one of 64."""


@triton.jit
def _round_to_bf16(bits):  # type: ignore[no-untyped-def]
    """bf16 bits of numbers by their fp32 bits, int32 both."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _widened(bits):  # type: ignore[no-untyped-def]
    """fp32 of bf16 by its bits, int16 or wider."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scales_as_bits(largest, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16 bits int32 [B] of blocks by the fp32 bits of their largest magnitudes, int32 [B]."""
    bits = tl.div_rn(largest.to(tl.float32, bitcast=True), Q * 1.0).to(tl.int32, bitcast=True)
    # 0x00800000 is the smallest normal number, 0x7FC0 a NaN of bf16.
    rounded = tl.where(bits < 0x00800000, 0, _round_to_bf16(bits))
    return tl.where(largest >= TOO_LARGE, 0x7FC0, rounded)


@triton.jit
def _round(x):  # type: ignore[no-untyped-def]
    """Sums and differences of the pairs along the last axis of x [rows, 2, 2, 2, 2, 2, 2, 2]."""
    one, other = tl.split(x)
    return tl.join(one + other, one - other)


@triton.jit
def _turn(x, at, whole, SCALE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 x [BLOCKS, BLOCK], the elements of a row at `at`, by the rotation's matrix of ±SCALE;
    from element `whole` on as they are."""
    # Seven rounds in which neighbours meet, by each bit of the index in turn, from the lowest on;
    # it stays behind, so that the bits end reversed. Values move between threads once.
    turned = _round(tl.reshape(x, [BLOCKS * BLOCK // ROTATION, 2, 2, 2, 2, 2, 2, 2]))
    turned = _round(tl.permute(turned, [0, 1, 2, 3, 4, 5, 7, 6]))
    turned = _round(tl.permute(turned, [0, 1, 2, 3, 4, 6, 7, 5]))
    turned = _round(tl.permute(turned, [0, 1, 2, 3, 5, 6, 7, 4]))
    turned = _round(tl.permute(turned, [0, 1, 2, 4, 5, 6, 7, 3]))
    turned = _round(tl.permute(turned, [0, 1, 3, 4, 5, 6, 7, 2]))
    turned = _round(tl.permute(turned, [0, 2, 3, 4, 5, 6, 7, 1]))
    return tl.where(at < whole, tl.reshape(turned, [BLOCKS, BLOCK]) * SCALE, x)


@triton.jit(do_not_specialize=["scale_stop"])
def _encode(  # type: ignore[no-untyped-def]
    values,
    messages,
    errors,
    values_stride,
    message_bytes,
    count,
    code_bytes,
    scale_start,
    scale_stop,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROTATES: tl.constexpr,
    FEEDS_BACK: tl.constexpr,
):
    """BLOCKS blocks of one row: absmax, scale, codes, packed; the row's last program pads. If it
    FEEDS_BACK, what the row's `errors`, int16 bits of bf16, add, and what then is left unsaid."""
    tiles = (count - 1) // (BLOCK * BLOCKS) + 1  # what cdiv adds may be too much for 32 bits
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    message = messages + row * message_bytes
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + row * values_stride + at, mask=at < count, other=0.0)
    if x.dtype == tl.bfloat16:
        x = _widened(x.to(tl.int16, bitcast=True))
    x = x.to(tl.float32)
    whole = count // ROTATION * ROTATION
    if FEEDS_BACK:
        errors += row * count
        x += _widened(tl.load(errors + at, mask=at < count, other=0))
        unsaid = x
    if ROTATES:
        x = _turn(x, at, whole, THERE, BLOCKS, BLOCK)

    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scales = _scales_as_bits(largest, (1 << (BITS - 1)) - 1)
    scale_pointers = (message + scale_start).to(tl.pointer_type(tl.int16)) + blocks
    tl.store(scale_pointers, scales.to(tl.int16), mask=blocks * BLOCK < count)

    steps = tl.where(scales == 0, 1.0, _widened(scales))
    inverse = tl.div_rn(1.0, steps)
    shifted = x * inverse[:, None] + 12582912.0  # 1.5 · 2^23, whose bits are 0x4B400000
    codes = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    codes = tl.where((largest >= TOO_LARGE)[:, None], 0, codes)

    if FEEDS_BACK:
        said = codes.to(tl.float32) * _widened(scales)[:, None]
        if ROTATES:
            said = _turn(said, at, whole, BACK, BLOCKS, BLOCK)
        bits = (unsaid - said).to(tl.int32, bitcast=True)
        rounded = tl.where((bits & 0x7F800000) == 0x7F800000, 0, _round_to_bf16(bits))
        rounded = tl.where((rounded & 0x7F80) == 0x7F80, 0, rounded)
        tl.store(errors + at, rounded.to(tl.int16), mask=at < count)

    if BITS == 8:
        tl.store(message + at, codes.to(tl.int8).to(tl.uint8, bitcast=True), mask=at < count)
    else:
        low, high = tl.split(tl.reshape(codes, [BLOCKS, BLOCK // 2, 2]))
        packed = (low & 0xF) | ((high & 0xF) << 4)
        at = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(message + at, packed.to(tl.uint8), mask=at < code_bytes)

    is_last = tile == tiles - 1
    gap = tl.arange(0, 2).to(tl.int64) + code_bytes
    tl.store(message + gap, tl.zeros([2], tl.uint8), mask=gap < tl.where(is_last, scale_start, 0))
    rest = tl.arange(0, 16).to(tl.int64) + scale_stop
    end = tl.where(is_last, message_bytes, 0)
    tl.store(message + rest, tl.zeros([16], tl.uint8), mask=rest < end)


@triton.jit
def _added(total, total_high, codes, scales, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums fp32 [B, width] with what a message adds by its codes uint8 [B, width] and scales
    int16 [B], bits of bf16: to the first 8-bit codes, or a byte's first 4-bit code, and its second
    to the other."""
    # With its sign bit turned round a code stands in the last bits of 2^23, from where a
    # subtraction takes it: on a GPU of NVIDIA a conversion takes twice as long.
    scales = _widened(scales)[:, None]
    if BITS == 8:
        bits = codes.to(tl.int32) ^ 0x4B000080
        code = bits.to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
        return tl.fma(code, scales, total), total_high
    bits = codes.to(tl.int32) ^ 0x4B000088
    low = (bits & 0x7FFFFF0F).to(tl.float32, bitcast=True) - 8388616.0  # 2^23 + 8
    high = (bits & 0x7FFFFFF0).to(tl.float32, bitcast=True) - 8388736.0  # 16 times the code
    return tl.fma(low, scales, total), tl.fma(high, scales * 0.0625, total_high)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _decode_sum(  # type: ignore[no-untyped-def]
    messages,
    out,
    message_bytes,
    count,
    code_bytes,
    scale_start,
    rows,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROTATES: tl.constexpr,
    ADDS: tl.constexpr,
):
    """BLOCKS blocks of one output row: the sum, in order, of `rows` messages that follow on; if it
    ADDS, onto what is there."""
    tiles = (count - 1) // (BLOCK * BLOCKS) + 1  # what cdiv adds may be too much for 32 bits
    output = (tl.program_id(0) // tiles).to(tl.int64)
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    WIDTH: tl.constexpr = BLOCK * BITS // 8
    code_at = blocks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    code_mask = code_at < code_bytes
    message = messages + output * rows * message_bytes

    # Of a byte's two 4-bit codes the first is summed in `total` and the second in `total_high`.
    total = tl.zeros([BLOCKS, WIDTH], tl.float32)
    total_high = tl.zeros([BLOCKS, WIDTH], tl.float32)
    # Of four messages at a time what is to be added is loaded first: at thousands of nodes a piece
    # is so small that few programs share the device, and each would wait for one message's bytes.
    for _ in tl.range(rows, loop_unroll_factor=4):
        codes = tl.load(message + code_at, mask=code_mask, other=0)
        scale_pointers = (message + scale_start).to(tl.pointer_type(tl.int16)) + blocks
        scales = tl.load(scale_pointers, mask=blocks * BLOCK < count, other=0)
        total, total_high = _added(total, total_high, codes, scales, BITS)
        message += message_bytes
    if BITS == 4:
        total = tl.reshape(tl.join(total, total_high), [BLOCKS, BLOCK])
    if ROTATES:
        total = _turn(total, at, count // ROTATION * ROTATION, BACK, BLOCKS, BLOCK)
    out += output * count
    if out.dtype.element_ty == tl.bfloat16:
        pointers = out.to(tl.pointer_type(tl.int16)) + at
        if ADDS:
            total += _widened(tl.load(pointers, mask=at < count, other=0))
        rounded = _round_to_bf16(total.to(tl.int32, bitcast=True)).to(tl.int16)
        rounded = tl.where(total == total, rounded, 0x7FC0)
        tl.store(pointers, rounded, mask=at < count)
    else:
        if ADDS:
            total += tl.load(out + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def encode(
    codec: BlockCodec,
    values: torch.Tensor,
    messages: torch.Tensor,
    errors: torch.Tensor | None = None,
) -> None:
    """Messages uint8 [rows, message_bytes(n)] of `values` [rows, n], fp32, bf16 or fp16, and, if
    given, of `errors` bf16 [rows, n].

    Raises ValueError where messages or errors are not contiguous.
    """
    rows, count = values.shape
    if values.stride(1) != 1:
        values = values.contiguous()
    _check_contiguous("messages", messages)
    if errors is not None:
        _check_contiguous("errors", errors)
    feeds_back = errors is not None
    errors = messages if errors is None else errors.view(torch.int16)
    tile = encoded_by_a_program(codec, feeds_back, _back_end())
    if programs := _programs(rows, count, tile):
        with torch.cuda.device_of(values):
            _encode[(programs,)](
                values,
                messages,
                errors,
                values.stride(0),
                messages.shape[1],
                count,
                codec.code_bytes(count),
                codec.scale_start(count),
                codec.scale_stop(count),
                **_constants(codec, tile),
                FEEDS_BACK=feeds_back,
                **LAUNCH,
            )


def encoded_by_a_program(codec: BlockCodec, feeds_back: bool, back_end: str) -> int:
    """Elements."""
    return FEWER[back_end] if codec.rotates and feeds_back else ENCODED


def _back_end() -> str:
    return "hip" if torch.version.hip else "cuda"


def decode(
    codec: BlockCodec, messages: torch.Tensor, out: torch.Tensor, adds: bool = False
) -> None:
    """Values of messages uint8 [rows, message_bytes(n)] into `out` [rows, n], fp32, bf16 or fp16,
    or, if it `adds`, onto what is there.

    Raises ValueError where `out` is not contiguous.
    """
    _check_contiguous("values", out)
    _launch_decode(codec, messages, out, 1, adds)


def decode_sum(
    codec: BlockCodec, messages: torch.Tensor, out: torch.Tensor, adds: bool = False
) -> None:
    """Sum of messages uint8 [rows, m], in the order of the rows, into `out` fp32 [count], or, if it
    `adds`, onto what is there.

    Raises ValueError where `out` is not contiguous fp32.
    """
    if out.dtype != torch.float32:
        raise ValueError(f"sums need fp32, not {out.dtype}")
    _check_contiguous("sums", out)
    _launch_decode(codec, messages, out.view(1, -1), messages.shape[0], adds)


def _check_contiguous(what: str, memory: torch.Tensor) -> None:
    if not memory.is_contiguous():
        raise ValueError(f"{what} need contiguous memory, not strides {memory.stride()}")


def _launch_decode(
    codec: BlockCodec, messages: torch.Tensor, out: torch.Tensor, rows: int, adds: bool
) -> None:
    """Each row of `out` [m, count] from `rows` of the messages uint8 [m · rows, bytes]."""
    count = out.shape[1]
    messages = messages.contiguous()
    tile = FEWER[_back_end()]
    if programs := _programs(out.shape[0], count, tile):
        with torch.cuda.device_of(messages):
            _decode_sum[(programs,)](
                messages,
                out,
                messages.shape[1],
                count,
                codec.code_bytes(count),
                codec.scale_start(count),
                rows,
                **_constants(codec, tile),
                ADDS=adds,
                **LAUNCH,
            )


def _programs(rows: int, count: int, tile: int) -> int:
    """Rows and tiles in one grid axis: the others stop at 65,535."""
    return rows * -(-count // tile)


def _constants(codec: BlockCodec, tile: int) -> dict[str, int]:
    """What a kernel is compiled for."""
    blocks = tile // codec.block
    return {"BITS": codec.bits, "BLOCK": codec.block, "BLOCKS": blocks, "ROTATES": codec.rotates}
