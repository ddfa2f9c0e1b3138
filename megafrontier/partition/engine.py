"""The engine: a model's state sharded over a hierarchy, and the training steps on it.

    engine = shard(model, blocks, placement, hierarchy)
    for i, batch in enumerate(micro_batches):
        loss = model(batch)  # a sum over tokens, not a mean
        engine.backward(loss, is_last=i == len(micro_batches) - 1)
    gradients = engine.finish_gradients()
    ... update each unit.master with its gradient, unless the step is skipped ...
    engine.finish_step(skip)

`hooks.py` decides when a unit is unsharded and when its gradient is reduced.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.param_spec import ParamSpec, spec_of
from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.comm.ledger import Ledger
from megafrontier.partition.comm.streams import CommStreams, Policy
from megafrontier.partition.hooks import ModuleHooks
from megafrontier.partition.memory import UnitBufferPool
from megafrontier.partition.placement import Placement, error_levels, traffic_bytes
from megafrontier.partition.state_dict import FullStateDict
from megafrontier.partition.unit import InitialSlice, Unit
from megafrontier.partition.wires.wire import Wires
from megafrontier.partition.wrap import (
    current_values,
    mark_sharded,
    move_buffers,
    refuse_different,
    refuse_sharded,
    replace_parameters,
    split_into_units,
)

Decay = Callable[[ParamSpec], bool]


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
    decay: Decay = lambda spec: True,
) -> "Engine":
    """Shard a model's state over a hierarchy. The model keeps its class and is called as before.

    Each block becomes a unit that is unsharded only while it runs. Parameters outside of blocks, or
    shared by several, form the root unit, which is unsharded for the whole pass. A parameter must
    be used inside the block that holds it, every rank must run the same blocks, and no block may
    run inside another. Buffers stay on each rank.

    blocks: (name, module), in the order in which they run.
    dtype: computing type of weights and gradients. Masters are fp32.
    wires: format of messages on each level. Default: `dtype`.
    error_feedback: add the quantisation errors of gradient messages to those of the next step. They
        are kept for the levels between gradients and optimizer state; if there is none, for the
        levels that every micro-batch is reduced over.
    overlap: `none`; `safe`: one collective in flight; `full`: one on each level.
    prefetch: units gathered ahead of the one that runs. None with `overlap="none"`.
    check_order: compare the ranks' next operation before each collective, one level at a time. It
        is slow, and finds ranks that run different blocks.
    initial: (spec, start, stop) → elements [start, stop) of a parameter's initial value, 1-D fp32,
        for a model on the meta device. Default: the model's present values, which must be the same
        on every rank.
    decay: whether a parameter, by its spec, has weight decay. Those come first in their unit.

    Raises UserError for parameters that are frozen, complex or have hooks; for blocks that are not
    part of the model, overlap, share a name or are called root; for a model that is sharded
    already; and without `initial` for values that are on the meta device or differ between ranks.
    """
    refuse_sharded(model)
    if initial is None:
        initial = current_values(model)
        refuse_different(model, hierarchy)
    wires = wires or Wires.plain(len(hierarchy.levels.sizes), dtype)
    engine = Engine(placement, hierarchy, wires, overlap, prefetch, check_order)
    engine.init_units(model, blocks, dtype, error_feedback, initial, decay)
    return engine


class Engine:
    """The units of one model on one hierarchy. Made by `shard`."""

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
        # A single rank has no collectives, and a thread would only cost time.
        self._policy: Policy = overlap if hierarchy.size > 1 else "none"
        self._prefetch = 0 if self._policy == "none" else prefetch
        stream_policy = "safe" if check_order and self._policy == "full" else self._policy
        self._streams = CommStreams(
            stream_policy, len(hierarchy.levels.sizes), hierarchy.device, hierarchy.arbiter
        )
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
        """Make units of a model's parameters and attach hooks to its modules."""
        move_buffers(model, self.hierarchy.device)
        owned = list(split_into_units(model, blocks))
        # Fewer than units, so that neighbours have different buffers, and the oldest reduction is
        # over when its unit runs again.
        prefetch = min(self._prefetch, len(owned) - 1)
        self.pool = UnitBufferPool(prefetch + 1, dtype, self.hierarchy.device)
        levels = self.hierarchy.levels
        feedback_levels = error_levels(self.placement, levels, self.wires) if error_feedback else []
        for name, _, parameters in owned:
            decayed = [named for named in parameters if decay(spec_of(*named))]
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
        holds_masters = all(unit.computes_with_masters for unit in self.units)
        mark_sharded(model, holds_masters)
        if not holds_masters:  # otherwise those of nn.Module are right
            FullStateDict(model, self.units, self.finish_publishing, partial(self.restore, False))
        self._hooks = ModuleHooks(
            self.units, modules, self._collectives, self.ledger, self._policy, prefetch
        )
        # The hooks hold the units, and the model holds the hooks.
        self._streams.drain_before_freeing(self._hooks)
        self._broadcast_weights(from_masters=True)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this rank holds beside its state: unsharded weights, full
        gradients and messages. They are the same buffers in every step."""
        return self.pool.held_bytes + self._collectives.held_bytes

    def step_bytes(self, micro_batches: int, wires: Wires | None = None) -> list[int]:
        """Bytes that this rank sends over each level in an optimizer step, by formula, with its
        wires or with `wires`."""
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
        """Run backward of one micro-batch, and sum its gradients over ranks into their shards.

        loss: a scalar sum over tokens. The division comes at the end of the step.
        is_last: this is the step's last micro-batch, so that the gradient of each unit is reduced
            to the optimizer level as soon as it is complete.

        Raises RuntimeError for a loss that is not a scalar or has no graph, and for a parameter
        that gets a gradient when its unit is resharded or finished. After an exception in backward
        the engine cannot be used, and refuses the next backward.
        """
        self._hooks.backward(loss, is_last)

    def finish_gradients(self) -> list[torch.Tensor]:
        """Reduce the gradients to the optimizer level, once per step.

        Returns one 1-D fp32 tensor for each of `units`, as long as its `master`: the sum over all
        ranks and over every backward since the last `clear_gradients`. It lies in the memory of the
        gradient shards, which must be cleared before the next backward. Raises RuntimeError if
        called twice without clearing.
        """
        self._hooks.reducing.clear()  # each unit waits for its own reduction
        with self.ledger.waiting("finish gradients"):
            self.finish_publishing()
            # Start all before waiting for the first, so that levels work side by side.
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
        """Start accumulating from zero. Raises RuntimeError if a backward with `is_last` was not
        followed by `finish_gradients`, because its sums are still in flight."""
        for unit in self.units:
            unit.clear_gradient()

    def publish(self) -> None:
        """Bring the present values of the masters to the weights of every rank.

        With overlap, publishing only begins here. It runs under the next forward, first unit first.
        The masters must not be written until `finish_publishing` or `finish_gradients` returns.
        """
        for unit in self.units:
            unit.mark_stale()
        if self._policy == "none":
            self.finish_publishing()
        self._hooks.start_publishing(-1)

    def finish_publishing(self) -> None:
        """Wait until every copy of the weights is up to date."""
        for index, unit in enumerate(self.units):
            self._hooks.start_publishing(index - 1)
            unit.finish_publishing()

    def restore(self, has_published: bool) -> None:
        """Bring the weights to every rank after the masters were filled from a checkpoint.

        With `has_published`, every unit's `published` was filled too, and all ranks compute with
        the same bits as when it was saved.
        """
        if has_published or self.wires.have_deltas:
            self._broadcast_weights(from_masters=not has_published)
        else:  # these wires give the same weights from the same masters
            self.publish()
            self.finish_publishing()

    def _broadcast_weights(self, from_masters: bool) -> None:
        """Copy each rank's `published` shard, or with `from_masters` its master, to all ranks
        without rounding."""
        for unit in self.units:
            unit.mark_stale()
            if from_masters:
                unit.published.copy_(unit.master)
            unit.broadcast_weights()

    def scale_errors(self, factor: torch.Tensor | float) -> None:
        """Multiply the errors of gradient messages by `factor` []."""
        for unit in self.units:
            unit.feedback.scale(factor)

    def fold_errors(self) -> None:
        """Sum all errors into every unit's `feedback.error`, for a checkpoint."""
        for unit in self.units:
            unit.feedback.fold()
