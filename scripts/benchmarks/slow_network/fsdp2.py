"""torch's FSDP2 as a user would set it up for a slow network: the rival of slow_network.

A fully_shard for every block, embedding and head, weights and gradients bf16 on the wire, fp32
masters, AdamW, clipping. The head is not resharded after its forward, because its backward comes
next. Gradient accumulation is done in the documented way that sends least: full sharding sets
`set_requires_gradient_sync` for the last micro-batch only (one reduce-scatter a step, at the price
of whole gradients in memory), hybrid sharding `set_requires_all_reduce` (reduce-scatter inside the
node in every micro-batch, all-reduce between nodes once a step).
"""

import os
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.config import Config
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.parallel.mesh import Mesh
from megafrontier.plan.resolve import RunPlan
from scripts.benchmarks.shared.job import Job
from scripts.benchmarks.shared.ranks import Stepper, feed, trains, whole_model


class Fsdp2:
    """A GPT sharded by torch; `mode` is `full` (over all ranks) or `hybrid` (inside each node)."""

    def __init__(self, model: GPT, config: Config, mode: str, ranks: int, per_node: int) -> None:
        self.model, self._mode = model, mode
        self._ranks, self._nodes = ranks, ranks // per_node
        self._clip = config.train.clip_grad_norm
        self._dtype = DTYPES[config.train.precision]
        units = [module for _, module in model.units()]
        self._unit_parameters = [sum(p.numel() for p in unit.parameters()) for unit in units]
        if mode == "full":
            mesh = init_device_mesh("cpu", (ranks,))
        else:
            mesh = init_device_mesh(
                "cpu", (self._nodes, per_node), mesh_dim_names=("replicate", "shard")
            )
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=self._dtype)
        for unit in units:
            fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not units[-1]
            )
        fully_shard(model, mesh=mesh, mp_policy=policy)
        _prefetch(units)
        self._optimizer = adamw(model, config)

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step; the mean loss of this rank's tokens."""
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            if self._mode == "full":
                self.model.set_requires_gradient_sync(last)
            else:
                self.model.set_requires_all_reduce(last)
            self.model.set_is_last_backward(last)
            loss = self.model(batch.tokens, batch.targets, batch.documents)
            # FSDP averages over the ranks, which all have as many tokens.
            loss = loss / (batch.targets.numel() * len(batches))
            loss.backward()
            total += loss.detach()
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total.item()

    def world_bytes(self, micro_batches: int) -> int:
        """Bytes that leave one node's NIC in a step when each collective is one ring.

        Full: the ring passes each NIC once, with all pieces but one (gloo's reduce-scatter sends
        twice that). Hybrid: the node's shards are all-reduced, each in a ring of the nodes.
        """
        width = self._dtype.itemsize
        *others, head = self._unit_parameters
        if self._mode == "hybrid":
            passes, ring = 2 * (sum(others) + head), self._nodes
        else:
            passes = micro_batches * (2 * sum(others) + head) + sum(others) + head
            ring = self._ranks if self._nodes > 1 else 1
        return passes * width * (ring - 1) // ring


@trains
def fsdp2(job: Job, config: Config, _: RunPlan, mesh: Mesh) -> Stepper:
    """torch's own sharding, `mode` full or hybrid."""
    loader, batches = feed(job, config, mesh)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    model = whole_model(job, config)
    parameters = sum(p.numel() for p in model.parameters())
    trained = Fsdp2(model, config, job.options["mode"], mesh.levels.ranks, per_node)
    return Stepper(
        lambda: trained.step(next(batches)),
        parameters,
        lambda: trained.world_bytes(loader.micro_batches) // per_node,
    )


def adamw(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """torch's own with the configured values, for this rival and others."""
    chosen = config.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=chosen.lr,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=True,
    )


def _prefetch(units: Sequence[nn.Module]) -> None:
    """Gather one unit ahead, as FSDP2 does by itself where there are streams."""
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    for unit in units:
        unit._set_unshard_async_op(True)
