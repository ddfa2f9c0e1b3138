"""The engine: a model's state placed on a hierarchy, and the steps of training it there.

    engine = shard(model, blocks, placement, hierarchy)
    for i, batch in enumerate(micro_batches):
        loss = model(batch)  # a sum over tokens, not a mean
        engine.backward(loss, is_last=i == len(micro_batches) - 1)
    gradients = engine.finish_gradients()
    ... update each unit.master with its finished gradient, or leave all of them (skip) ...
    engine.finish_step(skip)

When a unit is whole and when its gradient is reduced is the matter of `schedule.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.comm.ledger import Ledger
from megafrontier.partition.comm.streams import CommStreams, Policy
from megafrontier.partition.hooks import ModuleHooks
from megafrontier.partition.placement import Placement, error_levels, traffic_bytes
from megafrontier.partition.unit import InitialSlice, Unit
from megafrontier.partition.unit_buffers import UnitBufferPool
from megafrontier.partition.wires.wire import Wires
from megafrontier.partition.wrap import (
    assign,
    mark_sharded,
    move_buffers,
    own_values,
    refuse_different,
    refuse_sharded,
    replace_parameters,
)

Decay = Callable[[str], bool]


def shard(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    placement: Placement,
    hierarchy: Hierarchy,
    *,
    dtype: torch.dtype = torch.float32,
    wires: Wires | None = None,
    error_feedback: bool = False,
    overlap: Policy = "safe",
    prefetch: int = 1,
    check_order: bool = False,
    initial: InitialSlice | None = None,
    decay: Decay = lambda name: True,
) -> "Engine":
    """Place a model's state on a hierarchy. The model keeps its class and is called as before.

    `blocks` are (name, module) in the order in which they run; each becomes a unit that is
    gathered only while it runs. What lies outside them is one more unit, gathered for the whole
    pass, and so are parameters that a block shares with it or with another block. A parameter must
    be used inside the block that holds it, and no block run inside of another; buffers are each
    rank's own.

    dtype: type of weights and gradients in computation; masters are fp32.
    wires: format on each level; default: `dtype`.
    error_feedback: add the quantisation error of gradient messages between the gradient and the
        optimizer level to the next step's; where these are one level, that of messages on the way.
    overlap: `none`; `safe`, one collective in flight; `full`, one on each level (`lanes.py`).
    prefetch: units gathered ahead of the one that runs; none with `overlap="none"`.
    check_order: ranks compare what they are about to do before each collective, and cross one
        level at a time for that (slow, for finding a hang).
    initial: (name, shape, start, stop) → elements [start, stop) of a parameter's first value, 1-D
        fp32, for a model on the meta device; without it the model's own values are taken, which
        must be the same on every rank: seed it before.
    decay: by name, which parameters have weight decay; they come first in their unit.

    Raises UserError for parameters that are frozen, complex or have hooks, for blocks that are not
    part of the model, lie in each other, share a name or are called root, for a model that is
    sharded already, and without `initial` for values that are on the meta device or not the same on
    every rank.
    """
    refuse_sharded(model)
    if initial is None:
        initial = own_values(model)
        refuse_different(model, hierarchy)
    wires = wires or Wires.plain(len(hierarchy.levels.sizes), dtype)
    engine = Engine(placement, hierarchy, wires, overlap, prefetch, check_order)
    engine.init_units(model, blocks, dtype, error_feedback, initial, decay)
    return engine


class Engine:
    """Units of one model on one hierarchy. Made by `shard`."""

    def __init__(
        self,
        placement: Placement,
        hierarchy: Hierarchy,
        wires: Wires,
        overlap: Policy,
        prefetch: int,
        check_order: bool,
    ) -> None:
        self.placement = placement.on(hierarchy.levels)
        self.hierarchy = hierarchy
        self.wires = wires
        self.ledger = Ledger(hierarchy.levels.names, hierarchy.device)
        self.units: list[Unit] = []
        # One rank crosses nothing: a thread would only cost.
        self._policy: Policy = overlap if hierarchy.size > 1 else "none"
        self._prefetch = 0 if self._policy == "none" else prefetch
        levels = len(hierarchy.levels.sizes)
        stream_policy = "safe" if check_order and self._policy == "full" else self._policy
        self._streams = CommStreams(stream_policy, levels, hierarchy.device, hierarchy.arbiter)
        self._collectives = LevelCollectives(
            hierarchy, wires, self.ledger, self._streams, check_order
        )

    def init_units(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        dtype: torch.dtype,
        error_feedback: bool,
        initial: InitialSlice,
        decay: Decay,
    ) -> None:
        """Make units of a model's parameters and hang hooks on its modules."""
        move_buffers(model, self.hierarchy.device)
        owned = list(assign(model, blocks))
        # So that neighbours have different buffers, and the oldest unit that is being reduced is
        # done when it is its turn again.
        prefetch = min(self._prefetch, len(owned) - 1)
        self.pool = UnitBufferPool(prefetch + 1, dtype, self.hierarchy.device)
        levels = self.hierarchy.levels
        feedback_levels = error_levels(self.placement, levels, self.wires) if error_feedback else []
        for name, _, parameters in owned:
            decayed = [named for named in parameters if decay(named[0])]
            unit = Unit(
                name,
                parameters,
                decayed,
                self.placement,
                self._collectives,
                self.pool,
                feedback_levels,
            )
            unit.initialise(initial)
            self.units.append(unit)
        replace_parameters(model, self.units)
        modules = [module for _, module, _ in owned]
        mark_sharded(model, [model, *modules], all(u.computes_with_masters for u in self.units))
        self._hooks = ModuleHooks(
            self.units, modules, self._collectives, self.ledger, self._policy, prefetch
        )
        # The hooks hold the units, and the model holds the hooks.
        self._streams.drain_before_freeing(self._hooks)
        self._broadcast_weights(from_masters=True)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that this rank holds beside its state, in the same buffers in each step: whole
        units, their gradients on the way, and messages."""
        return self.pool.held_bytes + self._collectives.held_bytes

    def step_bytes(self, micro_batches: int, wires: Wires | None = None) -> list[int]:
        """Bytes this rank sends over each level in an optimizer step, by the formula; with `wires`,
        what they would send."""
        units = (
            traffic_bytes(
                unit.layout.numel,
                self.placement,
                self.hierarchy.levels,
                wires or self.wires,
                micro_batches,
                self._hooks.gathers(unit, micro_batches),
            )
            for unit in self.units
        )
        return [sum(level) for level in zip(*units, strict=True)]

    def backward(self, loss: torch.Tensor, is_last: bool = False) -> None:
        """Backward of one micro-batch; gradients go to their shards, summed over the ranks.

        `loss` is a scalar sum (over tokens): dividing is left to the end of the step. With
        `is_last`, the step's last micro-batch, each unit goes on to the optimizer level at once.

        Raises RuntimeError for a loss that is no scalar or has no graph; for a parameter that gets
        a gradient when the engine cannot have had its weights there, or a second one after its unit
        was done: after that, and any exception in backward, the engine is of no more use, and
        refuses the next one.
        """
        self._hooks.backward(loss, is_last)

    def finish_gradients(self) -> list[torch.Tensor]:
        """Reduce from the gradient level to the optimizer level, once per step.

        Returns one 1-D fp32 tensor for each of `units`, in their order, as long as its `master`:
        the sum over all ranks and everything since `clear_gradients`, in the memory of the gradient
        shards. Call that before the next backward, which writes over them; raises RuntimeError when
        called twice without.
        """
        self._hooks.reducing.clear()  # each unit waits for its own
        with self.ledger.waiting("finish gradients"):
            self.finish_publishing()
            # All that `is_last` has not begun, before the first is waited for: levels side by side.
            for unit in self.units:
                if not unit.is_finishing:
                    unit.start_finishing()
            self._collectives.finish_replica_sums()
            return [unit.finish_gradient() for unit in self.units]

    def finish_step(self, skip: torch.Tensor, error_scale: torch.Tensor | float = 1.0) -> None:
        """End a step after the masters have been updated: publish the weights and clear the
        gradients.

        skip: [], 1 if the step was skipped, else 0. With error feedback a skipped step's errors are
            dropped, because they would come back in the next step's gradients.
        error_scale: multiplies the other errors, if the next step's loss is scaled differently.
        """
        self.publish()
        self.clear_gradients()
        self.scale_errors((1 - skip) * error_scale)

    def clear_gradients(self) -> None:
        """Start the next accumulation from zero. Raises RuntimeError for sums that have begun, by
        `is_last`, and were not finished: they would go on into the next ones."""
        for unit in self.units:
            unit.clear_gradient()

    def publish(self) -> None:
        """Bring the masters' present values to the weights of every rank.

        With overlap this only begins: it runs under the next forward, first unit first, each one
        with its gathering or, where levels run side by side, before it: the masters may be written
        again after `finish_publishing` or `finish_gradients`.
        """
        for unit in self.units:
            unit.mark_stale()
        if self._policy == "none":
            self.finish_publishing()
        self._hooks.start_publishing(-1)

    def finish_publishing(self) -> None:
        """Return when every copy of the weights is up to date."""
        for index, unit in enumerate(self.units):
            self._hooks.start_publishing(index - 1)
            unit.finish_publishing()

    def restore(self, has_published: bool) -> None:
        """Bring the weights to every rank, after the masters have been filled from outside, and
        with `has_published` every unit's `published`: the same bits that the ranks computed with
        when those were saved."""
        if has_published or self.wires.have_deltas:
            self._broadcast_weights(from_masters=not has_published)
        else:  # what these wires make of the masters
            self.publish()
            self.finish_publishing()

    def _broadcast_weights(self, from_masters: bool) -> None:
        """Bring each rank's `published`, with `from_masters` copied from them, to every rank
        exactly."""
        for unit in self.units:
            unit.mark_stale()
            if from_masters:
                unit.published.copy_(unit.master)
            unit.broadcast_weights()

    def scale_errors(self, factor: torch.Tensor) -> None:
        """Multiply by `factor` [] the errors of gradient messages: with error feedback by 0 after a
        step that is skipped, or its errors would come back in the next."""
        for unit in self.units:
            unit.feedback.scale(factor)

    def fold_errors(self) -> None:
        """Make every unit's `feedback.error` hold all errors; before a checkpoint."""
        for unit in self.units:
            unit.feedback.fold()
