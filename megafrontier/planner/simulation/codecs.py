"""Codecs on the meta device: one pass over what they read and write, as their kernels for devices.

They take time and have no results.
"""

import torch

from megafrontier.comm.wires.registry import Codec
from megafrontier.planner.simulation.meter import running_meter


def encode(
    codec: Codec,
    values: torch.Tensor,
    messages: torch.Tensor,
    errors: torch.Tensor | None = None,
) -> None:
    """As `Codec.encode`."""
    kept = 0 if errors is None else 2 * errors.nbytes
    running_meter().move(values.nbytes + messages.nbytes + kept)


def decode(
    codec: Codec, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False
) -> None:
    """As `Codec.decode`."""
    running_meter().move(messages.nbytes + out.nbytes * (1 + accumulate))


def decode_sum(
    codec: Codec, messages: torch.Tensor, out: torch.Tensor, accumulate: bool = False
) -> None:
    """As `Codec.decode_sum`."""
    decode(codec, messages, out, accumulate)
