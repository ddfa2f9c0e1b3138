"""Checkpoints of format version 1 are read as before. `version_1` was written by the last program
that wrote this version."""

from pathlib import Path

import torch

from megafrontier.checkpoint.commands import verify
from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.partition.layout import Layout

PATH = Path(__file__).parent / "version_1" / "step-00000007"
SHAPES = {"a.w": (3, 7), "b": (5,), "c.weight": (8, 9), "z": (30,)}
OFFSETS = {"a.w": 0, "b": 21, "c.weight": 26, "z": 0}
FACTORS = {"weight": 1, "error": 2, "exp_avg": 3}
"""Element i of the flat buffer of each unit was i times this."""


def expected(state, name):
    numel = torch.Size(SHAPES[name]).numel()
    values = torch.arange(OFFSETS[name], OFFSETS[name] + numel) * FACTORS[state]
    return values.to(torch.bfloat16 if state == "error" else torch.float32).view(SHAPES[name])


def test_all_that_it_holds_is_read():
    checkpoint = open_checkpoint(PATH)
    manifest = checkpoint.manifest
    assert checkpoint.shapes == SHAPES
    assert (manifest.step, manifest.tokens, manifest.num_shards) == (7, 70, 2)
    assert manifest.config["run"] == {"name": "ü"}
    assert list(manifest.states) == ["weight", "error", "exp_avg"]
    for state in FACTORS:
        for name, values in checkpoint.tensors(state, list(SHAPES)).items():
            assert torch.equal(values, expected(state, name))


def test_it_is_whole_and_loads_on_other_ranks():
    assert verify(PATH).whole
    layouts = [Layout.build("all", reversed(SHAPES.items()), 3)]
    shards = [torch.zeros(layouts[0].numel // 3) for _ in range(3)]
    for index, shard in enumerate(shards):
        open_checkpoint(PATH).fill(layouts, {"exp_avg": [shard]}, index, 3)
    found = dict(zip(reversed(SHAPES), layouts[0].views(torch.cat(shards)), strict=True))
    assert all(torch.equal(found[name], expected("exp_avg", name)) for name in SHAPES)
