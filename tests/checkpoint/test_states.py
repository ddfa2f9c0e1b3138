"""Engines whose ranks hold boxes of matrices, frozen parameters and buffers are saved, and loaded
by engines that hold other boxes."""

from functools import partial

import pytest
import torch
from torch import nn

from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.checkpoint.states import (
    engine_states,
    fill_shards,
    persistent_buffers,
    restore_engine,
    save_engine,
)
from megafrontier.common.checkpoints import newest
from megafrontier.common.errors import UserError
from megafrontier.model.init import initial_slice, with_specs
from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import ParamSpec, set_spec
from megafrontier.partition import Placement, shard
from tests.ranks import run_mesh

WIDTH, HIDDEN = 6, 10


def part(shape, dim, index, parts):
    """A matrix [shape] of which this rank holds one of `parts` along `dim`."""
    box = [(0, size) for size in shape]
    box[dim] = (index * shape[dim] // parts, (index + 1) * shape[dim] // parts)
    spec = ParamSpec("", shape, "matrix", tuple(box), axes=("context", "data"), init_std=1.0)
    parameter = nn.Parameter(torch.empty(spec.local_shape))
    set_spec(parameter, spec)
    return parameter


class Block(nn.Module):
    """`up` is cut by rows and `down` by columns; the norm is whole, and `fixed` is frozen."""

    def __init__(self, index, parts):
        super().__init__()
        self.norm = with_specs(nn.LayerNorm(WIDTH), "norm")
        self.up = part((HIDDEN, WIDTH), 0, index, parts)
        self.down = part((WIDTH, HIDDEN), 1, index, parts)
        self.fixed = part((4, 8), 1, index, parts).requires_grad_(False)
        with torch.device("cpu"):
            self.register_buffer("seen", torch.zeros(3))
            self.register_buffer("steps", torch.tensor(0))
            self.register_buffer("table", torch.zeros(2), persistent=False)


class Net(nn.Module):
    def __init__(self, index, parts, **changes):
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, parts) for _ in range(2))
        for name, value in changes.items():
            self.blocks[1].register_buffer(name, value)


def sharded(mesh, placement, seed=7, **changes):
    """A model, its engine, and states of its optimizer that are functions of the weights."""
    tensor = mesh.hierarchy(("tensor",))
    with torch.device("meta"):
        model = Net(tensor.rank, tensor.size, **changes)
    engine = shard(
        model,
        [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)],
        placement,
        mesh,
        initial=partial(initial_slice, seed),
    )
    moments = {"exp_avg": [2 * unit.master for unit in engine.trained_units]}
    return model, engine, moments


def save(mesh, root, depths=(1, 1, 1, 1)):
    model, engine, moments = sharded(mesh, Placement(*depths))
    model.blocks[0].seen += 3
    model.blocks[1].steps += 4
    buffers = persistent_buffers(model)
    assert sorted(buffers) == [f"blocks.{i}.{n}" for i in (0, 1) for n in ("seen", "steps")]
    save_engine(root, engine, moments, buffers=buffers, step=1, tokens=2)


def load(mesh, root, depths=(1, 1, 1, 1)):
    """Whether what is loaded is what an engine in this layout begins with, and the buffers."""
    model, engine, moments = sharded(mesh, Placement(*depths), seed=8)
    _, wanted, wanted_moments = sharded(mesh, Placement(*depths))
    states, buffers = engine_states(engine, moments), persistent_buffers(model)
    fill_shards(open_checkpoint(newest(root)), engine, states, buffers)
    restore_engine(engine, states, buffers)
    same = all(
        torch.equal(found, need)
        for state, need_tensors in engine_states(wanted, wanted_moments).items()
        for found, need in zip(states[state], need_tensors, strict=True)
        if need is not None
    )
    return same, {name: buffer.tolist() for name, buffer in buffers.items()}


BUFFERS = {
    "blocks.0.seen": [3, 3, 3], "blocks.0.steps": 0, "blocks.1.seen": [0, 0, 0],
    "blocks.1.steps": 4,
}  # fmt: skip
TWO = {"sizes": (2,), "splits": Splits(tensor=2)}
FOUR = {"sizes": (2, 2), "splits": Splits(tensor=2)}
ONE = {"sizes": (1,), "splits": Splits()}
LAYOUTS = {
    "one": (ONE, (1, 1, 1, 1)),
    "tensor 2": (TWO, (1, 1, 1, 1)),
    "tensor 2, data 2": (FOUR, (1, 1, 2, 2)),
    "tensor 2, data 2 replicas": (FOUR, (1, 1, 1, 1)),
}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("tensor 2", "one"),
        ("one", "tensor 2"),
        ("tensor 2, data 2", "one"),
        ("tensor 2", "tensor 2, data 2 replicas"),
    ],
)
def test_parts_of_matrices_are_loaded_in_any_other_layout(tmp_path, writer, reader):
    mesh, depths = LAYOUTS[writer]
    run_mesh(mesh["sizes"], partial(save, root=tmp_path, depths=depths), splits=mesh["splits"])
    assert verify(newest(tmp_path)).problems == []
    mesh, depths = LAYOUTS[reader]
    body = partial(load, root=tmp_path, depths=depths)
    assert all(
        found == (True, BUFFERS) for found in run_mesh(mesh["sizes"], body, splits=mesh["splits"])
    )


def test_frozen_parameters_have_no_moments_and_buffers_are_stored_once(tmp_path):
    mesh, depths = LAYOUTS["tensor 2, data 2"]
    run_mesh(mesh["sizes"], partial(save, root=tmp_path, depths=depths), splits=mesh["splits"])
    checkpoint = open_checkpoint(newest(tmp_path))
    names = sorted(shard_set.name for shard_set in checkpoint.manifest.sets)
    assert names == ["", "buffers", "tensor0", "tensor1"]
    assert checkpoint.tensor("exp_avg", "blocks.0.down").shape == (WIDTH, HIDDEN)
    assert checkpoint.tensor("weight", "blocks.0.fixed").shape == (4, 8)
    with pytest.raises(UserError, match="fixed: no state 'exp_avg'"):
        checkpoint.tensor("exp_avg", "blocks.0.fixed")
    assert checkpoint.tensor("buffer", "blocks.1.steps").dtype == torch.int64
    assert "blocks.1.steps" not in checkpoint.shapes
    assert "blocks.1.table" not in checkpoint.manifest.tensors


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seen": torch.zeros(4)}, r"blocks\.1\.seen: shape \[3\] in .*, shape \[4\] in the model"),
        ({"seen": None}, r"blocks\.1\.seen: shape \[3\] in the checkpoint, missing in the model"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(tmp_path, changes, problem):
    run_mesh((1,), partial(save, root=tmp_path))

    def body(mesh):
        model, engine, _ = sharded(mesh, Placement(1, 1, 1, 1), **changes)
        checkpoint = open_checkpoint(newest(tmp_path))
        with pytest.raises(UserError, match=problem):
            fill_shards(checkpoint, engine, {}, persistent_buffers(model))

    run_mesh((1,), body)
