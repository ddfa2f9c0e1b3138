"""A run that cannot fit is refused before it waits in a queue, with what would make it fit."""

import re
from pathlib import Path

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import load_config
from megafrontier.model.flops import parameter_count
from megafrontier.parallel.mesh import Splits
from megafrontier.plan.footprint import buffer_gib, state_gib, unit_sizes
from megafrontier.plan.refuse import check_memory
from megafrontier.plan.reserve import Reserve
from megafrontier.plan.resolve import resolve_plan

GIB = 2**30
LAYERS = "model.layers=43"
ONE = ("machine=laptop",)


def refusal(ranks, *chosen):
    config = load_config("configs/gpt-20b.yaml", chosen)
    with pytest.raises(UserError) as caught:
        check_memory(config, resolve_plan(config, ranks))
    return str(caught.value)


def test_a_rank_needs_at_least_state_buffers_and_block_inputs():
    """A layer less than 20B, on one node of Frontier: state and buffers alone would fit."""
    error = refusal(8, LAYERS)
    parts = (
        r"need at least (\S+) on 8 ranks: state (\S+), buffers (\S+), inputs of the blocks (\S+);"
    )
    need, *found = map(float, re.search(parts, error).groups())
    config = load_config("configs/gpt-20b.yaml", [LAYERS])
    model = config.model
    inputs = model.layers * config.train.micro_batch * model.sequence_length * model.hidden * 2
    plan = resolve_plan(config, 8)
    assert found[0] + found[1] < 64
    assert found[0] == pytest.approx(state_gib(config, plan), rel=5e-3)
    assert found[1] == pytest.approx(buffer_gib(config, plan), rel=5e-3)
    assert found[2] == pytest.approx(inputs / GIB, rel=5e-3)
    assert need == pytest.approx(sum(found) + Reserve.of(plan).gib, rel=5e-3)
    kept = (LAYERS, "train.activation_checkpointing=offload", "machine.device.reserved_gib=0")
    config = load_config("configs/gpt-20b.yaml", kept)
    check_memory(config, resolve_plan(config, 8))


@pytest.mark.parametrize(
    ("name", "nodes", "splits", "state", "buffers"),
    [
        ("llama-70b", 128, Splits(tensor=8, pipeline=4), 13.5, 0.489),
        ("llama-8b-128k", 32, Splits(tensor=4, context=8), 11.6, 0.489),
        ("llama-175b", 64, Splits(tensor=4, pipeline=16), 20.06, 1.69),
    ],
)
def test_the_large_llamas_fit_on_frontier_with_the_figures_of_its_docs(
    name, nodes, splits, state, buffers
):
    config = load_config(f"configs/{name}.yaml")
    plan = resolve_plan(config, 8 * nodes)
    check_memory(config, plan)
    assert plan.shape.splits == splits
    found = state_gib(config, plan), buffer_gib(config, plan)
    assert found == pytest.approx((state, buffers), rel=5e-3)
    rows = Path("docs/frontier.md").read_text().splitlines()
    cells = next(row.split(" | ") for row in rows if row.startswith(f"| `{name}`"))
    assert [cells[1], *cells[3:5]] == [str(nodes), f"{state:.1f} GiB", f"{buffers:.1f} GiB"]


@pytest.mark.parametrize("tied", [True, False])
def test_units_are_those_of_the_model(tied):
    config = load_config("configs/gpt-125m.yaml", [f"model.tie_embeddings={str(tied).lower()}"])
    units = unit_sizes(config, Splits())
    assert sum(unit.numel for unit in units) == parameter_count(config.model)
    assert len(units) == config.model.layers + (1 if tied else 2)
    assert any(unit.block == "root" for unit in units) == tied


def test_tensor_ranks_share_the_matrices_and_each_has_the_norms():
    config = load_config("configs/gpt-125m.yaml")
    whole = unit_sizes(config, Splits())
    half = unit_sizes(config, Splits(tensor=2))
    cut = sum(unit.numel for unit in half if "tensor" not in unit.axes)
    kept = sum(unit.numel for unit in half if "tensor" in unit.axes)
    assert 2 * cut + kept == sum(unit.numel for unit in whole)
    assert 0 < kept < 0.05 * cut


def test_context_ranks_share_the_inputs_of_blocks():
    """Four ranks share each sequence and have the same state: a quarter of the inputs."""
    parts = r"inputs of the blocks (\S+);"
    whole, shared = (
        float(re.search(parts, refusal(8, LAYERS, *chosen, "machine.device.memory_gib=1"))[1])
        for chosen in ((), ("parallel.context=4", "train.global_batch=512"))
    )
    assert shared == pytest.approx(whole / 4, rel=5e-3)


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        (
            ("model.sequence_length=2044",),
            r"parallel.context: 8, cuts .* \(2044\), need one of 1, 2",
        ),
        (
            ("parallel.tensor=pair", "model.sequence_length=2032", "parallel.context=4"),
            None,
        ),
    ],
)
def test_a_sequence_must_divide_into_twice_as_many_chunks_as_ranks(chosen, error):
    config = load_config("configs/gpt-20b.yaml", ["parallel.context=8", *chosen])
    if error is None:
        assert resolve_plan(config, 8).shape.splits == Splits(tensor=2, context=4)
    else:
        with pytest.raises(UserError, match=error):
            resolve_plan(config, 8)


@pytest.mark.parametrize("name", ["any", "cpu"])
def test_the_stated_memory_counts_whatever_the_device_is_called(name):
    chosen = f"machine.device.name={name}"
    assert "machine.device.memory_gib: 64, need " in refusal(8, LAYERS, chosen)


def test_a_device_without_stated_memory_refuses_nothing():
    config = load_config("configs/gpt-20b.yaml", ["machine=laptop", "train.global_batch=8"])
    check_memory(config, resolve_plan(config, 1))


@pytest.mark.parametrize(("name", "freed"), [("MI250X", 4), ("cpu", 0)])
def test_a_rank_has_no_copy_of_the_weights_if_asked_and_an_accelerator_no_gradients_in_forward(
    name, freed
):
    def held(in_forward, *chosen):
        config = load_config(
            "configs/gpt-125m.yaml", [*ONE, f"machine.device.name={name}", *chosen]
        )
        return state_gib(config, resolve_plan(config, 1), in_forward) * GIB

    numel = parameter_count(load_config("configs/gpt-125m.yaml").model)
    assert held(False) == 18 * numel
    assert held(False, "partition.weights_copy=false") == 16 * numel
    assert held(True, "partition.weights_copy=false") == (16 - freed) * numel


def test_backward_may_need_more_than_forward_and_the_gradients_come_in_backward():
    """Both in one step with one micro-batch on an accelerator: state without gradients and inputs
    of blocks, or state with gradients."""
    for tokens, names_inputs in ((1024, False), (2**22, True)):
        chosen = [
            *ONE, "machine.device={name: GPU, memory_gib: 0.1}", "train.global_batch=1",
            "train.micro_batch=1", f"model.sequence_length={tokens}",
        ]  # fmt: skip
        config = load_config("configs/gpt-125m.yaml", chosen)
        plan = resolve_plan(config, 1)
        with pytest.raises(UserError) as caught:
            check_memory(config, plan)
        state = state_gib(config, plan, in_first_forward=names_inputs)
        assert f"state {state:.3g}, buffers" in str(caught.value)
        assert ("blocks 0;" in str(caught.value)) != names_inputs
