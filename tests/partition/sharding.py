"""`shard` with the rules of a state as options, for tests of one of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition import Engine, Placement, Wires
from megafrontier.partition import shard as shard_by_rules
from megafrontier.partition.rules import Overlap, StateRules


def shard(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    placement: Placement,
    mesh: Mesh | Hierarchy,
    *,
    dtype: torch.dtype = torch.float32,
    wires: Wires | None = None,
    error_feedback: bool = False,
    overlap: Any = "safe",
    prefetch: int = 1,
    check_order: bool = False,
    **options: Any,
) -> Engine:
    """`options`: those of `megafrontier.partition.shard`."""
    wires = wires or Wires.plain(len(mesh.levels.sizes), dtype)
    rules = StateRules(placement, wires, dtype, error_feedback)
    when = Overlap(overlap, prefetch, check_order)
    return shard_by_rules(model, blocks, rules, mesh, overlap=when, **options)
