"""A function of whole matrices, on shards that cut them, gives what it gives on one rank."""

import pytest
import torch
from torch import nn

from megafrontier.optim.matrices import MatrixOwners, find_matrices
from megafrontier.partition import Placement, shard
from tests.ranks import run_ranks


class Net(nn.Module):
    """Five matrices of odd shapes, between vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        shapes = [(7, 5), (300, 3), (5, 90), (7, 5), (64, 64)]
        self.matrices = nn.ParameterList(torch.randn(*shape) for shape in shapes)
        self.vectors = nn.ParameterList(torch.randn(11) for _ in shapes)


def cubed(matrix):
    return matrix @ matrix.T @ matrix


@pytest.mark.parametrize(
    ("sizes", "optimizer"), [((2, 2, 2), 3), ((3,), 1), ((2, 3), 1), ((2, 2), 0)]
)
def test_matrices_change_and_nothing_else_with_more_ranks_or_more_matrices(sizes, optimizer):
    expected = {
        name: (cubed(p) if p.dim() == 2 else p).detach().flatten()
        for name, p in Net().named_parameters()
    }

    def body(hierarchy):
        engine = shard(Net(), [], Placement(0, 0, 0, optimizer), hierarchy)
        matrices = find_matrices(engine.units, lambda spec: len(spec.shape) == 2 and spec.shape[0])
        owners = MatrixOwners(matrices, None)
        shards = [unit.master.clone() for unit in engine.units]
        computed = []
        for _ in range(2):
            shards = [unit.master.clone() for unit in engine.units]
            owners.apply(shards, lambda m, whole: computed.append(m) or cubed(whole))
        for unit, found in zip(engine.units, shards, strict=True):
            for entry, first, last, at in unit.layout.within(*unit.range):
                part = found[at : at + last - first]
                torch.testing.assert_close(part, expected[entry.name][first:last])
        return len(computed) // 2

    counts = run_ranks(sizes, body)
    replicas = torch.Size(sizes[optimizer:]).numel()
    assert sum(counts) == 5 * replicas
    assert max(counts) - min(counts) <= 1
