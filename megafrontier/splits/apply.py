"""The splits of a mesh, applied to a GPT."""

from collections.abc import Callable, Collection

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


def apply_splits(
    model: GPT,
    mesh: Mesh,
    activations: WorkWires = UNCHANGED,
    tokens: WorkWires = UNCHANGED,
    token_pieces: int = 1,
    joined: Collection[int] = (),
) -> Callable[[Engine], None]:
    """Divide a GPT, which may be on the meta device, as the splits of the mesh say.

    Call it before `shard`. The result connects the splits to the engine that `shard` returns; call
    it before the first forward. `activations`, `tokens`: their formats on the levels of the mesh.
    `token_pieces`: as in `parallel`. `joined`: levels that tokens cross together with the next one
    further out. Raises UserError for a model that cannot be divided.
    """
    groups: list[tuple[TokenGroup | ExpertGroup, Hierarchy, WorkWires]] = []
    for axis, split in (("tensor", split_tensors), ("context", split_sequences)):
        if getattr(mesh.splits, axis) > 1:
            hierarchy = mesh.hierarchy((axis,))
            index, size = hierarchy.shard_index(len(hierarchy.levels.sizes))
            groups.append((split(model, index, size), hierarchy, activations))
    if mesh.splits.expert > 1:
        hierarchy = mesh.joined(("expert",), joined)
        # By rank, so that neighbours have neighbouring experts.
        experts = split_experts(model, hierarchy.rank, mesh.splits.expert, token_pieces)
        groups.append((experts, hierarchy, tokens))

    def connect(engine: Engine) -> None:
        for group, hierarchy, wires in groups:
            group.connect(engine, hierarchy, wires)

    return connect


def tensor_collectives(engine: Engine, mesh: Mesh) -> LevelCollectives | None:
    """Collectives of whatever type over the ranks that share matrices; None if no ranks do."""
    if mesh.splits.tensor == 1:
        return None
    hierarchy = mesh.hierarchy(("tensor",))
    wires = Wires.plain(len(hierarchy.levels.sizes), torch.float32)
    return engine.collectives(hierarchy, wires)
