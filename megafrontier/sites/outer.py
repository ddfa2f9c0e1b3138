"""The weights that all sites agree on, and the optimizer that moves them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megafrontier.comm.wires.registry import FORMATS, Codec
from megafrontier.config.sites import SitesConfig
from megafrontier.parallel.hierarchy import SHARD_ALIGNMENT
from megafrontier.partition.unit import Unit

ROW = 4096
"""Elements of a message that can be read by themselves. Sites of different sizes cut a unit at
different places, and a rank sends another one the rows that it needs."""
DECAY = 0.95
"""Of the errors of a sparse format, most of which are old when they are sent (SparseLoCo,
arXiv:2603.08163)."""
LARGEST = 2.0**96
"""Magnitude of a change, weight or momentum of another site that is not refused, so that no sum of
them overflows."""
_WORD = 0x9E3779B97F4A7C15 - 2**64
"""A multiplier of checksums, as a signed number."""
_WORDS = (torch.arange(SHARD_ALIGNMENT) * 0x9E3779B1 & 0x7FFFFFFF | 1).to(torch.int32)
"""Odd multipliers of the elements of a row of a checksum."""


def codec_of(wire: str) -> Codec:
    """The codec of `sites.wire`."""
    return FORMATS[wire][0]


def fragments_of(units: Sequence[Unit], count: int) -> list[list[int]]:
    """The indices of the units of each fragment. Neighbours are in different ones, so that each
    fragment is spread over the depth of the model."""
    return [list(range(first, len(units), count)) for first in range(count)]


class _Rows(NamedTuple):
    """Where some rows lie in a message, and the elements of each in the codec's type."""

    rows: int
    length: int
    bytes: slice


class Outer:
    """The state of the exchange: for each trained unit, this rank's 1-D shards.

    weights: what all sites agreed on last, fp32. momentum: of the outer optimizer, fp32. sent: the
    change that was sent last, as the others decode it, fp32. errors: what messages did not carry,
    bf16; empty if the wire is not quantized.
    """

    def __init__(self, units: Sequence[Unit], config: SitesConfig) -> None:
        self.units, self._config = units, config
        self.fragments = fragments_of(units, config.fragments)
        self.codec = codec_of(config.wire)
        masters = [unit.master for unit in units]
        self.weights = [master.clone() for master in masters]
        self.momentum = [torch.zeros_like(master) for master in masters]
        self.sent = [torch.zeros_like(master) for master in masters]
        self.errors = [
            torch.zeros_like(master, dtype=torch.bfloat16)
            for master in masters
            if self.codec.is_quantized
        ]

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """What checkpoints keep."""
        found = {
            "outer_weight": self.weights,
            "outer_momentum": self.momentum,
            "outer_sent": self.sent,
        }
        return {**found, "outer_error": self.errors} if self.errors else found

    def fragment_of(self, event: int) -> int:
        """The fragment of an exchange."""
        return event % len(self.fragments)

    def begin(self) -> None:
        """All sites start from the present weights."""
        for index, unit in enumerate(self.units):
            self._start_from(index, unit.master)

    def adopt(self, index: int, weights: Tensor, momentum: Tensor) -> None:
        """Go on from the state of another site for one unit."""
        self._start_from(index, weights)
        self.momentum[index].copy_(momentum)
        self.units[index].master.copy_(weights)

    def _start_from(self, index: int, weights: Tensor) -> None:
        self.weights[index].copy_(weights)
        self.momentum[index].zero_()
        if self.errors:
            self.errors[index].zero_()

    def encode(self, fragment: int) -> list[Tensor]:
        """This rank's messages about a fragment, on the host: how its weights have changed, in the
        direction of a gradient."""
        messages = []
        for index in self.fragments[fragment]:
            change = self.weights[index] - self.units[index].master
            error = self.errors[index] if self.errors else None
            if error is not None and self.codec.is_sparse:
                error.mul_(DECAY)
            messages.append(self._encode(index, change, error))
        return messages

    def is_sendable(self, fragment: int) -> bool:
        """Whether the messages that `encode` made last are finite on this rank."""
        return all(is_bounded(self.sent[index]) for index in self.fragments[fragment])

    def undo(self, fragment: int) -> None:
        """Bring this site's weights of a fragment back to what all sites agreed on last."""
        for index in self.fragments[fragment]:
            self.units[index].master.copy_(self.weights[index])
            self.sent[index].zero_()
            if self.errors:
                self.errors[index].zero_()

    def encode_again(self, fragment: int) -> list[Tensor]:
        """The messages that `encode` made last, from what is known of them."""
        return [self._encode(index, self.sent[index], None) for index in self.fragments[fragment]]

    def _encode(self, index: int, change: Tensor, error: Tensor | None) -> Tensor:
        message = torch.empty(message_bytes(self.codec, change.numel()), dtype=torch.uint8)
        for values, at in self._rows(change.numel()):
            rows, sent = (t[values].view(at.rows, -1) for t in (change, self.sent[index]))
            encoded = rows.new_empty(at.rows, at.length, dtype=self.codec.dtype)
            errors = None if error is None else error[values].view(at.rows, -1)
            self.codec.encode(rows, encoded, errors)
            self.codec.decode(encoded, sent)
            message[at.bytes] = encoded.view(-1).view(torch.uint8).cpu()
        return message

    def decode(self, message: Tensor, count: int, device: torch.device) -> Tensor:
        """The change that a message about `count` elements carries, fp32 [count] on the device."""
        found = torch.empty(count, device=device)
        for values, at in self._rows(count):
            rows = message[at.bytes].to(device).view(self.codec.dtype).view(at.rows, -1)
            self.codec.decode(rows, found[values].view(at.rows, -1))
        return found

    def _rows(self, count: int) -> Iterator[tuple[slice, "_Rows"]]:
        """The elements that are encoded together: the whole rows, and the rest."""
        whole = count // ROW
        split, at = whole * ROW, whole * self.codec.message_bytes(ROW)
        if whole:
            yield slice(split), _Rows(whole, self.codec.message_length(ROW), slice(at))
        if split < count:
            length = self.codec.message_length(count - split)
            yield slice(split, count), _Rows(1, length, slice(at, message_bytes(self.codec, count)))

    def update(self, index: int, gradient: Tensor) -> None:
        """Move the weights by the mean change of all sites, as torch's SGD does, and bring this
        site's weights there, except for the share of `mixing`."""
        optimizer, weights = self._config.optimizer, self.weights[index]
        momentum = self.momentum[index].mul_(optimizer.momentum).add_(gradient)
        is_nesterov = optimizer.name == "nesterov"
        step = gradient.add(momentum, alpha=optimizer.momentum) if is_nesterov else momentum
        weights.add_(step, alpha=-optimizer.lr)
        master = self.units[index].master
        if self._config.mixing:
            master.lerp_(weights, 1 - self._config.mixing)
        else:
            master.copy_(weights)

    def checksum(self, fragment: int) -> Tensor:
        """A sum over this rank's elements of a fragment's weights, int64 [1], that depends on their
        bits and places. The sum over all ranks does not depend on the layout."""
        total = torch.zeros(1, dtype=torch.int64, device=self.weights[0].device)
        for index in self.fragments[fragment]:
            unit = self.units[index]
            if unit.counts:
                # Products wrap, and are odd multiples, so that each changed bit shows.
                bits = self.weights[index].view(torch.int32).view(-1, SHARD_ALIGNMENT)
                rows = (bits * _WORDS.to(bits.device)).sum(1)
                first, stop = (at // SHARD_ALIGNMENT for at in unit.range)
                places = torch.arange(first, stop, device=rows.device) * _WORD + 2 * index
                total += (rows * (places | 1)).sum()
        return total


def is_bounded(values: Tensor) -> bool:
    """Whether all values fp32 [n] are finite and at most `LARGEST`."""
    return not values.numel() or bool(values.abs().amax() <= LARGEST)  # NaN is not


def mean_change(changes: Mapping[int, Tensor], tokens: Mapping[int, float]) -> Tensor:
    """The mean of the sites' changes fp32 [n], weighted by tokens, summed in the order of their
    numbers, so that all sites have the same bits."""
    whole = sum(tokens.values())
    total = torch.zeros_like(next(iter(changes.values())))
    for site in sorted(changes):
        total.add_(changes[site], alpha=tokens[site] / whole)
    return total


def message_bytes(codec: Codec, count: int) -> int:
    """Bytes of a message about `count` elements."""
    whole, rest = divmod(count, ROW)
    return whole * codec.message_bytes(ROW) + (codec.message_bytes(rest) if rest else 0)


def common_rows(own: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """[start, stop) in the flat buffer of the rows of `own` that overlap `other`. Rows count from
    the start of `own`; nothing in common is an empty range."""
    start, stop = max(own[0], other[0]), min(own[1], other[1])
    if start >= stop:
        return own[0], own[0]
    first = own[0] + (start - own[0]) // ROW * ROW
    return first, min(own[0] - (own[0] - stop) // ROW * ROW, own[1])
