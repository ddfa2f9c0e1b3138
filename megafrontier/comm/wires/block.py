"""Blockwise symmetric quantization to 8 or 4 bits: the plain-torch reference of the codecs.

Note [Message layout]
A message of n elements is one buffer: the codes, one bf16 scale per block, then zeros up to a
multiple of 16 bytes. Codes come first because a GPU loads them 16 bytes at a time. Codes run from
-q to q (q = 127 or 7), and value = code × scale. The scale is the block's largest magnitude over
q, rounded to bf16. The rounding moves the largest value by less than half a step (q / 256), so its
code is still q: nothing is clipped, nothing is biased, and no element is off by more than half a
step (and the rounding of fp32).

Note [Ends of the range]
A block that holds a value that is not finite, or a magnitude of 2^127 or more, gets a NaN scale and
decodes to NaN everywhere. The gradient norm then shows it, and the step is skipped. As a result, a
code times its scale is always exact in fp32. A block whose scale would be subnormal (largest
magnitude below q · 2^-126, about 1e-36) is sent as zeros, because a subnormal bf16 has so few bits
that the largest code might not fit.

Note [Rotation]
A codec that rotates multiplies each 128 elements by a Hadamard matrix before it quantizes them.
This spreads an outlier over its block, so that the other elements keep their bits (as in SDP4Bit,
arXiv:2410.15526). The matrix is Sylvester's, ±1, with its rows in bit-reversed order. It is its own
inverse except for a factor, and kernels need not reorder the rows, which would move every value
between threads twice more. A tail shorter than 128 elements is not rotated.

On a GPU with Triton, `block_triton.py` writes the same messages to the byte.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import torch

from megafrontier.comm.wires.registry import Codec, find_kernels, register, store
from megafrontier.parallel.hierarchy import SHARD_ALIGNMENT

MESSAGE_ALIGNMENT = 16
"""Bytes. RCCL and NCCL copy in units of 16 bytes and are slow on the rest."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of bf16 and fp32."""

TOO_LARGE = 2.0**127
"""From this magnitude on, a rounded scale times the largest code could exceed fp32."""

ROTATION = 128
"""Elements that one rotation mixes. Blocks are multiples of it."""

ROTATE_SCALE, ROTATE_BACK_SCALE = 1 / 8, 1 / 16
"""Factors of the matrices. Powers of two with the product 1 / ROTATION are exact in any arithmetic;
TF32 would shorten 1/√128, and each rotation would shrink the values."""

_SLAB = {"cpu": 1 << 19}
"""Elements processed at a time. On a CPU, temporaries then stay in cache and in memory that the
process already has; fresh pages for whole gradients cost ten times as much as the arithmetic."""


@dataclass(frozen=True)
class BlockCodec(Codec):
    """`bits` (8 or 4) per element and one scale per `block` elements (Note [Message layout])."""

    bits: int
    block: int
    rotates: bool = False

    is_quantized = True
    dtype = torch.uint8

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def delta_name(self) -> str:
        return f"delta{self.bits}"

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def with_rotation(self) -> "BlockCodec":
        return replace(self, rotates=True)

    def check_kernels(self, kernels: ModuleType, device_type: str) -> str | None:
        return _difference(kernels, self, device_type)

    def message_bytes(self, count: int) -> int:
        return -(-self.scale_stop(count) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT

    def scale_start(self, count: int) -> int:
        """First byte of the scales: the first even one after the codes."""
        return (self.code_bytes(count) + 1) // 2 * 2

    def scale_stop(self, count: int) -> int:
        """First byte after the scales."""
        return self.scale_start(count) + 2 * -(-count // self.block)

    def code_bytes(self, count: int) -> int:
        """Bytes of the codes of `count` elements."""
        return -(-count * self.bits // 8)

    def encode(
        self, values: torch.Tensor, messages: torch.Tensor, errors: torch.Tensor | None = None
    ) -> None:
        """As `Codec.encode`. The sum with `errors` is in fp32; errors that are not finite become
        zero."""
        if kernels := find_kernels(self, values.device.type):
            return kernels.encode(self, values, messages, errors)
        rows, count = values.shape
        messages[:, self.code_bytes(count) : self.scale_start(count)] = 0
        messages[:, self.scale_stop(count) :] = 0
        for first, last in self._slabs(rows, count, values.device):
            part = values[:, first:last]
            if errors is None:
                self._encode_slab(part, messages, count, first)
            else:
                part = part.float() + errors[:, first:last]  # in bf16 the sum would round
                self._encode_slab(part, messages, count, first)
                sent = self._restore(messages, count, first, last, self.rotates)
                torch.sub(part, sent, out=errors[:, first:last])
                # The step is skipped; its errors must not come back in the next step.
                errors[:, first:last].nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
        """As `Codec.decode`, with the same bits on every device."""
        if kernels := find_kernels(self, messages.device.type):
            return kernels.decode(self, messages, out, accumulate)
        rows, count = out.shape
        for first, last in self._slabs(rows, count, messages.device):
            values = self._restore(messages, count, first, last, self.rotates)
            store(values, out[:, first:last], accumulate)

    def decode_sum(
        self, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False
    ) -> None:
        if kernels := find_kernels(self, messages.device.type):
            return kernels.decode_sum(self, messages, out, accumulate)
        count = out.numel()
        for first, last in self._slabs(1, count, out.device):
            total = self._restore(messages[:1], count, first, last)
            for row in range(1, messages.shape[0]):
                total += self._restore(messages[row : row + 1], count, first, last)
            total = rotate_back(total) if self.rotates else total
            store(total[0], out[first:last], accumulate)

    def _encode_slab(
        self, part: torch.Tensor, messages: torch.Tensor, count: int, first: int
    ) -> None:
        """Write the codes and scales of `part` [rows, m], the elements from `first` on, into
        messages of `count` elements."""
        scales, packed = self._quantize(rotate(part) if self.rotates else part)
        at, stop = self.code_bytes(first), self.code_bytes(first + part.shape[1])
        messages[:, at:stop] = packed[:, : stop - at]
        at = self.scale_start(count) + first // self.block * 2
        messages[:, at : at + 2 * scales.shape[1]] = scales.view(torch.uint8)

    def _slabs(self, rows: int, count: int, device: torch.device) -> list[tuple[int, int]]:
        """Column ranges [first, last) of about a slab of elements each. All but the last hold whole
        blocks."""
        wanted = _SLAB.get(device.type, 1 << 26) // max(rows, 1)
        width = max(wanted // self.block, 1) * self.block
        return [(first, min(first + width, count)) for first in range(0, count, width)]

    def _quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 scales [rows, blocks] and packed codes uint8 of `values` [rows, n]."""
        blocks = self._blocks(values)
        scales = self._scales(blocks.abs().amax(-1))
        steps = scales.float()
        steps.masked_fill_(steps == 0, 1.0)  # 0 / 1 keeps the zeros of an all-zero block
        # One division per block: on a GPU, an exact division takes ten times as long as a product.
        # The rounding of the reciprocal moves no element by more than about 1e-5 of a step.
        inverse = steps.reciprocal_().unsqueeze(-1)
        codes = (blocks * inverse).round_().nan_to_num_(0.0).to(torch.int8)
        return scales, self._pack(codes.view(values.shape[0], -1))

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, blocks, block] of `values` [rows, n]: a view if possible, else a copy whose
        last block is padded with zeros."""
        rows, count = values.shape
        if missing := -count % self.block:
            padded = values.new_zeros(rows, count + missing, dtype=torch.float32)
            padded[:, :count] = values
            return padded.view(rows, -1, self.block)
        return values.float().view(rows, -1, self.block)

    def _scales(self, largest: torch.Tensor) -> torch.Tensor:
        """bf16 scales of blocks with the `largest` magnitudes, fp32 of the same shape."""
        # Divide by a tensor. For a Python number, torch multiplies by the rounded 1/q on a GPU, so
        # that a CPU and a GPU would disagree about one scale in thousands.
        scales = largest / torch.full_like(largest, self.largest)
        scales.masked_fill_(scales < SMALLEST_SCALE, 0.0)
        rounded = scales.to(torch.bfloat16)
        # NaN, because 0 × code cannot hide it. Set these bits, because torch writes 0x7FC0 or
        # 0xFFFF depending on whether the element was part of a vector.
        rounded.view(torch.int16).masked_fill_(~(largest < TOO_LARGE), 0x7FC0)
        return rounded

    def _restore(
        self, messages: torch.Tensor, count: int, first: int, last: int, rotates_back: bool = False
    ) -> torch.Tensor:
        """Elements [first, last) fp32 [rows, last - first] of messages of `count` elements, still
        rotated unless `rotates_back`."""
        start = self.scale_start(count)
        blocks = slice(start + first // self.block * 2, start + -(-last // self.block) * 2)
        scales = messages[:, blocks].contiguous().view(torch.bfloat16).float().unsqueeze(-1)
        codes = self._unpack(messages[:, self.code_bytes(first) : self.code_bytes(last)])
        codes = codes[:, : last - first]
        # All elements that a rotation mixes have the same scale, so the codes are rotated: that is
        # exact.
        values = self._blocks(rotate_back(codes.float()) if rotates_back else codes).mul_(scales)
        return values.view(messages.shape[0], -1)[:, : last - first]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Bytes of int8 codes [rows, even]: one per code, or two 4-bit codes, the first one low."""
        if self.bits == 8:
            return codes.view(torch.uint8)
        # As 16-bit words (little-endian), two neighbours are combined without strided copies.
        pairs = codes.view(torch.int16)
        low = pairs & 0x000F
        return pairs.bitwise_right_shift_(4).bitwise_and_(0x00F0).bitwise_or_(low).to(torch.uint8)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """int8 codes of bytes [rows, n], the inverse of `_pack`."""
        if self.bits == 8:
            return packed.view(torch.int8)
        pairs = packed.to(torch.int16)
        pairs = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        # 0…15 → -8…7: flip the sign bit of the four, then subtract the 8 that it stood for.
        return pairs.view(torch.int8).bitwise_xor_(8).sub_(8)


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Rotated fp32 copy of [rows, n] of any float type, √2 times as large; see `rotate_back`."""
    return _multiply(values.float(), ROTATE_SCALE)


def rotate_back(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`, fp32 [rows, n].

    It is exact, with the same bits on every device, for integers of up to 8 bits: these fit into
    TF32, and their sums of 128 fit into fp32 in whatever order a matrix product adds them.
    """
    return _multiply(values, ROTATE_BACK_SCALE)


def _multiply(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply each whole block of ROTATION elements of fp32 [rows, n] by the scaled matrix."""
    whole = values.shape[1] // ROTATION * ROTATION
    blocks = values[:, :whole].reshape(-1, ROTATION)
    # With `out`, autocast around the caller does not compute the product in fewer bits.
    turned = torch.mm(blocks, _sylvester(scale, values.device), out=torch.empty_like(blocks))
    turned = turned.view(values.shape[0], whole)
    return torch.cat([turned, values[:, whole:]], dim=1) if whole < values.shape[1] else turned


@cache
def _sylvester(scale: float, device: torch.device) -> torch.Tensor:
    """±`scale` [ROTATION, ROTATION]: negative in row r and column c if bit-reversed r and c have an
    odd number of bits in common. Symmetric; its square is 128 · scale² times the identity."""
    matrix = torch.ones(1, 1, dtype=torch.float32)  # whatever torch's default type is
    while matrix.shape[0] < ROTATION:
        rows = torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)
        matrix = torch.stack(rows, 1).flatten(0, 1)
    return (matrix * scale).to(device)


_KERNELS = {"cuda": "megafrontier.comm.wires.block_triton"}
INT8 = register(BlockCodec(bits=8, block=256), _KERNELS)
INT4 = register(BlockCodec(bits=4, block=SHARD_ALIGNMENT), _KERNELS)


def _difference(kernels: ModuleType, codec: BlockCodec, device: str) -> str | None:
    """How the results of `kernels` differ from those of plain torch: for ties, tails, zeros and a
    NaN. A version of Triton may compile the kernels wrongly for a device that nobody has tried."""
    # Kernels sum four rows at a time, so six cover that and two alone. The length is one that
    # shards have: for others, Triton would compile and this would compare kernels that training
    # never runs.
    rows, count = 6, 33 * SHARD_ALIGNMENT
    waves = torch.arange(rows * count, dtype=torch.float32).mul_(12.9898).sin_()
    values = waves.view(rows, count) * codec.largest
    halves = torch.arange(codec.block, dtype=torch.float32).sub_(codec.largest) / 2
    values[0, : codec.block] = halves
    values[0, 0], values[1, : codec.block], values[2, -1] = codec.largest, 0.0, math.nan
    if codec.rotates:  # only values whose sums are exact; sums of several messages are not
        values = values.mul_(64).round_().div_(64)
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for dtype, accumulate in product(dtypes, (False, True)):
        expected = _results(BlockCodec, codec, values.to(dtype), accumulate)
        results = _results(kernels, codec, values.to(device, dtype), accumulate)
        for name, tensor in expected.items():
            tolerance = 1e-3 if codec.rotates and name == "sums" else 0.0
            if not torch.allclose(results[name].cpu(), tensor, 0.0, tolerance, equal_nan=True):
                return f"Triton's {codec.bits}-bit {name} differ from those of plain torch"
    return None


def _results(
    kernels: Any, codec: BlockCodec, values: torch.Tensor, accumulate: bool
) -> dict[str, torch.Tensor]:
    """Results of encoding and decoding `values` [rows, n] on their device; with `accumulate`, of
    encoding with errors and of decoding onto ones."""
    rows, count = values.shape
    messages = values.new_empty(rows, codec.message_bytes(count), dtype=codec.dtype)
    errors = torch.full_like(values, 0.25, dtype=torch.bfloat16)
    decoded = torch.ones_like(values)
    sums = torch.ones_like(values[0], dtype=torch.float32)
    kernels.encode(codec, values, messages, errors if accumulate else None)
    kernels.decode(codec, messages, decoded, accumulate)
    kernels.decode_sum(codec, messages, sums, accumulate)
    return {"messages": messages, "errors": errors, "values": decoded, "sums": sums}
