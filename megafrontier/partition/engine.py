"""The engine: a model's state sharded over a mesh, and the training steps on it.

    engine = shard(model, blocks, placement, mesh)
    for i, batch in enumerate(micro_batches):
        loss = model(batch)  # a sum over tokens, not a mean
        with engine.no_sync(i < len(micro_batches) - 1):
            loss.backward()
    gradients = engine.finish_gradients()
    ... update each unit.master with its gradient, unless the step is skipped ...
    engine.finish_step(skip)

`modules/hooks.py` decides when a unit is unsharded and when its gradient is reduced.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch
from torch import nn

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.ledger import Ledger, TrafficKind
from megafrontier.comm.streams import DONE, CommStreams, Policy, Task, WorkHandle
from megafrontier.comm.wires.wire import Wires
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.param_spec import ParamSpec, spec_of
from megafrontier.partition.memory import UnitBuffer, UnitBufferPool
from megafrontier.partition.modules.hook_points import HookPoint
from megafrontier.partition.modules.hooks import Backward, ModuleHooks
from megafrontier.partition.modules.state_dict import FullStateDict
from megafrontier.partition.modules.wrap import (
    WrappedBlock,
    current_values,
    divide,
    mark_sharded,
    move_buffers,
    refuse_different,
    refuse_sharded,
    replace_parameters,
)
from megafrontier.partition.placement import Placement
from megafrontier.partition.rules import GroupOf, Overlap, Rules, StateRules
from megafrontier.partition.unit import ROOT, InitialSlice, Named, Unit

DEFAULT_OVERLAP = Overlap()


def shard(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    rules: Rules | Placement,
    mesh: Mesh | Hierarchy,
    *,
    overlap: Overlap = DEFAULT_OVERLAP,
    initial: InitialSlice | None = None,
    groups: GroupOf = lambda spec: ("", 0),
    stages: Sequence[Sequence[str]] = (),
) -> "Engine":
    """Shard a model's state over a mesh. The model keeps its class and is called as before.

    The parameters of a block are unsharded only while it runs. Parameters outside of blocks, or
    shared by several, belong to the root, and are unsharded for the whole pass. A block may lie
    inside another one, which then leaves its parameters out. Backward is started as in plain
    PyTorch, with a loss that is a sum over tokens; see `Engine.no_sync` for several micro-batches.

    A parameter must be used inside the block that holds it, every rank must run the same blocks,
    and a block must not call another one that is no submodule of it. Frozen parameters are sharded
    like the others, without gradients. Buffers stay on each rank.

    blocks: (name, module), in the order in which they run.
    rules: how the state of each parameter is sharded, computed with, sent and updated; a placement
        alone stands for fp32 in computation and messages.
    mesh: the state of each parameter is sharded over the axes that its spec names. With a hierarchy
        instead, that of all parameters is sharded over it.
    initial: (spec, start, stop) → elements [start, stop) of a parameter's initial value, 1-D fp32,
        for a model on the meta device. Default: the model's present values, which must be the same
        on every rank.
    groups: (optimizer, group) of a parameter, by its spec. Parameters of a unit have the same
        optimizer, and those of a group lie side by side, in the order of the groups.
    stages: names of the blocks of each part that is called by itself, inside of `Engine.stage`.

    Raises UserError for complex parameters; for blocks that are not part of the model, share a
    name, are called root, or use parameters of a block inside them; for a model that is sharded
    already; and without `initial` for values that are on the meta device or differ between ranks.
    """
    refuse_sharded(model)
    if initial is None:
        initial = current_values(model)
        refuse_different(model, mesh)
    if isinstance(rules, Placement):
        rules = StateRules.plain(rules, mesh.levels)
    engine = Engine(rules, mesh, overlap)
    engine.init_units(model, divide(model, blocks), initial, groups, stages)
    return engine


class Engine:
    """The units of one model. Made by `shard`.

    `hierarchy`, `placement` and `wires` are those of parameters that no split cuts.
    """

    def __init__(
        self, rules: Rules, mesh: Mesh | Hierarchy, overlap: Overlap = DEFAULT_OVERLAP
    ) -> None:
        self._rules, self._mesh = rules, mesh
        self.hierarchy = hierarchy = mesh.hierarchy() if isinstance(mesh, Mesh) else mesh
        self.placement = rules.default.placement.on(hierarchy.levels)
        self.wires = rules.default.wires
        self.ledger = Ledger(hierarchy.levels.names, hierarchy.device)
        self.units: list[Unit] = []
        # A single rank may have nothing to send, and a thread would only cost time.
        is_alone = max(hierarchy.size, hierarchy.world.size) == 1
        is_alone = is_alone and rules.default.update == "at_once"
        self._policy: Policy = "none" if is_alone else overlap.policy
        self._prefetch = 0 if self._policy == "none" else overlap.prefetch
        self._check_order = overlap.check_order
        policy: Policy = "safe" if self._check_order and self._policy == "full" else self._policy
        levels = len(hierarchy.levels.sizes)
        self._streams = CommStreams(policy, levels, hierarchy.device, hierarchy.arbiter)
        self._collectives: dict[tuple[Hierarchy, Wires, TrafficKind | None], LevelCollectives] = {}

    def init_units(
        self,
        model: nn.Module,
        divided: Sequence[WrappedBlock],
        initial: InitialSlice,
        group_of: GroupOf,
        stages: Sequence[Sequence[str]],
    ) -> None:
        """Make units of a model's parameters and attach hooks to its modules."""
        move_buffers(model, self.hierarchy.device)
        # Fewer than hook points, so that neighbours have different buffers, and the oldest
        # reduction is over when its unit runs again.
        prefetch = min(self._prefetch, len(divided) - 1)
        self.pool = UnitBufferPool(prefetch + 1, self.hierarchy.device)
        points: dict[WrappedBlock, HookPoint] = {}
        for block in divided:
            units = self._make_units(block, group_of)
            parent = next((points[b] for b in block.around() if b in points), None)
            points[block] = HookPoint(block.name, block.module, units, parent)
            self.units += units
        for unit in self.units:
            unit.initialise(initial)
        replace_parameters(model, self.units)
        holds_masters = all(u.computes_with_masters and not u.is_overlapped for u in self.units)
        mark_sharded(model, holds_masters)
        if not holds_masters:  # otherwise those of nn.Module are right
            FullStateDict(model, self.units, self.finish_publishing, partial(self.restore, False))
        self._hooks = ModuleHooks(
            list(points.values()), stages, self._streams, self.ledger, self._policy, prefetch
        )
        # The hooks hold the units, and the model holds the hooks.
        self._streams.drain_before_freeing(self._hooks)
        self._broadcast_weights(self.units, from_masters=True)

    def initialise(self, initial: InitialSlice) -> None:
        """Set the masters to other initial values, and bring these to every rank."""
        for unit in self.units:
            unit.initialise(initial)
        self._broadcast_weights(self.units, from_masters=True)

    def _hierarchy_of(self, spec: ParamSpec) -> Hierarchy:
        """The ranks over which the state of a parameter is sharded."""
        return self._mesh.hierarchy(spec.axes) if isinstance(self._mesh, Mesh) else self._mesh

    def _make_units(self, block: WrappedBlock, group_of: GroupOf) -> list[Unit]:
        """One unit for all parameters of a block that have the same rules, ranks and optimizer."""
        alike: dict[tuple[StateRules, Hierarchy, bool, str], list[tuple[int, Named]]] = {}
        for name, parameter in block.parameters:
            spec = spec_of(name, parameter)
            optimizer, group = group_of(spec)
            over = self._hierarchy_of(spec)
            key = self._rules.of(spec), over, parameter.requires_grad, optimizer
            alike.setdefault(key, []).append((group, (name, parameter)))
        units = []
        for slot, ((rules, over, is_trained, optimizer), members) in enumerate(alike.items()):
            parameters = [named for _, named in sorted(members, key=itemgetter(0))]
            if not any(parameter.numel() for _, parameter in parameters):
                continue
            wires = rules.wires
            wires = wires if over.crossed is None else wires.extended(over.crossed)
            rules = replace(rules, placement=rules.placement.on(over.levels), wires=wires)
            unit = Unit(
                f"{block.name}.{slot}" if slot else block.name,
                parameters,
                optimizer,
                self.collectives(over, wires),
                self._choose_buffer(block, slot, rules),
                self.pool,
                rules,
                is_frozen=not is_trained,
            )
            units.append(unit)
        return units

    def _choose_buffer(self, block: WrappedBlock, slot: int, rules: StateRules) -> UnitBuffer:
        if rules.placement.is_persistent:  # part of the unit's state, not of the pool
            return UnitBuffer(rules.dtype, self.hierarchy.device)
        if block.name == ROOT:
            return self.pool.own_buffer(rules.dtype)
        return self.pool.next_buffer((block.depth, slot), rules.dtype)

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside the computation."""
        return self._policy != "none"

    def collectives(
        self, hierarchy: Hierarchy, wires: Wires, kind: TrafficKind | None = None
    ) -> LevelCollectives:
        """Collectives over the levels of `hierarchy` on this engine's streams, which its ledger
        counts as `kind`. Default: gathers as weights, reductions as gradients."""
        key = hierarchy, wires, kind
        if key not in self._collectives:
            self._collectives[key] = LevelCollectives(
                hierarchy, wires, self.ledger, self._streams, self._check_order, kind
            )
        return self._collectives[key]

    @property
    def have_deltas(self) -> bool:
        """Whether any unit is published as deltas."""
        return any(unit.wires.have_deltas for unit in self.units)

    @property
    def trained_units(self) -> list[Unit]:
        """The units whose parameters get gradients: all but those that were frozen in `shard`."""
        return [unit for unit in self.units if not unit.is_frozen]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this rank holds beside its state: unsharded weights, full
        gradients and messages. They are the same buffers in every step."""
        return self.pool.held_bytes + self._streams.held_bytes

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Backwards in the body are not the last of the optimizer step. After the last backward of
        a step, each gradient is reduced to the optimizer level as soon as it is complete; a later
        one is refused with RuntimeError.

        enabled: False makes this do nothing.
        """
        with self._hooks.running(None, not enabled, not enabled):
            yield

    @contextmanager
    def stage(
        self, number: int, is_last: bool, is_last_of_root: bool, backward: Backward = "whole"
    ) -> Iterator[None]:
        """The forwards and backwards in the body are of the part of the model with this number in
        the `stages` of `shard`. A backward in it gives the gradients of `backward`. It is the last
        one of the step for these blocks (`is_last`), and for the root (`is_last_of_root`)."""
        with self._hooks.running(number, is_last, is_last_of_root, backward):
            yield

    def issue(self, level: int, task: Task) -> WorkHandle:
        """Run a message to another rank on a level's stream, after what was issued before."""
        return self._streams.run(self._streams.index(level), task, DONE)

    @property
    def delays_early_messages(self) -> bool:
        """Whether a message that is issued before its peer is ready holds up other work: the
        computation, or the gathers of weights that share the stream with it."""
        is_free = self._policy == "full" or all(unit.is_persistent for unit in self.units)
        return self._policy == "none" or not is_free

    def finish_gradients(self) -> list[torch.Tensor]:
        """Reduce the gradients to the optimizer level, once per step.

        Returns one 1-D fp32 tensor for each of `trained_units`, as long as its `master`: the sum
        over all ranks and over every backward since the last `clear_gradients`. It lies in the
        memory of the gradient shards, which must be cleared before the next backward; of offloaded
        units on the host, and only there, where the device has to be waited for. Raises
        RuntimeError if called twice without clearing, or after a backward that failed.
        """
        self._hooks.refuse_failed_backward()
        self._hooks.clear()  # each unit waits for its own reduction
        with self.ledger.waiting("finish gradients"):
            self.finish_publishing()
            # Start all before waiting for the first, so that levels work side by side.
            for unit in self.trained_units:
                if not unit.is_finishing:
                    unit.start_finishing()
            self._streams.issue_deferred()
            return [unit.finish_gradient() for unit in self.trained_units]

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
        """Start accumulating from zero. Raises RuntimeError if the last backward of a step was not
        followed by `finish_gradients`, because its sums are still in flight."""
        for unit in self.units:
            unit.clear_gradient()

    def publish(self) -> None:
        """Bring the present values of the masters to the weights of every rank.

        With overlap, publishing only begins here. It runs under the next forward, first unit first.
        The masters must not be written until `finish_publishing` or `finish_gradients` returns.
        """
        for unit in self.trained_units:
            unit.mark_stale()
            if unit.has_no_messages:  # its block may have no hooks
                unit.finish_publishing()
        if self._policy == "none":
            self.finish_publishing()
        self._hooks.start_publishing(-1)

    def finish_publishing(self) -> None:
        """Wait until every copy of the weights is up to date."""
        for place, point in enumerate(self._hooks.points):
            self._hooks.start_publishing(place - 1)
            for unit in point.units:
                unit.finish_publishing()

    def restore(self, has_published: bool) -> None:
        """Bring the weights to every rank after the masters were filled from a checkpoint.

        With `has_published`, every unit's `published` was filled too, and all ranks compute with
        the same bits as when it was saved.
        """
        if has_published or self.have_deltas:
            self._broadcast_weights(self.units, from_masters=not has_published)
        else:  # these wires give the same weights from the same masters
            self._broadcast_weights([u for u in self.units if u.is_frozen], from_masters=True)
            self.publish()
            self.finish_publishing()

    def _broadcast_weights(self, units: Sequence[Unit], from_masters: bool) -> None:
        """Copy each rank's `published` shard, or with `from_masters` its master, to all ranks
        without rounding."""
        for unit in units:
            unit.mark_stale()
            unit.broadcast_weights(from_masters)

    def scale_errors(self, factor: torch.Tensor | float) -> None:
        """Multiply the errors of gradient messages by `factor` []."""
        for unit in self.units:
            unit.feedback.scale(factor)

    def fold_errors(self) -> None:
        """Sum all errors into every unit's `feedback.error`, for a checkpoint."""
        for unit in self.units:
            unit.feedback.fold()
