"""A sparse format of the exchange between sites: the largest elements of each chunk, in 2 bits."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megafrontier.comm.wires.registry import Codec, register, store


@dataclass(frozen=True)
class TopKCodec(Codec):
    """The `kept` elements of largest magnitude in each chunk of `chunk` elements (SparseLoCo, Sarfi
    et al. 2026, arXiv:2603.08163).

    A message has, for each chunk, the largest magnitude as fp32, the places of the elements as
    int16, and 2 bits for each: one of -1, -1/3, 1/3 and 1 times the largest magnitude. Zeros are
    not sent: a chunk with fewer nonzero elements than `kept` repeats one of them.
    """

    chunk: int = 4096
    kept: int = 64

    is_quantized = is_sparse = True
    dtype = torch.uint8

    @property
    def name(self) -> str:
        return "topk"

    @property
    def _row_bytes(self) -> int:
        return 4 + 2 * self.kept + self.kept // 4

    def message_bytes(self, count: int) -> int:
        return -(-count // self.chunk) * self._row_bytes

    def encode(self, values: Tensor, messages: Tensor, errors: Tensor | None = None) -> None:
        total = values.float() if errors is None else values.float() + errors
        chunks = pad(total, (0, -total.shape[1] % self.chunk)).view(-1, self.chunk)
        places = chunks.abs().topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values
        picked = chunks.gather(1, places)
        largest = picked.abs().amax(1, keepdim=True)
        shares = picked / largest.masked_fill(largest == 0, 1)
        codes = ((shares + 1) * 1.5).round().clamp(0, 3).to(torch.uint8)
        # No code stands for zero. Instead of a zero, repeat the first element that is sent as the
        # largest: decoding writes it twice.
        first = ((codes % 3 == 0) & (picked != 0)).int().argmax(1, keepdim=True)
        places = places.where(picked != 0, places.gather(1, first))
        codes = codes.where(picked != 0, codes.gather(1, first))
        places, order = places.sort(dim=1)
        codes = codes.gather(1, order).unflatten(1, (-1, 4))
        shifts = torch.arange(0, 8, 2, device=codes.device, dtype=torch.uint8)
        packed = (codes << shifts).sum(2, dtype=torch.uint8)
        parts = (largest.view(torch.uint8), places.to(torch.int16).view(torch.uint8), packed)
        messages.copy_(torch.cat(parts, dim=1).view_as(messages))
        if errors is not None:
            sent = torch.empty_like(total)
            self.decode(messages, sent)
            torch.sub(total, sent, out=errors)

    def decode(self, messages: Tensor, out: Tensor, accumulate: bool = False) -> None:
        rows = messages.view(-1, self._row_bytes)
        sizes = (4, 2 * self.kept, self.kept // 4)
        largest, places, packed = (part.contiguous() for part in rows.split(sizes, dim=1))
        shifts = torch.arange(0, 8, 2, device=rows.device, dtype=torch.uint8)
        codes = ((packed[..., None] >> shifts) & 3).flatten(1)
        values = (codes.float() / 1.5 - 1) * largest.view(torch.float32)
        chunks = torch.zeros(len(rows), self.chunk, device=rows.device)
        chunks.scatter_(1, places.view(torch.int16).long(), values)
        store(chunks.view(len(out), -1)[:, : out.shape[1]], out, accumulate)

    def decode_sum(self, messages: Tensor, out: Tensor, accumulate: bool = False) -> None:
        for row, message in enumerate(messages):
            self.decode(message[None], out[None], accumulate or row > 0)


TOPK = register(TopKCodec())
