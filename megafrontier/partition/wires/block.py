"""Blockwise symmetric quantisation: the plain-torch reference of every low-bit wire, and its door.

A message of n elements is, in one buffer: the codes, a bf16 scale for each block, then zeros up to
a multiple of 16 bytes; so codes lie as a GPU loads them, 16 bytes at a time. They run from -q to q
(q = 127 or 7), value = code × scale, and the scale is the block's largest magnitude over q, rounded
to bf16. That moves the largest value by less than half a step (q / 256), so its code is q all the
same: nothing is clipped, nothing is biased, and no element errs by more than half a step (and
fp32's own rounding).

Two ends of the range are set apart. A block with a value that is not finite, or of magnitude 2^127
or more, gets a NaN scale and decodes to NaN everywhere: the gradient norm then tells, and the step
is skipped. So a code times its scale is always exact in fp32. A block whose scale would be
subnormal (largest magnitude below q · 2^-126, about 1e-36) is sent as zeros: a subnormal bf16 has
so few bits that the largest code would not fit any more.

On a GPU with Triton the same messages, to the byte, come from `block_triton.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from types import ModuleType

import torch

from megafrontier.partition.layout import SHARD_ALIGNMENT
from megafrontier.partition.wires.rotation import rotate, rotate_back

MESSAGE_ALIGNMENT = 16
"""Bytes. RCCL and NCCL copy in 16-byte units and are slow on the rest."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of bf16 and fp32."""

TOO_LARGE = 2.0**127
"""From this magnitude on a rounded scale could carry the largest code beyond fp32."""

Pass = Callable[..., None]
"""`encode`, `decode` or `decode_sum`."""

_SLAB = {"cpu": 1 << 19}
"""Elements worked on at a time. On a CPU the temporaries then stay in cache and in memory the
process already has: fresh pages for whole gradients cost ten times the arithmetic."""


@dataclass(frozen=True)
class BlockCodec:
    """`bits` (8 or 4) for an element, one scale for each `block` of them; with `rotates` the codes
    are of the rotated values (`rotation.py`), and what is decoded has been rotated back."""

    bits: int
    block: int
    rotates: bool = False

    dtype = torch.uint8
    """Of a message's elements."""

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def message_bytes(self, count: int) -> int:
        """Bytes of a message of `count` elements."""
        return -(-self.scale_stop(count) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT

    def scale_start(self, count: int) -> int:
        """Where the scales begin: behind the codes, at an even byte."""
        return (self.code_bytes(count) + 1) // 2 * 2

    def scale_stop(self, count: int) -> int:
        """Where they end."""
        return self.scale_start(count) + 2 * -(-count // self.block)

    def code_bytes(self, count: int) -> int:
        """Bytes of the codes of `count` elements."""
        return -(-count * self.bits // 8)

    def encode(
        self, values: torch.Tensor, messages: torch.Tensor, errors: torch.Tensor | None = None
    ) -> None:
        """Write messages uint8 [rows, message_bytes(n)] of `values` [rows, n], any float type.

        With `errors` bf16 [rows, n] these are added first, in fp32; what the messages then fail to
        say stands there, and zero where that is not finite.
        """
        if kernels := _kernels(values.device.type, self):
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
                said = self._restore(messages, count, first, last, self.rotates)
                torch.sub(part, said, out=errors[:, first:last])
                # The step is skipped; its errors must not come back in the next.
                errors[:, first:last].nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, messages: torch.Tensor, out: torch.Tensor, adds: bool = False) -> None:
        """Values of messages uint8 [rows, message_bytes(n)] into `out` [rows, n], any float type,
        or, if it `adds`, onto what is there; in fp32, rounded once, the same bits on every
        device."""
        if kernels := _kernels(messages.device.type, self):
            return kernels.decode(self, messages, out, adds)
        rows, count = out.shape
        for first, last in self._slabs(rows, count, messages.device):
            values = self._restore(messages, count, first, last, self.rotates)
            _put(values, out[:, first:last], adds)

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor, adds: bool = False) -> None:
        """Sum of all messages' values, in the order of the rows, into `out` fp32 [count], or, if it
        `adds`, onto what is there."""
        if kernels := _kernels(messages.device.type, self):
            return kernels.decode_sum(self, messages, out, adds)
        count = out.numel()
        for first, last in self._slabs(1, count, out.device):
            total = self._restore(messages[:1], count, first, last)
            for row in range(1, messages.shape[0]):
                total += self._restore(messages[row : row + 1], count, first, last)
            total = rotate_back(total) if self.rotates else total
            _put(total[0], out[first:last], adds)

    def _encode_slab(
        self, part: torch.Tensor, messages: torch.Tensor, count: int, first: int
    ) -> None:
        """Write what messages of `count` elements say of `part` [rows, m], from `first` on."""
        scales, packed = self._quantise(rotate(part) if self.rotates else part)
        at, stop = self.code_bytes(first), self.code_bytes(first + part.shape[1])
        messages[:, at:stop] = packed[:, : stop - at]
        at = self.scale_start(count) + first // self.block * 2
        messages[:, at : at + 2 * scales.shape[1]] = scales.view(torch.uint8)

    def _slabs(self, rows: int, count: int, device: torch.device) -> list[tuple[int, int]]:
        """Ranges of columns, of whole blocks but for the last, about a slab of elements each."""
        wanted = _SLAB.get(device.type, 1 << 26) // max(rows, 1)
        width = max(wanted // self.block, 1) * self.block
        return [(first, min(first + width, count)) for first in range(0, count, width)]

    def _quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 scales [rows, blocks] and packed codes uint8 of `values` [rows, n]."""
        blocks = self._blocks(values)
        scales = self._scales(blocks.abs().amax(-1))
        steps = scales.float()
        steps.masked_fill_(steps == 0, 1.0)  # 0 / 1 keeps the zeros of an all-zero block
        # One division for each block: an exact one takes a GPU ten times as long as a product, and
        # the reciprocal's rounding moves no element by more than some 1e-5 of a step.
        inverse = steps.reciprocal_().unsqueeze(-1)
        codes = (blocks * inverse).round_().nan_to_num_(0.0).to(torch.int8)
        return scales, self._pack(codes.view(values.shape[0], -1))

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, blocks, block] of `values` [rows, n], the last block filled up with zeros;
        the values themselves where they fit."""
        rows, count = values.shape
        if missing := -count % self.block:
            padded = values.new_zeros(rows, count + missing, dtype=torch.float32)
            padded[:, :count] = values
            return padded.view(rows, -1, self.block)
        return values.float().view(rows, -1, self.block)

    def _scales(self, largest: torch.Tensor) -> torch.Tensor:
        """bf16 scales of blocks by their `largest` magnitudes, fp32 of the same shape."""
        # By a tensor: torch on a GPU would multiply by the rounded 1/q of a Python number, and a
        # CPU and a GPU would then disagree about one scale in thousands.
        scales = largest / torch.full_like(largest, self.largest)
        scales.masked_fill_(scales < SMALLEST_SCALE, 0.0)
        rounded = scales.to(torch.bfloat16)
        # NaN, which 0 × code cannot hide; the NaN of these bits, because torch writes 0x7FC0 or
        # 0xFFFF by whether the element fell into a vector.
        rounded.view(torch.int16).masked_fill_(~(largest < TOO_LARGE), 0x7FC0)
        return rounded

    def _restore(
        self, messages: torch.Tensor, count: int, first: int, last: int, rotates_back: bool = False
    ) -> torch.Tensor:
        """Elements `first` to `last` fp32 [rows, last - first] of messages of `count` elements,
        still rotated, or rotated back."""
        start = self.scale_start(count)
        blocks = slice(start + first // self.block * 2, start + -(-last // self.block) * 2)
        scales = messages[:, blocks].contiguous().view(torch.bfloat16).float().unsqueeze(-1)
        codes = self._unpack(messages[:, self.code_bytes(first) : self.code_bytes(last)])
        codes = codes[:, : last - first]
        # All elements that a rotation mixes have one scale: so it may turn the codes, exactly.
        values = self._blocks(rotate_back(codes.float()) if rotates_back else codes).mul_(scales)
        return values.view(messages.shape[0], -1)[:, : last - first]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """int8 codes [rows, even] → bytes; two 4-bit codes a byte, the first one low."""
        if self.bits == 8:
            return codes.view(torch.uint8)
        # As 16-bit words (little-endian) the two neighbours are at hand without strided copies.
        pairs = codes.view(torch.int16)
        low = pairs & 0x000F
        return pairs.bitwise_right_shift_(4).bitwise_and_(0x00F0).bitwise_or_(low).to(torch.uint8)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """int8 codes of bytes [rows, n], the inverse of `_pack`."""
        if self.bits == 8:
            return packed.view(torch.int8)
        pairs = packed.to(torch.int16)
        pairs = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        # 0…15 → -8…7: the sign bit of four flips, and the eight it stood for is taken away.
        return pairs.view(torch.int8).bitwise_xor_(8).sub_(8)


def _put(values: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
    if adds:
        out.add_(values)
    else:
        out.copy_(values)


INT8 = BlockCodec(bits=8, block=256)
INT4 = BlockCodec(bits=4, block=SHARD_ALIGNMENT)


def missing_kernels(device_type: str, codecs: Iterable[BlockCodec]) -> str | None:
    """Why a GPU (CUDA and ROCm are both "cuda") encodes with plain torch, if it does."""
    found = (_find_kernels(device_type, codec) for codec in codecs)
    return next((reason for reason in found if isinstance(reason, str)), None)


def _kernels(device_type: str, codec: BlockCodec) -> ModuleType | None:
    found = _find_kernels(device_type, codec)
    return None if isinstance(found, str) else found


@cache
def _find_kernels(device_type: str, codec: BlockCodec) -> ModuleType | str | None:
    """The Triton kernels, or why a GPU has none for a codec. Triton needs a C compiler for the
    first of them, and says so only then; and a version of it may compile them to something else."""
    if device_type != "cuda":
        return None
    if find_spec("triton") is None:
        return "no Triton"
    from megafrontier.partition.wires import block_triton

    try:
        return _difference(block_triton, codec, device_type) or block_triton
    except Exception as error:  # of Triton's driver, its compiler, or the C compiler
        return " ".join(str(error).split())


def _difference(kernels: ModuleType, codec: BlockCodec, device: str) -> str | None:
    """What the kernels say otherwise than the reference, of ties, tails, zeros and a NaN."""
    # Four at a time are summed, and two alone. The length is one that shards have: for others
    # Triton would compile, and this compare, kernels that training never runs.
    rows, count = 6, 33 * SHARD_ALIGNMENT
    waves = torch.arange(rows * count, dtype=torch.float32).mul_(12.9898).sin_()
    values = waves.view(rows, count) * codec.largest
    halves = torch.arange(codec.block, dtype=torch.float32).sub_(codec.largest) / 2
    values[0, : codec.block] = halves
    values[0, 0], values[1, : codec.block], values[2, -1] = codec.largest, 0.0, math.nan
    if codec.rotates:  # of values whose sums are exact; those of several messages' are not
        values = values.mul_(64).round_().div_(64)
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for dtype, adds in product(dtypes, (False, True)):
        ours = _Probe(values.to(dtype), codec, adds)
        theirs = _Probe(values.to(device, dtype), codec, adds)
        ours.run(codec.encode, codec.decode, codec.decode_sum)
        theirs.run(
            *(partial(getattr(kernels, f), codec) for f in ("encode", "decode", "decode_sum"))
        )
        for what, mine in ours.found.items():
            within = 1e-3 if codec.rotates and what == "sums" else 0.0
            if not torch.allclose(theirs.found[what].cpu(), mine, 0.0, within, equal_nan=True):
                return f"Triton's {codec.bits}-bit {what} are not those of the reference"
    return None


class _Probe:
    """What becomes of `values` [rows, n] on their device, with errors where decoding `adds`."""

    def __init__(self, values: torch.Tensor, codec: BlockCodec, adds: bool) -> None:
        rows, count = values.shape
        self._values, self._adds = values, adds
        self.found = {
            "messages": values.new_empty(rows, codec.message_bytes(count), dtype=codec.dtype),
            "errors": torch.full_like(values, 0.25, dtype=torch.bfloat16),
            "values": torch.ones_like(values),
            "sums": torch.ones_like(values[0], dtype=torch.float32),
        }

    def run(self, encode: Pass, decode: Pass, decode_sum: Pass) -> None:
        found = self.found
        encode(self._values, found["messages"], found["errors"] if self._adds else None)
        decode(found["messages"], found["values"], self._adds)
        decode_sum(found["messages"], found["sums"], self._adds)
