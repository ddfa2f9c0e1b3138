"""Bytes per level and kind are those of the formulas, and activations go in the chosen format."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config.model.moe import ExpertGroupsConfig, MoEConfig
from megafrontier.model.recompute.deferred import OtherGradients
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Splits
from megafrontier.partition.presets import work_wires
from megafrontier.pipeline.split_backward import SplitBackward
from megafrontier.splits.tokens import TokenGroup
from megafrontier.splits.traffic import distinct_share, tensor_bytes, token_bytes
from tests.model.small_models import LATENT, LATENT_QUERIES, OLMO, PREDICTION, SHAPES, small_config
from tests.ranks import run_mesh
from tests.splits.matrix import LENGTH, Case, split_model, train_alone, train_split

ROWS = 2
LLAMA, GPT2 = SHAPES["llama"], SHAPES["gpt2"]
MIXTURE = LLAMA | {"moe": MoEConfig(experts=8, active=3, ffn_hidden=16, balance="none")}
GROUPED = SHAPES["llama grouped, tied, longer texts"]
CASES = [
    ((2, 2), 2, Case(LLAMA), {}, False),
    ((2, 2), 2, Case(GPT2), {"pair": "int8"}, True),
    ((2, 2), 4, Case(GROUPED, options={"overlap": "none"}), {}, False),
    ((2, 2), 4, Case(GROUPED), {"pair": "bf16", "world": "int8"}, False),
    ((2, 2), 4, Case(OLMO, built={"checkpointing": "selective"}), {"pair": "bf16"}, False),
    ((2,), 2, Case(GPT2, built={"checkpointing": "block"}), {"world": "int8"}, False),
    ((2,), 2, Case(LLAMA, built={"checkpointing": "selective"}), {"world": "int8"}, False),
    ((2,), 2, Case(LATENT | PREDICTION, built={"checkpointing": "selective"}), {}, False),
    ((2,), 2, Case(LATENT_QUERIES), {}, True),
]


@pytest.mark.parametrize(("sizes", "tensor", "case", "formats", "late"), CASES)
def test_bytes_of_each_level_and_kind_are_those_of_the_formulas(sizes, tensor, case, formats, late):
    def body(mesh):
        levels = mesh.hierarchy(("tensor",)).levels
        wires = work_wires("activations", formats, levels, "fp32")
        model, engine, _ = split_model(case, "zero3", mesh, wires)
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        engine.ledger.take(wait=True)
        if late:
            _train_in_two_parts(model, engine, tokens)
        else:
            model(tokens, tokens).backward()
        engine.finish_gradients()
        engine.finish_step(torch.zeros(()))
        engine.finish_publishing()
        formula = tensor_bytes(
            small_config(**case.changes),
            levels,
            ROWS * LENGTH,
            torch.float32,
            wires,
            overlaps=engine.overlaps,
            chunk_tokens=16,
            checkpointing=case.built.get("checkpointing", "none"),
            late_weights=late,
        )
        counted = engine.ledger.take_kinds(wait=True)
        return counted, formula, engine.step_bytes(1)

    for counted, activations, states in run_mesh(sizes, body, splits=Splits(tensor=tensor)):
        assert [kinds["activations"].bytes for kinds in counted] == activations
        assert [kinds["weights"].bytes + kinds["gradients"].bytes for kinds in counted] == states
        assert all(kinds["tokens"].bytes == 0 for kinds in counted)
        assert activations[0] > 0


def _train_in_two_parts(model, engine, tokens):
    split = SplitBackward(model, model.blocks, copies=False)
    loss = model(tokens, tokens)
    with engine.stage(0, True, True, "inputs"):
        _, late = split.inputs(loss, None, None, model.parameters(), OtherGradients())
    with engine.stage(0, True, True, "weights"):
        split.weights(late)


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
        policies = ("safe", "safe") if splits.context > 1 else ("safe", "none", "safe")
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


@pytest.mark.parametrize(("groups", "active_groups"), [(1, 1), (4, 2), (3, 2), (6, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_share_of_tokens_that_reach_a_group_is_that_of_all_choices(groups, active_groups, size):
    limited = ExpertGroupsConfig(groups, active_groups)
    moe = MoEConfig(experts=12, active=2, groups=limited)
    reached = total = 0.0
    for chosen in combinations(range(groups), active_groups):
        open_to = [e for e in range(12) if e // (12 // groups) in chosen]
        choices = [*combinations(open_to, 2)]
        reached += sum(min(choice) < size for choice in choices) / len(choices)
        total += 1
    assert distinct_share(moe, size) == pytest.approx(reached / total)


def test_tokens_cross_a_level_as_often_as_the_mean_of_all_choices_says():
    levels = Levels(("pair", "world"), (2, 2))
    config = small_config(layers=3, moe=MoEConfig(experts=4, active=2, ffn_hidden=8))
    pair, world = token_bytes(config, levels, 60, torch.float32)
    row = 4 * 4 * config.hidden + 3 * 4 * 2
    # Of two of four ranks, one each with an expert, 5 of 6 choices reach the other pair of ranks.
    assert world == 3 * row * 60 * 5 // 6
    # A rank's tokens and the other pair's lie with it: of either, half go to its neighbour.
    assert pair == 3 * row * 60
