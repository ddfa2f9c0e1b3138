"""The state that sites agree on."""

from types import SimpleNamespace

import torch

from megafrontier.config import SitesConfig
from megafrontier.sites.outer import Outer

LENGTH = 1024


def checksum(weights: torch.Tensor, start: int = 0, stop: int = LENGTH) -> int:
    """Of a rank that holds a part of a unit."""
    unit = SimpleNamespace(master=weights[start:stop].clone(), counts=True, range=(start, stop))
    return int(Outer([unit], SitesConfig()).checksum(0).item())  # type: ignore[list-item]


def test_a_checksum_shows_each_changed_bit_and_place_and_not_the_layout() -> None:
    torch.manual_seed(0)
    weights = torch.randn(LENGTH)
    whole = checksum(weights)
    total = torch.tensor([checksum(weights, 0, 256), checksum(weights, 256)]).sum()
    assert int(total) == whole
    for place in (0, 1, 127, 128, LENGTH - 1):
        for bit in (0, 31):
            changed = weights.clone()
            changed.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1
            assert checksum(changed) != whole
    assert checksum(weights.roll(1)) != whole
    assert checksum(weights.roll(128)) != whole
