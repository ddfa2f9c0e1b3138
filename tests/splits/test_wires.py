"""Activations and tokens go in the chosen format."""

from dataclasses import replace

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config.model.moe import MoEConfig
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Splits
from megafrontier.partition.presets import work_wires
from megafrontier.splits.tokens import TokenGroup
from tests.model.small_models import SHAPES
from tests.ranks import run_mesh
from tests.splits.matrix import Case, split_model, train_alone, train_split

ROWS = 2
LLAMA, GPT2 = SHAPES["llama"], SHAPES["gpt2"]
MIXTURE = LLAMA | {"moe": MoEConfig(experts=8, active=3, ffn_hidden=16, balance="none")}
GROUPED = SHAPES["llama grouped, tied, longer texts"]
INT8, ROUNDED = {"world": "int8"}, {"pair": "bf16", "world": "int8"}
LOSSY = [
    ((2,), Splits(tensor=2), Case(LLAMA), INT8),
    ((2, 2), Splits(tensor=4), Case(GROUPED, accumulation=2, steps=2), ROUNDED),
    ((2, 2), Splits(expert=4), Case(MIXTURE, steps=2), ROUNDED),
    ((2, 2), Splits(context=4), Case(GROUPED, documents=True, steps=2), ROUNDED),
]


@pytest.mark.parametrize(("sizes", "splits", "case", "formats"), LOSSY)
def test_rounded_activations_and_tokens_train_alike_with_the_same_bits_in_every_run(
    sizes, splits, case, formats
):
    """The same with overlap, in pieces, as without. Losses differ from exact ones by as much as
    int8 rounds, a part in 254 of a block's largest."""

    def body(mesh):
        is_moe = splits.expert > 1
        axes, moved = (("expert",), "tokens") if is_moe else (("tensor", "context"), "activations")
        wires = work_wires(moved, formats, mesh.shape.over(axes), "fp32")
        # With overlap half of the heads travels at a time, here in blocks of its own.
        policies = ("safe", "safe") if splits.context > 1 else ("safe", "none")
        found = [
            train_split(replace(case, options={"overlap": policy}), "zero1", mesh, wires)
            for policy in policies
        ]
        return found

    exact = train_alone(case)
    for found in run_mesh(sizes, body, splits=splits):
        for again in found[1:]:
            for (loss, norm, parts), (other, other_norm, others) in zip(
                found[0], again, strict=True
            ):
                assert (loss, norm) == (other, other_norm)
                pairs = zip(parts, others, strict=True)
                assert all(torch.equal(a[2], b[2]) for a, b in pairs)
        losses = torch.tensor([[step[0] for step in steps] for steps in (found[0], exact)])
        differences = (losses[0] / losses[1] - 1).abs()
        assert 0 < differences.max() < 0.005


def test_all_ranks_gather_the_same_bits_and_no_value_is_off_by_more_than_int8_rounds():
    """Half a step of 1/127 of the block's largest for each message that carried a value."""
    ranks, rows, width = 4, 24, 32

    def body(mesh):
        hierarchy = mesh.hierarchy(("tensor",))
        index, _ = hierarchy.shard_index(2)
        group = TokenGroup(index, ranks)
        _, engine, _ = split_model(Case(GROUPED), "ddp", mesh)
        group.connect(
            engine, hierarchy, work_wires("activations", ROUNDED, hierarchy.levels, "fp32")
        )
        values = torch.randn(ranks, rows * ranks, width, generator=torch.Generator().manual_seed(1))
        parts = group.part(values[0])
        gathered = [group.gather(parts), *(t for _, t in group.gathered_pieces(parts))]
        reduced = group.reduce(values[index])
        sums = group.part(values.sum(0))
        exact = group.gather(parts, is_exact=True)
        return values, gathered, (reduced - sums).abs().max(), torch.equal(exact, values[0])

    found = run_mesh((2, 2), body, splits=Splits(tensor=ranks))
    values, (whole, *pieces), *_ = found[0]
    for _, (others, *_), error, is_exact in found:
        assert torch.equal(others, whole)
        assert is_exact
        step = 1 / 127 + 2**-7
        assert 0 < error < ranks * step * values.abs().max()
    assert 0 < (whole - values[0]).abs().max() < values.abs().max() / 127
    slices = [tokens.view(ranks, -1, width) for tokens in pieces]
    assert len(slices) == 3
    assert torch.equal(torch.cat(slices, 1).flatten(0, 1), whole)


@pytest.mark.parametrize(
    ("formats", "precision", "message"),
    [
        ({"node": "int8"}, "bf16", "wires.activations.node: int8, but .*; need one of pair, world"),
        ({"pair": "fp32"}, "bf16", "wires.activations.pair: fp32, .* need bf16 or int8"),
        ({"pair": "fp16"}, "bf16", "wires.activations.pair: fp16, .* need bf16 or int8"),
    ],
)
def test_formats_that_do_not_fit_are_refused_with_what_fits(formats, precision, message):
    levels = Levels(("pair", "node", "world"), (2, 1, 2))
    with pytest.raises(UserError, match=message):
        work_wires("activations", formats, levels, precision)
    with pytest.raises(UserError, match="does not cross such a level; leave it out"):
        work_wires("tokens", formats, Levels(("pair", "node"), (1, 1)), precision)
