"""Divide the blocks of a model into stages of about the same cost, and say what a step idles.

Costs are FLOPs per token, as `model.flops` counts them: matrix products and attention, of experts
those that process a token. The embedding counts with the last bits of a cost: its lookup multiplies
nothing. The head counts fully, and with it the block of `prediction`, which uses it a second time.
With a large vocabulary it costs as much as several blocks.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from megafrontier.common.errors import need
from megafrontier.config import ModelConfig
from megafrontier.model.attention.kinds import kind_of
from megafrontier.model.flops import parameter_specs
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.pipeline.schedule import make_table
from megafrontier.pipeline.simulate import StageCosts, simulate

_Key = tuple[float, float]


def balanced_layers(config: ModelConfig, stages: int) -> tuple[int, ...]:
    """The number of blocks of each stage, for which the most expensive stage costs least.

    Among such divisions, the one with the least sum of squared costs. Raises UserError if a stage
    would have no block.
    """
    fits = f"need at least {stages}, one block for each stage"
    need(config.layers >= stages, "model.layers", config.layers, fits)
    return _divide(tuple(block_flops(config)), embedding_flops(config), head_flops(config), stages)


def stage_costs(config: ModelConfig, layers: Sequence[int]) -> list[StageCosts]:
    """The costs of each stage's actions in FLOPs per token, if stages have `layers` blocks.

    A backward costs two forwards. Its part for weights has the matrices that `split_backward`
    leaves to it: those of blocks, experts included.
    """
    sums = _sums(block_flops(config), embedding_flops(config), head_flops(config))
    late = [0.0, *accumulate(_late_flops(config))]
    late[-1] += _prediction_flops(config, 2)
    costs = []
    for start, end in pairwise([0, *accumulate(layers)]):
        forward, weights = (sums[end] - sums[start]) / 3, late[end] - late[start]
        costs.append(StageCosts(forward, 2 * forward - weights, weights))
    return costs


def bubble(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, costs: Sequence[StageCosts]
) -> float:
    """The share of a step in which the ranks of a pipeline wait, 0 to 1, without transfers."""
    table = make_table(schedule, ranks, stages_per_rank, micro_batches)
    return simulate(table, costs).bubble


def describe_pipeline(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, costs: Sequence[StageCosts]
) -> str:
    """One line with the bubble, a warning if there are fewer micro-batches than ranks."""
    share = bubble(schedule, ranks, stages_per_rank, micro_batches, costs)
    stages = f"{ranks * stages_per_rank} stages"
    if stages_per_rank > 1:
        stages += f" on {ranks} ranks"
    numbers = f"{stages}, {schedule}, {micro_batches} micro-batches"
    if micro_batches < ranks:
        return (
            f"warning: pipeline: {numbers}: bubble {share:.0%}; a larger train.global_batch or a "
            f"smaller train.micro_batch gives {ranks} micro-batches or more"
        )
    return f"pipeline: {numbers}: bubble {share:.0%}"


def block_flops(config: ModelConfig) -> list[float]:
    """FLOPs per token of each block, forward and backward."""
    costs = [kind_of(config, i).flops(config, i) for i in range(config.layers)]
    for name, spec in parameter_specs(config).items():
        if not name.startswith("blocks."):
            continue
        costs[int(name.split(".")[1])] += 6 * _multiplied(config, spec) * spec.valid_numel
    return costs


def _share(config: ModelConfig, spec: ParamSpec) -> float:
    """The share of a block's matrices that multiply a token; 0 for other parameters."""
    if spec.kind == "expert" and config.moe is not None:
        return config.moe.active / config.moe.experts
    return 1.0 if spec.kind == "matrix" else 0.0


def _late_flops(config: ModelConfig) -> list[float]:
    """FLOPs per token of the gradients of each block's matrices."""
    costs = [0.0] * config.layers
    for name, spec in parameter_specs(config).items():
        if name.startswith("blocks."):
            costs[int(name.split(".")[1])] += 2 * _share(config, spec) * spec.valid_numel
    return costs


def embedding_flops(config: ModelConfig) -> float:
    """FLOPs per token of the embedding: additions of positions and of gradients."""
    return 2.0 * config.hidden


def head_flops(config: ModelConfig) -> float:
    """FLOPs per token of what follows the blocks, forward and backward: the head, and the block of
    `prediction`, with which the head runs twice."""
    head = 6.0 * config.vocab_size * config.hidden
    if config.prediction is None:
        return head
    attention = kind_of(config, config.layers).flops(config, config.layers)
    return 2 * head + attention + _prediction_flops(config, 6)


def _prediction_flops(config: ModelConfig, factor: int) -> float:
    """`factor` operations for each element that multiplies a token in the matrices of
    `prediction`."""
    specs = parameter_specs(config).items()
    found = [spec for name, spec in specs if name.startswith("prediction.")]
    return factor * sum(_multiplied(config, spec) * spec.valid_numel for spec in found)


def _multiplied(config: ModelConfig, spec: ParamSpec) -> float:
    """`_share`, and routers."""
    return 1.0 if spec.kind == "router" else _share(config, spec)


def _sums(blocks: Sequence[float], first: float, last: float) -> list[float]:
    """For each number of blocks, the cost of the part of the model that ends there."""
    sums = [0.0, *(first + cost for cost in accumulate(blocks))]
    sums[-1] += last
    return sums


@cache
def _divide(blocks: tuple[float, ...], first: float, last: float, stages: int) -> tuple[int, ...]:
    """Dynamic programming over the ends of stages: the best division of blocks 0 to end - 1."""
    sums = _sums(blocks, first, last)
    count = len(blocks)
    best: list[tuple[_Key, tuple[int, ...]]] = [
        ((sums[end], sums[end] ** 2), (end,)) for end in range(1, count + 1)
    ]
    best.insert(0, ((0.0, 0.0), ()))
    for stage in range(1, stages):
        row = [best[0]] * (count + 1)
        for end in range(stage + 1, count + 1):
            row[end] = min(
                _extended(best[start], sums[end] - sums[start], end - start)
                for start in range(stage, end)
            )
        best = row
    return best[count][1]


def _extended(
    division: tuple[_Key, tuple[int, ...]], cost: float, blocks: int
) -> tuple[_Key, tuple[int, ...]]:
    (largest, squares), layers = division
    return (max(largest, cost), squares + cost**2), (*layers, blocks)
