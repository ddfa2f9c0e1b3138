"""A training step on the clock: its seconds, bytes and memory on one rank."""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from megafrontier.common.errors import need
from megafrontier.config import Config
from megafrontier.model.flops import flops_per_token
from megafrontier.planner.attention import attention_kernel
from megafrontier.planner.clock import COMPUTE, Bar, Clock
from megafrontier.planner.dry_run import DryLoader, dry_mesh, dry_trainer
from megafrontier.planner.meter import ROUNDING, Memory, Meter
from megafrontier.planner.rates import Rates
from megafrontier.training.loop import start_step
from megafrontier.training.plan import GIB, RunPlan
from megafrontier.training.trainer import Trainer

MICRO_BATCHES = 3
"""Simulated in a step at most: a first one, a usual one and a last one. Each further one is as the
usual one."""
STEPS = 2
"""The first one begins without a publication, and allocates."""


@dataclass
class Simulated:
    """One step of one rank."""

    seconds: float
    tokens: int
    """Of the global batch."""
    flops: float
    """Model FLOPs of the step, over all ranks."""
    ranks: int
    sent: dict[str, float]
    """Bytes by level."""
    exposed: dict[str, float]
    """Seconds by level during which the computation waited."""
    computing: float
    """Seconds of operations on the compute lane."""
    memory: dict[str, float]
    """GiB by category, at the peak."""
    bars: list[Bar] = field(default_factory=list)

    @property
    def gib(self) -> float:
        """Bytes of all tensors at the peak, in GiB."""
        return sum(self.memory.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tflops_per_device(self) -> float:
        """Model FLOPs: recomputation does not count."""
        return self.flops / self.ranks / self.seconds / 1e12

    @property
    def limit(self) -> str:
        """What takes the largest part of the step: `compute`, or the level it waits for."""
        parts = {"compute": self.computing, **self.exposed}
        return max(parts, key=lambda name: parts[name])


def simulate(
    config: Config, plan: RunPlan, rank: int = 0, bars: bool = False, rates: Rates | None = None
) -> Simulated:
    """One optimizer step of `rank`, after one that was not counted.

    bars: keep the work of all lanes, for a picture.
    rates: default: those of the plan's machine file.

    Raises UserError for a machine file that lacks a rate, and for what one rank alone on the meta
    device does not show.
    """
    need(config.model.moe is None, "model.moe", "set", "need none: experts are not planned yet")
    pipeline = plan.shape.splits.pipeline
    need(pipeline == 1, "parallel.pipeline", pipeline, "need 1: pipelines are not planned yet")
    rates = rates or Rates.of(plan.machine)
    clock = Clock()
    memory = Memory(ROUNDING[plan.machine.device.is_accelerator])
    with ExitStack() as stack:
        mesh = stack.enter_context(dry_mesh(plan, rank))
        meter = Meter(clock, rates.device, rates.links, memory, mesh.levels_of_groups)
        stack.enter_context(clock.running())
        stack.enter_context(meter)
        stack.enter_context(attention_kernel())
        trainer = dry_trainer(config, plan, mesh, meter, MICRO_BATCHES)
        for _ in range(STEPS):
            counted = _Counted(trainer, meter, bars)
    return counted.result(config, trainer, memory)


class _Counted:
    """A step, and what it took at the end of each micro-batch."""

    def __init__(self, trainer: Trainer, meter: Meter, bars: bool) -> None:
        clock, self._meter = meter.clock, meter
        clock.wait_for_all()
        clock.bars = [] if bars else None
        meter.memory.peak = self._held = meter.memory.now
        self._marks = [self._mark()]
        start_step(trainer, heartbeat=lambda step: self._marks.append(self._mark()))
        self._marks.append(self._mark())
        self._bars = clock.bars or []

    def _mark(self) -> Counter[str]:
        clock, meter = self._meter.clock, self._meter
        found = {"seconds": clock.now, "computing": clock.busy[COMPUTE]}
        found |= {f"sent {level}": sent for level, sent in meter.sent.items()}
        found |= {f"exposed {level}": seconds for level, seconds in clock.exposed.items()}
        return Counter(found)

    def _total(self, more: int) -> dict[str, float]:
        """Differences over the step, with `more` usual micro-batches."""
        first, *_, last = self._marks
        found: dict[str, float] = {name: last[name] - first[name] for name in last}
        if more:
            before, after = self._marks[1:3]
            for name in found:
                found[name] += more * (after[name] - before[name])
        return found

    def result(self, config: Config, trainer: Trainer, memory: Memory) -> Simulated:
        loader = trainer.loader
        assert isinstance(loader, DryLoader)
        total = self._total(loader.all - loader.micro_batches)
        names = trainer.mesh.levels.names
        tokens = config.train.global_batch * config.model.sequence_length
        return Simulated(
            total["seconds"],
            tokens,
            flops_per_token(config.model) * tokens,
            trainer.mesh.world.size,
            {name: total.get(f"sent {name}", 0.0) for name in names},
            {name: total.get(f"exposed {name}", 0.0) for name in names},
            total["computing"],
            _memory(trainer, memory, self._held),
            self._bars,
        )


def _memory(trainer: Trainer, memory: Memory, before: int) -> dict[str, float]:
    """`before`: bytes between two steps."""
    engine, states = trainer.engine, trainer.optimizer.states
    held = {
        "weights": sum(unit.weights.nbytes for unit in engine.units),
        "gradients": sum(unit.gradient.nbytes for unit in engine.units),
        "optimizer": sum(u.master.nbytes for u in engine.units if not u.computes_with_masters)
        + sum(_bytes(t for t in shards if t is not None) for shards in states.values()),
        "error_feedback": sum(_bytes(u.feedback.errors.values()) for u in engine.units),
        "buffers": engine.pool.held_bytes,
        "messages": engine.buffer_bytes - engine.pool.held_bytes,
    }
    held["activations"] = memory.peak - max(before, sum(held.values()))
    held["other"] = max(before - sum(held.values()) + held["activations"], 0)
    return {name: size / GIB for name, size in held.items()}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
