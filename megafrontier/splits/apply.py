"""The splits of a mesh, applied to a GPT."""

from collections.abc import Callable

import torch

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.wires.wire import UNCHANGED, Wires, WorkWires
from megafrontier.model.gpt import GPT
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition.engine import Engine
from megafrontier.splits.context import split_sequences
from megafrontier.splits.experts import ExpertGroup, split_experts
from megafrontier.splits.tensor import split_tensors
from megafrontier.splits.tokens import TokenGroup

_SPLITS = (("tensor", split_tensors), ("context", split_sequences), ("expert", split_experts))


def apply_splits(
    model: GPT,
    mesh: Mesh,
    activations: WorkWires = UNCHANGED,
    tokens: WorkWires = UNCHANGED,
    token_pieces: int = 1,
) -> Callable[[Engine], None]:
    """Divide a GPT, which may be on the meta device, as the splits of the mesh say.

    Call it before `shard`. The result connects the splits to the engine that `shard` returns; call
    it before the first forward. `activations`, `tokens`: their formats on the levels of the mesh.
    `token_pieces`: as in `parallel`. Raises UserError for a model that cannot be divided.
    """
    groups: list[tuple[TokenGroup | ExpertGroup, Hierarchy]] = []
    for axis, split in _SPLITS:
        if getattr(mesh.splits, axis) > 1:
            hierarchy = mesh.hierarchy((axis,))
            index, size = hierarchy.shard_index(len(hierarchy.levels.sizes))
            if axis == "expert":  # so that neighbours have neighbouring experts
                index = hierarchy.rank
            groups.append((split(model, index, size), hierarchy))

    def connect(engine: Engine) -> None:
        for group, hierarchy in groups:
            if isinstance(group, ExpertGroup):
                group.pieces = token_pieces
                group.connect(engine, hierarchy, tokens)
            else:
                group.connect(engine, hierarchy, activations)

    return connect


def tensor_collectives(engine: Engine, mesh: Mesh) -> LevelCollectives | None:
    """Collectives of whatever type over the ranks that share matrices; None if no ranks do."""
    if mesh.splits.tensor == 1:
        return None
    hierarchy = mesh.hierarchy(("tensor",))
    wires = Wires.plain(len(hierarchy.levels.sizes), torch.float32)
    return engine.collectives(hierarchy, wires)
