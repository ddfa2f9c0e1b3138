"""A training step on the clock: its seconds, bytes and memory on one rank."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch

from megafrontier.comm.wires.registry import use_kernels
from megafrontier.config import Config
from megafrontier.model.flops import flops_per_token
from megafrontier.plan.footprint import GIB
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.simulation import codecs
from megafrontier.planner.simulation.attention import attention_kernel
from megafrontier.planner.simulation.clock import COMPUTE, Clock
from megafrontier.planner.simulation.dry_run import DryLoader, dry_mesh, dry_trainer
from megafrontier.planner.simulation.memory import ROUNDING, Memory, Peak
from megafrontier.planner.simulation.meter import Meter
from megafrontier.planner.simulation.rates import Rates
from megafrontier.planner.simulation.routing import Routing, RoutingKind
from megafrontier.training.loop import start_step
from megafrontier.training.trainer import Trainer

use_kernels("meta", codecs)
STEPS = 2
"""The first one begins without a publication, and allocates. What it publishes goes on under the
second one."""


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
    """Seconds of operations on the compute timeline."""
    memories: list[dict[str, float]]
    """GiB by category, at each of the peaks of `Memory`."""
    worst_memories: list[dict[str, float]] | None = None
    """The same if the tokens of a mixture of experts go where they need the most."""
    bubble: float = 0.0
    """Share of the step in which ranks of a pipeline wait for others, 0 to 1."""

    @property
    def memory(self) -> dict[str, float]:
        """GiB by category, at the peak."""
        return max(self.memories, key=_total)

    @property
    def worst_memory(self) -> dict[str, float] | None:
        """`memory` if the tokens of a mixture of experts go where they need the most."""
        return None if self.worst_memories is None else max(self.worst_memories, key=_total)

    @property
    def gib(self) -> float:
        """Bytes of all tensors at the peak, in GiB."""
        return _total(self.memory)

    @property
    def worst_gib(self) -> float:
        """The same with the worst routing of tokens."""
        return max(self.gib, _total(self.worst_memory or {}))

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


def _total(memory: Mapping[str, float]) -> float:
    return sum(memory.values())


Prepare = Callable[[Trainer], object]


def run_rank(
    config: Config,
    plan: RunPlan,
    rates: Rates,
    rank: int,
    most: int,
    prepare: Prepare | None = None,
    routing: RoutingKind = "uniform",
) -> "Counted":
    """A step of `rank` with at most `most` micro-batches. `prepare`: changes its trainer before.
    `routing`: of tokens to experts."""
    clock = Clock()
    memory = Memory(ROUNDING[plan.machine.device.is_accelerator])
    with ExitStack() as stack:
        gc.freeze()  # a collection then looks at what is made here alone
        stack.callback(gc.unfreeze)
        mesh = stack.enter_context(dry_mesh(plan, rank))
        meter = Meter(clock, rates.device, rates.links, memory, mesh.levels_of_groups)
        stack.enter_context(clock.running())
        stack.enter_context(meter)
        stack.enter_context(attention_kernel())
        if config.model.moe is not None:
            routed = Routing(routing, config.model.moe, plan.machine.device)
            stack.enter_context(routed.running())
        trainer = dry_trainer(config, plan, mesh, meter, most)
        gc.collect()  # what it took to build the model, which reference cycles keep alive
        if prepare is not None:
            prepare(trainer)
        for _ in range(STEPS):
            counted = Counted(trainer, meter)
    return counted


Marks = Sequence[Mapping[str, float]]


class Counted:
    """A step of one rank.

    marks: all counts before the step, each time that training reports a heartbeat, and at the end.
    """

    def __init__(self, trainer: Trainer, meter: Meter) -> None:
        self.trainer, self._meter = trainer, meter
        memory, units = meter.memory, trainer.engine.trained_units
        memory.gradients = lambda: [u.gradient.nbytes for u in units if u.gradient.numel()]
        memory.restart()
        held = memory.now - sum(memory.gradients())
        self.marks = [self._mark()]
        start_step(trainer, heartbeat=lambda step: self.marks.append(self._mark()))
        self.marks.append(self._mark())
        self._memories = [_memory(trainer, peak, held) for peak in memory.peaks]

    @property
    def loader(self) -> DryLoader:
        """What the step has read."""
        return cast(DryLoader, self.trainer.loader)

    def _mark(self) -> Counter[str]:
        clock, meter = self._meter.clock, self._meter
        found = {"seconds": clock.now, "computing": clock.busy[COMPUTE]}
        found["held"] = meter.memory.now - sum(meter.memory.gradients())
        found |= {f"sent {level}": sent for level, sent in meter.sent.items()}
        found |= {f"exposed {level}": seconds for level, seconds in clock.exposed.items()}
        return Counter(found)  # in which what was not counted yet is 0

    def result(
        self, config: Config, extend: Callable[[dict[str, float]], dict[str, float]]
    ) -> Simulated:
        """The step with all micro-batches: `extend` adds those that were left out to the totals."""
        first, *_, last = self.marks
        total = extend({name: last[name] - first[name] for name in last})
        names = self.trainer.mesh.levels.names
        tokens = config.train.global_batch * config.model.sequence_length
        return Simulated(
            total["seconds"],
            tokens,
            flops_per_token(config.model) * tokens,
            self.trainer.mesh.world.size,
            {name: total.get(f"sent {name}", 0.0) for name in names},
            {name: total.get(f"exposed {name}", 0.0) for name in names},
            total["computing"],
            self._memories,
        )


def _memory(trainer: Trainer, peak: Peak, before: int) -> dict[str, float]:
    """`before`: bytes between two steps without gradients, which an accelerator does not keep."""
    engine, sites = trainer.engine, trainer.config.sites
    elements = sum(unit.master.numel() for unit in engine.trained_units)
    held = {
        "weights": sum(unit.weights.nbytes for unit in engine.units),
        "gradients": peak.gradients,
        "optimizer": _bytes(_optimizer_tensors(trainer))
        + (0 if sites is None else sites.state_itemsize * elements),
        "error_feedback": sum(_bytes(u.feedback.errors.values()) for u in engine.units),
        "buffers": engine.pool.held_bytes,
        "messages": engine.buffer_bytes - engine.pool.held_bytes,
    }
    before += peak.gradients
    known = sum(held.values())
    held["activations"] = max(peak.bytes - max(before, known), 0)
    held["other"] = max(before - known, 0)
    return {name: size / GIB for name, size in held.items()}


def _optimizer_tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    """Masters beside the weights, and states of the optimizer, which lie on the device."""
    yield from (u.master for u in trainer.engine.units if not (u.computes_with_masters or u.host))
    for shards in trainer.optimizer.states.values():
        for unit, shard in zip(trainer.engine.trained_units, shards, strict=True):
            if shard is not None and unit.host is None:
                yield shard


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
