"""torch.distributed.pipelining with FSDP2, as its documentation and torchtitan set them up.

Each stage is sharded over the ranks that hold it. Its weights stay unsharded through the step, so
nothing is gathered in a micro-batch (torchtitan's default with a pipeline), or are resharded after
each forward. Gradients are reduced once a step.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.config import Config
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.parallel.mesh import Mesh
from megafrontier.pipeline.division import Division, keep_stages
from megafrontier.pipeline.schedule import find_schedule
from scripts.benchmarks.pipeline.stand_in import StandIn
from scripts.benchmarks.slow_network.fsdp2 import adamw

SCHEDULES = {
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


class _Stage(nn.Module):
    """Tokens or hidden states → hidden states, or logits."""

    def __init__(self, model: GPT, blocks: range) -> None:
        super().__init__()
        self.model, self.blocks = model, blocks

    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.is_floating_point():
            return self.model(inputs, blocks=self.blocks)
        tokens = inputs.new_zeros(inputs.shape[:2], dtype=torch.int64)  # gives shape and positions
        return self.model(tokens, hidden=inputs, blocks=self.blocks)


class TorchPipeline:
    """A GPT over the ranks of a pipeline and the data-parallel ranks of each stage."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        schedule: str,
        micro_batches: int,
        tick: float,
        reshards: bool,
    ) -> None:
        """`tick`: seconds of a forward of all blocks of a rank. `reshards`: weights are resharded
        after a forward, so that a rank holds few of them unsharded."""
        self._config, self._mesh, self._reshards = config, mesh, reshards
        ranks = mesh.splits.pipeline
        per_rank = 1 if schedule == "1f1b" else 2
        devices = init_device_mesh(
            "cpu", (ranks, mesh.levels.ranks // ranks), mesh_dim_names=("pp", "dp")
        )
        kind = "zero_bubble" if schedule == "zbv" else "interleaved"
        division = Division(
            "1f1b", ranks * per_rank, 1, even(config.model.layers, ranks * per_rank)
        )
        own = [
            s
            for s in range(division.stages)
            if find_schedule(kind).rank_of(ranks, per_rank, s) == mesh.pipeline_rank
        ]
        self._modules = [self._module(division, s, devices["dp"]) for s in own]
        self._is_first, self._is_last = 0 in own, division.stages - 1 in own
        stages = [
            PipelineStage(m, s, division.stages, mesh.device, group=devices["pp"].get_group())
            for m, s in zip(self._modules, own, strict=True)
        ]
        for stage in stages:
            _occupy(stage, tick / per_rank)
        self._schedule = SCHEDULES[schedule](
            stages[0] if per_rank == 1 else stages,
            n_microbatches=micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self._optimizers = [adamw(module, config) for module in self._modules]
        dist.barrier()

    def _module(self, division: Division, stage: int, devices: object) -> _Stage:
        config = self._config
        model = GPT(config.model, loss_chunk_tokens=config.train.loss_chunk_tokens)
        initialise(model, config.run.seed)
        keep_stages(model, division, stage)
        dtype = DTYPES[config.train.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        module = _Stage(model, division.blocks(stage))
        for part in (*(unit for _, unit in model.units()), module):
            fully_shard(part, mesh=devices, mp_policy=policy, reshard_after_forward=self._reshards)
        return module

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        train = self._config.train
        tokens = train.global_batch * self._config.model.sequence_length
        # FSDP averages over the data-parallel ranks.
        size = self._mesh.data_size
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") * (
            size / tokens
        )

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step; the mean loss on ranks with the last stage."""
        inputs = (torch.cat([b.tokens for b in batches]),) if self._is_first else ()
        losses: list[Tensor] = []
        targets = torch.cat([b.targets for b in batches]) if self._is_last else None
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(sum(loss.item() for loss in losses))


def even(layers: int, stages: int) -> tuple[int, ...]:
    """As many blocks for each stage."""
    return (layers // stages,) * stages


def _occupy(stage: PipelineStage, tick: float) -> None:
    """Let the stage's actions take the time of a device."""
    clock = StandIn()
    stage.forward_one_chunk = clock.taking(tick, stage.forward_one_chunk)
    whole = clock.taking(2 * tick, stage.backward_one_chunk)
    part = clock.taking(tick, stage.backward_one_chunk)

    def backward(*arguments: object, full_backward: bool = True, **named: object) -> object:
        chosen = whole if full_backward else part
        return chosen(*arguments, full_backward=full_backward, **named)

    stage.backward_one_chunk = backward
    stage.backward_weight_one_chunk = clock.taking(tick, stage.backward_weight_one_chunk)
