"""Which blocks of a model each stage of a pipeline has, and what a rank keeps of the model."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import nn

from megafrontier.common.errors import need
from megafrontier.config import ModelConfig, ParallelConfig
from megafrontier.model.gpt import GPT
from megafrontier.model.linear import Linear
from megafrontier.parallel.mesh import ENDS, Mesh
from megafrontier.parallel.param_spec import set_spec, spec_of
from megafrontier.pipeline.balance import balanced_layers
from megafrontier.pipeline.schedule import find_schedule, make_table
from megafrontier.pipeline.table import Action, ActionKind, StageRow, Table
from megafrontier.pipeline.transfers import with_transfers


@dataclass(frozen=True)
class Division:
    """A pipeline's schedule, and the number of blocks of each stage, first stage first."""

    schedule: str
    ranks: int
    stages_per_rank: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int, model: ModelConfig) -> "Division":
        """The division of a configuration's model over `ranks` ranks.

        Without `layers` the stages cost about the same. Raises UserError for keys without a
        pipeline, a schedule that does not fit, layers that do not divide, and a stage without
        blocks.
        """
        chosen, default = parallel, ParallelConfig()
        if ranks == 1:
            for name in ("stages_per_rank", "schedule", "layers"):
                value, only = getattr(chosen, name), getattr(default, name)
                need(value == only, f"parallel.{name}", value, "need parallel.pipeline")
            return cls("1f1b", 1, 1, (model.layers,))
        find_schedule(chosen.schedule).check(chosen.stages_per_rank)
        stages = ranks * chosen.stages_per_rank
        layers = tuple(chosen.layers) or balanced_layers(model, stages)
        fits = f"need {stages} numbers, one for each stage"
        need(len(layers) == stages, "parallel.layers", list(layers), fits)
        fits = f"need a sum of model.layers ({model.layers})"
        need(sum(layers) == model.layers, "parallel.layers", list(layers), fits)
        return cls(chosen.schedule, ranks, chosen.stages_per_rank, layers)

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed apart."""
        return find_schedule(self.schedule).splits_backward

    def blocks(self, stage: int) -> range:
        """The numbers of a stage's blocks in the whole model."""
        last = list(accumulate(self.layers))[stage]
        return range(last - self.layers[stage], last)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank of the pipeline, in the order of the blocks."""
        return find_schedule(self.schedule).stages_of(self.ranks, self.stages_per_rank, rank)

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that has a stage."""
        return find_schedule(self.schedule).rank_of(self.ranks, self.stages_per_rank, stage)

    def distinct_ranks(self) -> tuple[int, ...]:
        """Ranks of the pipeline of which one holds the largest part of the model: those with the
        embedding and the head, and the one with most blocks between them."""
        ends = {0, self.rank_of(self.stages - 1)}
        between = [rank for rank in range(self.ranks) if rank not in ends]
        largest = max(between, key=self._blocks_of, default=None)
        return tuple(sorted(ends | ({largest} if largest is not None else set())))

    def _blocks_of(self, rank: int) -> int:
        return sum(self.layers[stage] for stage in self.stages_of(rank))

    def blocks_in_flight(self, micro_batches: int) -> int:
        """The most blocks that a rank has inputs of at a time, one for each micro-batch whose
        backward is not over."""
        most = 0
        for row in self.table(micro_batches):
            held = 0
            for action in row:
                layers = self.layers[action.stage]
                held += layers * (action.kind is ActionKind.FORWARD)
                most = max(most, held)
                held -= layers * (action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT))
        return most

    def table(self, micro_batches: int) -> Table:
        """The actions of each rank in a step."""
        return make_table(self.schedule, self.ranks, self.stages_per_rank, micro_batches)

    def row(self, rank: int, micro_batches: int, early: bool, trains: bool = True) -> StageRow:
        """What a rank does in a step, with its messages; without `trains`, the forwards alone.
        `early`: as in `with_transfers`."""
        table = self.table(micro_batches)
        if not trains:
            table = tuple(tuple(a for a in row if a.kind is ActionKind.FORWARD) for row in table)
        return with_transfers(table, early)[rank]


def last_backwards(row: StageRow) -> dict[Action, bool]:
    """The last action of a step that gives a stage's weights a gradient, for each stage of a row;
    True for the last of them all."""
    ends = [
        item
        for item in row
        if isinstance(item, Action)
        and item.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    ]
    last = {action.stage: action for action in ends}
    return {action: action is ends[-1] for action in last.values()}


def divide_model(model: GPT, division: Division, mesh: Mesh) -> None:
    """`keep_stages` for this rank, and the groups of its pipeline. All ranks call it."""
    if division.ranks == 1:
        return
    # Now, because torch numbers groups: ranks of several stages must have made equally many before.
    ranks = mesh.shape.pipeline_ranks(mesh.rank)
    mesh.group(ranks)
    keep_stages(model, division, mesh.pipeline_rank)
    if any(ENDS in spec_of(name, p).axes for name, p in model.named_parameters()):
        mesh.group((ranks[0], ranks[-1]))


def keep_stages(model: GPT, division: Division, rank: int) -> None:
    """Leave a GPT, which may be on the meta device, only what the stages of a rank of the pipeline
    need. Blocks keep their numbers in names.

    Call it before other splits. The matrix of the embedding belongs to the first stage, and if it
    is tied, or for `prediction`, to the last one; if these are on different ranks, its spec says so
    (`ENDS`).
    """
    stages = division.stages_of(rank)
    blocks = nn.ModuleList()
    for stage in stages:
        for number in division.blocks(stage):
            blocks.add_module(str(number), model.blocks[number])
    model.add_module("blocks", blocks)
    has_first, has_last = 0 in stages, division.stages - 1 in stages
    predicts = model.prediction is not None
    if (model.config.tie_embeddings or predicts) and has_first != has_last:
        matrix = model.embedding.tokens.weight
        assert isinstance(matrix, nn.Parameter)
        name = "embedding.tokens.weight"
        spec = spec_of(name, matrix)
        set_spec(matrix, replace(spec, name=name, axes=(*spec.axes, ENDS)))
        if has_last and not predicts:
            rows, width = matrix.shape
            with torch.device("meta"):
                model.head.output = Linear(width, rows, std=0.0)
            model.head.output.weight = matrix
    if has_last and predicts:
        model.embedding_place = "both" if has_first else "last"
    elif not has_first:
        del model.embedding
    if not has_last:
        del model.head
        model.prediction = None


def block_names(model: GPT, division: Division, rank: int) -> list[list[str]]:
    """The names of the engine's blocks (`GPT.units`) in each stage of a rank, for `shard`."""
    known = {name for name, _ in model.units()}
    last = ["prediction", "head"]
    if model.embedding_place == "last":
        last.insert(0, "embedding")
    return [
        [
            name
            for name in (
                *(["embedding"] if stage == 0 else []),
                *(f"blocks.{number}" for number in division.blocks(stage)),
                *(last if stage == division.stages - 1 else []),
            )
            if name in known
        ]
        for stage in division.stages_of(rank)
    ]
