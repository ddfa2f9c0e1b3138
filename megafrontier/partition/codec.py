"""Blockwise symmetric quantisation in plain torch: the reference of every low-bit wire.

A message of n elements is, in one buffer: a bf16 scale for each block, then the codes, then zeros
up to a multiple of 16 bytes. Codes run from -q to q (q = 127 or 7), value = code × scale, and the
scale is the block's largest magnitude over q, rounded to bf16. That moves the largest value by a
quarter of a step at most, so its code is q all the same: nothing is clipped, nothing is biased, and
no element errs by more than half a step.

A block with a non-finite value gets a NaN scale and decodes to NaN everywhere: the gradient norm
then tells, and the step is skipped.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

MESSAGE_ALIGNMENT = 16
"""Bytes. RCCL and NCCL copy in 16-byte units and are slow on the rest."""

ROTATION = 128
"""Elements that a block Hadamard rotation mixes."""


@dataclass(frozen=True)
class BlockCodec:
    """`bits` (8 or 4) for an element, one scale for each `block` of them."""

    bits: int
    block: int

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def message_bytes(self, count: int) -> int:
        """Bytes of a message of `count` elements."""
        used = self._scale_bytes(count) + self._code_bytes(count)
        return -(-used // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT

    def _scale_bytes(self, count: int) -> int:
        return 2 * -(-count // self.block)

    def _code_bytes(self, count: int) -> int:
        return -(-count * self.bits // 8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Messages uint8 [rows, message_bytes(n)] of `values` [rows, n], any float type."""
        rows, count = values.shape
        blocks = F.pad(values.float(), (0, -count % self.block)).view(rows, -1, self.block)
        scales = _to_bf16(blocks.abs().amax(-1) / self.largest)
        # An all-zero block has scale 0; 0 / 1 keeps its zeros.
        steps = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
        codes = torch.round(blocks / steps).nan_to_num_(0.0).to(torch.int8).view(rows, -1)
        message = torch.zeros(
            rows, self.message_bytes(count), dtype=torch.uint8, device=values.device
        )
        start = self._scale_bytes(count)
        message[:, :start] = scales.view(torch.uint8)
        packed = self._pack(codes)[:, : self._code_bytes(count)]
        message[:, start : start + packed.shape[1]] = packed
        return message

    def decode(self, messages: torch.Tensor, count: int) -> torch.Tensor:
        """Values fp32 [rows, count] of messages uint8 [rows, message_bytes(count)]."""
        rows, start = messages.shape[0], self._scale_bytes(count)
        scales = messages[:, :start].contiguous().view(torch.bfloat16).float()
        stop = start + self._code_bytes(count)
        codes = F.pad(self._unpack(messages[:, start:stop])[:, :count], (0, -count % self.block))
        values = codes.view(rows, -1, self.block).float() * scales.unsqueeze(-1)
        return values.view(rows, -1)[:, :count]

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Sum of all messages' values into `out` fp32 [count], in the order of the rows."""
        out.copy_(self.decode(messages[:1], out.numel()).view(-1))
        for row in range(1, messages.shape[0]):
            # One row at a time: decoding all would take the memory of `rows` gradients.
            out.add_(self.decode(messages[row : row + 1], out.numel()).view(-1))

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """int8 codes [rows, even] → bytes; two 4-bit codes a byte, the first one low."""
        if self.bits == 8:
            return codes.view(torch.uint8)
        nibbles = codes.view(torch.uint8) & 0xF
        return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return packed.view(torch.int8)
        low, high = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
        return torch.stack([low, high], dim=-1).flatten(-2)


INT8 = BlockCodec(bits=8, block=256)
INT4 = BlockCodec(bits=4, block=128)


def _to_bf16(scales: torch.Tensor) -> torch.Tensor:
    """bf16 of fp32 `scales`; what is not finite becomes NaN, which 0 × code cannot hide."""
    return torch.where(torch.isfinite(scales), scales, torch.nan).to(torch.bfloat16)


@cache
def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix over the root of its size: symmetric and its own inverse."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Block Hadamard rotation of fp32 [rows, n]; the same again undoes it.

    It spreads an outlier over its block, so that the others keep their bits (as SDP4Bit does,
    arXiv:2410.15526). A tail shorter than a block stays as it is.
    """
    whole = values.shape[1] // ROTATION * ROTATION
    blocks = values[:, :whole].reshape(-1, ROTATION)
    turned = (blocks @ _hadamard(ROTATION, values.device)).view(values.shape[0], whole)
    return torch.cat([turned, values[:, whole:]], dim=1)
