"""One rank of a run, built by the code that trains, on the meta device and torch's `fake` backend.

No weights are allocated and nothing is sent, so that a laptop builds a rank of any machine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megafrontier.config import Config
from megafrontier.data.sampling.loader import Loader
from megafrontier.data.sampling.samples import Batch
from megafrontier.optim.base import FlatShards, UnitOptimizer
from megafrontier.parallel.groups import make_groups
from megafrontier.parallel.mesh import AXES, Mesh
from megafrontier.parallel.world import World
from megafrontier.plan.assemble import build_model
from megafrontier.plan.resolve import RunPlan, micro_batches_of
from megafrontier.planner.simulation.meter import COLLECTIVES, Meter
from megafrontier.training.trainer import Trainer, make_trainer

META = torch.device("meta")
FIRST = 2
"""Micro-batches of the first step: one without the last one's reductions, and the last one."""


class DryWorld(World):
    """All ranks, of which one exists. The others agree with it."""

    def all_true(self, ok: bool) -> bool:
        """`ok`."""
        return ok

    def first_error(self, message: str | None) -> str | None:
        """`message`."""
        return message

    def broadcast_from_rank_0(self, look: Callable[[], str]) -> str:
        """What this rank finds."""
        return look()


@contextmanager
def dry_mesh(plan: RunPlan, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of one rank of a plan. No process group may exist outside of the body."""
    size = plan.levels.ranks
    _accept_meta_tensors()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        world = DryWorld(rank, size, META)
        mesh = Mesh(plan.shape, world)
        peers = plan.shape.peers(rank, AXES)
        world.groups = make_groups(peers, META, mesh.timeout)
        yield mesh
    finally:
        dist.destroy_process_group()


@cache
def _accept_meta_tensors() -> torch.library.Library:
    """Let collectives take meta tensors, for which torch 2.10 has no kernels.

    The kernels of CPU tensors hand them to the `fake` backend. Ends with the returned library.
    """
    library = torch.library.Library("c10d", "IMPL")
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in COLLECTIVES:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            operator = getattr(torch.ops.c10d, name).default
            library.impl(name, partial(operator.redispatch, cpu), "Meta")
    return library


def dry_trainer(config: Config, plan: RunPlan, mesh: Mesh, meter: Meter, most: int) -> Trainer:
    """A trainer that reads at most `most` micro-batches a step. They have no values."""
    train = replace(config.train, compile=False, linear_precision=None)
    log = replace(config.log, tensor_norms=0)  # of few steps
    config = replace(config, train=train, log=log)
    built = build_model(config, plan, mesh, has_values=False)
    built[1].pool.shards.keeps = not plan.machine.device.is_accelerator
    loader = cast(Loader, DryLoader(config, plan, most))
    fused = partial(_Elementwise, meter)
    trainer = make_trainer(config, plan, mesh, built, loader, elementwise=fused)
    states = (shard for found in trainer.optimizer.states.values() for shard in found)
    hosts = (unit.host for unit in built[1].units if unit.host is not None)
    if plan.is_offloaded:
        meter.memory.move_to_host(shard for shard in states if shard is not None)
        meter.memory.move_to_host(t for host in hosts for t in (host.master, host.staging))
    return trainer


class DryLoader:
    """Micro-batches of the right shapes, without documents."""

    def __init__(self, config: Config, plan: RunPlan, most: int) -> None:
        self.all = micro_batches_of(config, plan)
        """Micro-batches of a real step."""
        self.micro_batches = min(most, self.all)
        self._shape = config.train.micro_batch, config.model.sequence_length

    def sample_range(self, step: int) -> tuple[int, int]:
        """As `Loader.sample_range`."""
        return 0, 0

    def step(self, step: int) -> list[Batch]:
        """As `Loader.step`."""
        tokens = torch.empty(self._shape, dtype=torch.int64, device=META)
        # The first step only has to leave what the next one finds.
        count = self.micro_batches if step else min(FIRST, self.micro_batches)
        return [Batch(tokens, tokens, None, 0) for _ in range(count)]


class _Elementwise(UnitOptimizer):
    """What an optimizer of single elements holds and computes. Its kernel passes over them once."""

    def __init__(self, meter: Meter, kind: type[UnitOptimizer], masters: FlatShards) -> None:
        self._meter = meter
        self.states = {name: [torch.zeros_like(m) for m in masters] for name in kind.state_names}
        held = sum(master.nbytes for master in masters)
        # It reads the gradient, and reads and writes the master and the states.
        self._moved = held * (3 + 2 * len(self.states))

    def step(
        self, gradients: FlatShards, lr: float, divisor: torch.Tensor, skip: torch.Tensor
    ) -> None:
        """As `UnitOptimizer.step`."""
        if self._meter.memory.is_on_host(gradients[0]):
            self._meter.move_on_host(self._moved)
        else:
            self._meter.move(self._moved)
