"""What a layout sends, and what its backward needs, estimated by formula: by this the search sorts
layouts, before it simulates the most promising ones. The order of magnitude of each level's bytes
is enough for that."""

from collections.abc import Sequence
from math import prod

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.comm.wires.wire import Wires
from megafrontier.config import Config, ModelConfig
from megafrontier.model.recompute.checkpointing import RECOMPUTES_BLOCK, Mode
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition import Placement
from megafrontier.partition.rules import StateRules
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.simulation.routing import distinct_share
from megafrontier.splits.token_dispatch import PEAK

SAVED = {"none": 1.0, "selective": 0.5, "block": 0.0, "offload": 0.0}
"""Of what the operations of a block save for backward, by checkpointing mode."""
NORM_BYTES = {"layernorm": 22, "rmsnorm": 40}
"""That a block with this norm saves for a token and hidden element, beside its MLP, in 16 bits.
These and the bytes of experts are those of 20 layouts on the clock."""
LATE = 0.7
"""Of what blocks save without recomputation, that which waits for gradients of weights."""
UnitGroup = tuple[int, Levels, StateRules]
"""Elements of all units with the same levels, these, and how the units are sharded."""


def sent_bytes(
    config: Config, plan: RunPlan, units: Sequence[UnitGroup], micro_batches: int
) -> list[float]:
    """Bytes that one rank sends over each level in a step."""
    recomputed = sum(mode in RECOMPUTES_BLOCK for mode in config.checkpointing)
    parts = _tensor(config, plan, recomputed), _tokens(config, plan, recomputed)
    stages = plan.shape.splits.pipeline
    split = zip(*parts, _borders(config, plan), strict=True)
    sent = [
        micro_batches * ((activations + tokens) / stages + hidden)
        for activations, tokens, hidden in split
    ]
    for numel, over, rules in units:
        # Each forward and each backward gathers the weights.
        passes = micro_batches, 2 * micro_batches
        states = state_bytes(numel, rules.placement.on(over), over, rules.wires, *passes)
        sent = [a + b for a, b in zip(sent, states, strict=True)]
    return sent


def sent_messages(
    plan: RunPlan, units: Sequence[UnitGroup], blocks: int, micro_batches: int
) -> list[int]:
    """Messages one after the other that a rank sends over each level in a step, for the states of
    so many blocks: of the kind of parameters that has most."""
    most = [0] * len(plan.levels.sizes)
    for _, over, rules in units:
        placement = rules.placement.on(over)
        for i, size in enumerate(over.sizes):
            gathers, reductions = _passes(placement, i, micro_batches, 2 * micro_batches)
            most[i] = max(most[i], (size - 1) * (gathers + reductions) * blocks)
    return most


def _passes(placement: Placement, level: int, micro_batches: int, gathers: int) -> tuple[int, int]:
    """How often a step gathers a unit over a level, and reduces its gradients there."""
    gathered = gathers if level < placement.backward_weights else int(level < placement.optimizer)
    reduced = micro_batches if level < placement.gradients else 1
    return gathered, reduced + (level >= placement.optimizer)  # every replica gathers the sum


def state_bytes(
    numel: int,
    placement: Placement,
    levels: Levels,
    wires: Wires,
    micro_batches: int,
    gathers: int,
) -> list[int]:
    """Bytes of weights and gradients of a unit of `numel` elements that one rank sends over each
    level in a step that gathers the unit `gathers` times. A collective over a level of size s sends
    s - 1 messages."""
    totals = []
    for i, size in enumerate(levels.sizes):
        shard = numel // prod(levels.sizes[: i + 1])
        gathered, reduced = _passes(placement, i, micro_batches, gathers)
        # A delta is passed on as one message of each owner.
        owners = prod(levels.sizes[i + 1 : placement.optimizer]) if wires.gather[i].is_delta else 1
        message = wires.reduce[i].codec.message_bytes(shard) * reduced
        message += wires.gather[i].codec.message_bytes(shard // owners) * owners * gathered
        totals.append((size - 1) * message)
    return totals


def _tensor(config: Config, plan: RunPlan, recomputed: int) -> list[float]:
    """To the ranks that share its matrices, for a micro-batch: 4 gathers and sums of the hidden
    states in a block's forward, 6 in its backward, 4 at both ends of the model."""
    levels, model = plan.shape.over(("tensor",)), config.model
    times = 10 * model.trained_layers + 4 * recomputed + 4
    elements = config.train.micro_batch * model.sequence_length * model.hidden
    elements //= plan.shape.splits.context
    dtype = DTYPES[config.train.precision]
    return [
        float(times * (size - 1) * codec.message_bytes(elements // prod(levels.sizes[: i + 1])))
        for i, size in enumerate(levels.sizes)
        for codec in [plan.activations.codec(i, dtype)]
    ]


def _borders(config: Config, plan: RunPlan) -> list[float]:
    """To the next stage of a pipeline and back, for a micro-batch: over its outermost level, which
    some ranks cross."""
    levels, splits = plan.shape.over(("pipeline",)), plan.shape.splits
    elements = config.train.micro_batch * config.model.sequence_length * config.model.hidden
    elements //= splits.tensor * splits.context
    dtype, sent = DTYPES[config.train.precision], [0.0] * len(levels.sizes)
    for level, size in enumerate(levels.sizes):
        if size > 1:
            sent = [0.0] * len(sent)
            times = 2 * plan.division.stages_per_rank
            sent[level] = float(
                times * plan.activations.codec(level, dtype).message_bytes(elements)
            )
    return sent


def _tokens(config: Config, plan: RunPlan, recomputed: int) -> list[float]:
    """To ranks with other experts and back, for a micro-batch, if all experts are chosen with equal
    probability."""
    levels = plan.shape.over(("expert",)).joined(plan.joined)
    model, moe = config.model, config.model.moe
    if moe is None:
        return [0.0] * len(levels.sizes)
    tokens = config.train.micro_batch * model.sequence_length
    tokens //= plan.shape.splits.context * plan.shape.splits.tensor
    # There and back, in forward and backward; again if the block is recomputed.
    times = moe.blocks(model.layers) * (4 + 2 * recomputed / model.trained_layers)
    dtype, sent = DTYPES[config.train.precision], []
    for i, (stride, size) in enumerate(zip(levels.strides, levels.sizes, strict=True)):
        groups = levels.ranks // stride
        rows = tokens * groups * distinct_share(moe, moe.experts // groups) * (size - 1) / size
        sent.append(times * rows * plan.tokens.codec(i, dtype).message_bytes(model.hidden))
    return sent


def backward_bytes(
    model: ModelConfig,
    modes: Sequence[Mode],
    blocks: float,
    tokens: float,
    in_flight: float,
    expert_ranks: int,
    splits_backward: bool = False,
) -> float:
    """What a rank needs for backward, with so many blocks and micro-batches of so many tokens, if
    those tokens of a mixture come to it that need the most. `modes`: of equal parts of the blocks.
    `splits_backward`: of a schedule that computes gradients of weights later.
    """
    late = LATE if splits_backward else 0.0
    share = max(late, sum(SAVED[mode] for mode in modes) / len(modes))
    whole = max(late, sum(mode == "none" for mode in modes) / len(modes))
    inputs = 2 * model.hidden * sum(mode != "offload" for mode in modes) / len(modes)
    each, held = _block_bytes(model), blocks * in_flight
    experts = _expert_bytes(model, held * whole, expert_ranks)
    return tokens * (held * (inputs + share * each) + each + experts)


def _block_bytes(model: ModelConfig) -> int:
    """That a block without experts saves for a token."""
    has_mlp = model.moe is None or model.moe.blocks(model.layers) < model.layers
    width = model.mlp_hidden * has_mlp * (3 if model.is_gated else 2)
    return NORM_BYTES[model.norm] * model.hidden + 2 * width


def _expert_bytes(model: ModelConfig, kept_blocks: float, ranks: int) -> float:
    """That experts save and need for a token: of blocks that are kept, and of that in backward."""
    moe, hidden = model.moe, model.hidden
    if moe is None:
        return 0.0
    there = min(moe.active, moe.experts // ranks)
    rows = min(PEAK, ranks * there / moe.active) * moe.active
    width = moe.ffn_hidden or model.mlp_hidden
    kept = kept_blocks * moe.blocks(model.layers) / model.layers
    return rows * (kept * 8 * (hidden + width) + 28 * hidden + 7 * width)
