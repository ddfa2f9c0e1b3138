"""The block codecs as Triton kernels, for CUDA and ROCm: one pass over memory each way.

`encode` reads every value and error once and writes the whole message and the new error.
`decode_sum` reads every message once and writes the sum once.

Note [Same bits as the reference]
Both give the bits of the plain torch in `block.py`, with wavefronts of 32 and of 64. This needs:

- The largest magnitude is a maximum of integers. The bits of |x| order as |x| does, with infinity
  and NaN on top, but a maximum of floats drops NaN on some targets.
- Divisions are `div_rn`, because `/` is an approximation in Triton's CUDA back end.
- Rounding half to even is the addition of 1.5 · 2^23. The low bits of the sum are then the integer.
  `rint` has different names on CUDA and HIP, and a compiler could fold a subtraction into the
  addition.
- bf16 is written and read as integers: rounding to bf16 is an addition to the bits, and widening
  is a shift. Triton's interpreter, which the tests use, rounds halves and subnormals wrongly.
- The host passes the bytes of codes. A `count` that fits into 32 bits has 32 bits here, but
  8 · `count` overflows them from 2^28 elements on.
- A rotation is seven butterfly stages in registers. A matrix product would first write all values
  in fp32. Only here can the last bit of a sum differ from the reference, whose order is its
  library's. The values of one message do not differ, because they are exact.
- `enable_fp_fusion=False`: the compiler fuses only what is written as `fma`. The product of a code
  and a scale is exact in fp32 (15 bits, and see `block.TOO_LARGE`), so a sum with it rounds once
  in either case.
- Triton compiles a kernel again for arguments that are 1 or multiples of 16. Shards are multiples
  of 128 elements, so all lengths in training are such multiples. Specializing on `scale_stop`, or
  on `rows` other than 1, gains nothing and is switched off. So the kernels that a run compares
  before its first step (`block._difference`) are the kernels that it launches.
"""

import torch
import triton
import triton.language as tl

from megafrontier.comm.wires import block
from megafrontier.comm.wires.block import BlockCodec

ENCODE_TILE = 4096
"""Elements per program: whole blocks, and at least 16 bytes of fp32 per thread at a time."""

SMALL_TILE = {"cuda": 2048, "hip": 4096}
"""Elements per program, by back end, if it sums rows, or rotates and keeps errors: 16 per thread,
with the usual wavefronts of 32 (CUDA) and 64 (HIP). With 32 per thread, registers would limit how
many programs share a processor, and too few bytes would be in flight."""

TOO_LARGE = tl.constexpr(0x7F000000)
"""The bits of `block.TOO_LARGE`."""

ROTATION = tl.constexpr(block.ROTATION)
ROTATE_SCALE = tl.constexpr(block.ROTATE_SCALE)
ROTATE_BACK_SCALE = tl.constexpr(block.ROTATE_BACK_SCALE)

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""With 4 warps, a thread has 32 elements of an `ENCODE_TILE` on a wavefront of 32, 16 on one of
64."""


@triton.jit
def _round_to_bf16(bits):  # type: ignore[no-untyped-def]
    """bf16 bits, as int32, of numbers with the fp32 `bits`, int32."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _bf16_to_fp32(bits):  # type: ignore[no-untyped-def]
    """fp32 values of bf16 `bits`, int16 or wider."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scales_as_bits(largest, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16 bits int32 [B] of the scales of blocks, given the fp32 bits of their largest magnitudes,
    int32 [B]."""
    bits = tl.div_rn(largest.to(tl.float32, bitcast=True), Q * 1.0).to(tl.int32, bitcast=True)
    # 0x00800000 is the smallest normal number, 0x7FC0 a NaN of bf16.
    rounded = tl.where(bits < 0x00800000, 0, _round_to_bf16(bits))
    return tl.where(largest >= TOO_LARGE, 0x7FC0, rounded)


@triton.jit
def _butterfly(x):  # type: ignore[no-untyped-def]
    """Sums and differences of the pairs along the last axis of x [rows, 2, 2, 2, 2, 2, 2, 2]."""
    one, other = tl.split(x)
    return tl.join(one + other, one - other)


@triton.jit
def _rotate(x, at, whole, SCALE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate fp32 x [BLOCKS, BLOCK], elements of a row with the indices `at`, by the matrix of
    ±SCALE. Elements from `whole` on stay as they are."""
    # Seven stages, one per bit of the index from the lowest on. The bit that a stage has combined
    # stays last, so the bits end reversed. Values move between threads once.
    rotated = _butterfly(tl.reshape(x, [BLOCKS * BLOCK // ROTATION, 2, 2, 2, 2, 2, 2, 2]))
    rotated = _butterfly(tl.permute(rotated, [0, 1, 2, 3, 4, 5, 7, 6]))
    rotated = _butterfly(tl.permute(rotated, [0, 1, 2, 3, 4, 6, 7, 5]))
    rotated = _butterfly(tl.permute(rotated, [0, 1, 2, 3, 5, 6, 7, 4]))
    rotated = _butterfly(tl.permute(rotated, [0, 1, 2, 4, 5, 6, 7, 3]))
    rotated = _butterfly(tl.permute(rotated, [0, 1, 3, 4, 5, 6, 7, 2]))
    rotated = _butterfly(tl.permute(rotated, [0, 2, 3, 4, 5, 6, 7, 1]))
    return tl.where(at < whole, tl.reshape(rotated, [BLOCKS, BLOCK]) * SCALE, x)


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
    """Encode BLOCKS blocks of one row: absmax, scale, codes, packing. The row's last program pads
    the message. With FEEDS_BACK, add the row's `errors`, int16 bits of bf16, and replace them."""
    tiles = (count - 1) // (BLOCK * BLOCKS) + 1  # cdiv could overflow 32 bits
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    message = messages + row * message_bytes
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + row * values_stride + at, mask=at < count, other=0.0)
    if x.dtype == tl.bfloat16:
        x = _bf16_to_fp32(x.to(tl.int16, bitcast=True))
    x = x.to(tl.float32)
    whole = count // ROTATION * ROTATION
    if FEEDS_BACK:
        errors += row * count
        x += _bf16_to_fp32(tl.load(errors + at, mask=at < count, other=0))
        original = x
    if ROTATES:
        x = _rotate(x, at, whole, ROTATE_SCALE, BLOCKS, BLOCK)

    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scales = _scales_as_bits(largest, (1 << (BITS - 1)) - 1)
    scale_pointers = (message + scale_start).to(tl.pointer_type(tl.int16)) + blocks
    tl.store(scale_pointers, scales.to(tl.int16), mask=blocks * BLOCK < count)

    steps = tl.where(scales == 0, 1.0, _bf16_to_fp32(scales))
    inverse = tl.div_rn(1.0, steps)
    shifted = x * inverse[:, None] + 12582912.0  # 1.5 · 2^23, whose bits are 0x4B400000
    codes = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    codes = tl.where((largest >= TOO_LARGE)[:, None], 0, codes)

    if FEEDS_BACK:
        decoded = codes.to(tl.float32) * _bf16_to_fp32(scales)[:, None]
        if ROTATES:
            decoded = _rotate(decoded, at, whole, ROTATE_BACK_SCALE, BLOCKS, BLOCK)
        bits = (original - decoded).to(tl.int32, bitcast=True)
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
def _add_message(total, total_high, codes, scales, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums fp32 [B, width] plus the values of a message with codes uint8 [B, width] and scales
    int16 [B], bits of bf16. `total` takes 8-bit codes, or the first 4-bit code of each byte;
    `total_high` takes the second."""
    # A code with its sign bit flipped is put into the low bits of 2^23, and a subtraction gives its
    # value. On NVIDIA GPUs, a conversion takes twice as long.
    scales = _bf16_to_fp32(scales)[:, None]
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
    ACCUMULATE: tl.constexpr,
):
    """Sum BLOCKS blocks of `rows` consecutive messages, in order, into one output row, or with
    ACCUMULATE add them to it."""
    tiles = (count - 1) // (BLOCK * BLOCKS) + 1  # cdiv could overflow 32 bits
    output = (tl.program_id(0) // tiles).to(tl.int64)
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    WIDTH: tl.constexpr = BLOCK * BITS // 8
    code_at = blocks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    code_mask = code_at < code_bytes
    message = messages + output * rows * message_bytes

    # `total` sums the first 4-bit code of each byte, `total_high` the second.
    total = tl.zeros([BLOCKS, WIDTH], tl.float32)
    total_high = tl.zeros([BLOCKS, WIDTH], tl.float32)
    # Unrolled, the loads of four messages come before their sums. At thousands of nodes a shard is
    # so small that few programs share the device, and each would wait for one message's bytes.
    for _ in tl.range(rows, loop_unroll_factor=4):
        codes = tl.load(message + code_at, mask=code_mask, other=0)
        scale_pointers = (message + scale_start).to(tl.pointer_type(tl.int16)) + blocks
        scales = tl.load(scale_pointers, mask=blocks * BLOCK < count, other=0)
        total, total_high = _add_message(total, total_high, codes, scales, BITS)
        message += message_bytes
    if BITS == 4:
        total = tl.reshape(tl.join(total, total_high), [BLOCKS, BLOCK])
    if ROTATES:
        total = _rotate(total, at, count // ROTATION * ROTATION, ROTATE_BACK_SCALE, BLOCKS, BLOCK)
    out += output * count
    if out.dtype.element_ty == tl.bfloat16:
        pointers = out.to(tl.pointer_type(tl.int16)) + at
        if ACCUMULATE:
            total += _bf16_to_fp32(tl.load(pointers, mask=at < count, other=0))
        rounded = _round_to_bf16(total.to(tl.int32, bitcast=True)).to(tl.int16)
        rounded = tl.where(total == total, rounded, 0x7FC0)
        tl.store(pointers, rounded, mask=at < count)
    else:
        if ACCUMULATE:
            total += tl.load(out + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def encode(
    codec: BlockCodec,
    values: torch.Tensor,
    messages: torch.Tensor,
    errors: torch.Tensor | None = None,
) -> None:
    """As `BlockCodec.encode`, for `values` of fp32, bf16 or fp16.

    Raises ValueError if messages or errors are not contiguous.
    """
    rows, count = values.shape
    if values.stride(1) != 1:
        values = values.contiguous()
    _check_contiguous("messages", messages)
    if errors is not None:
        _check_contiguous("errors", errors)
    feeds_back = errors is not None
    errors = messages if errors is None else errors.view(torch.int16)
    tile = encode_tile(codec, feeds_back, _back_end())
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


def encode_tile(codec: BlockCodec, feeds_back: bool, back_end: str) -> int:
    """Elements that one program encodes."""
    return SMALL_TILE[back_end] if codec.rotates and feeds_back else ENCODE_TILE


def _back_end() -> str:
    return "hip" if torch.version.hip else "cuda"


def decode(
    codec: BlockCodec, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False
) -> None:
    """As `BlockCodec.decode`, into fp32, bf16 or fp16.

    Raises ValueError if `out` is not contiguous.
    """
    _check_contiguous("values", out)
    _launch_decode(codec, messages, out, 1, accumulate)


def decode_sum(
    codec: BlockCodec, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False
) -> None:
    """As `BlockCodec.decode_sum`. Raises ValueError if `out` is not contiguous fp32."""
    if out.dtype != torch.float32:
        raise ValueError(f"sums: {out.dtype}, need fp32")
    _check_contiguous("sums", out)
    _launch_decode(codec, messages, out.view(1, -1), messages.shape[0], accumulate)


def _check_contiguous(name: str, memory: torch.Tensor) -> None:
    if not memory.is_contiguous():
        raise ValueError(f"{name}: strides {memory.stride()}, need contiguous memory")


def _launch_decode(
    codec: BlockCodec, messages: torch.Tensor, out: torch.Tensor, rows: int, accumulate: bool
) -> None:
    """Write or add to each row of `out` [m, count] the sum of `rows` messages uint8
    [m · rows, bytes]."""
    count = out.shape[1]
    messages = messages.contiguous()
    tile = SMALL_TILE[_back_end()]
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
                ACCUMULATE=accumulate,
                **LAUNCH,
            )


def _programs(rows: int, count: int, tile: int) -> int:
    """Size of the grid. Rows and tiles share one axis, because the others stop at 65,535."""
    return rows * -(-count // tile)


def _constants(codec: BlockCodec, tile: int) -> dict[str, int]:
    """Compile-time arguments of both kernels."""
    blocks = tile // codec.block
    return {"BITS": codec.bits, "BLOCK": codec.block, "BLOCKS": blocks, "ROTATES": codec.rotates}
