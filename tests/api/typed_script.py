"""A user's script, which mypy checks without running: no name of the package is Any."""

# mypy: disallow-any-expr, disallow-untyped-calls, warn-return-any

from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import megafrontier
from megafrontier import AdamW, Muon, Optimizer, clip_grad_norm_, init_mesh, no_sync, shard
from megafrontier.parallel.mesh import Mesh


def train(blocks: nn.Sequential, folder: Path) -> None:
    """Every call of the library's surface, with the type that it returns."""
    mesh = assert_type(init_mesh("laptop"), Mesh)
    model = assert_type(shard(blocks, mesh, blocks="*", wires="low"), nn.Sequential)
    optimizer = assert_type(AdamW(model, lr=0.1), AdamW)
    assert_type(Muon(model, lr=0.1), Muon)
    assert_type(Optimizer(model, torch.optim.SGD), Optimizer)
    assert_type(megafrontier.load(model, optimizer, folder), int)
    with no_sync(model, enabled=False):
        assert_type(clip_grad_norm_(model, 1.0), torch.Tensor)
    assert_type(megafrontier.save(model, optimizer, folder, 1), Path)
