"""The engine: hooks that gather a unit when its module runs and reduce its gradient when done.

    engine = shard(model, blocks, placement, hierarchy)
    for batch in micro_batches:
        engine.backward(model(batch))  # a sum over tokens, not a mean
    gradients = engine.finish_gradients()
    ... update each unit.master with its finished gradient, then engine.clear_gradients() ...
    engine.publish()

Note on order. Every rank runs the same modules in the same order, so hooks issue the same
collectives in the same order on every rank; nothing here depends on timing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.partition.lanes import Lanes, Policy
from megafrontier.partition.ledger import Ledger
from megafrontier.partition.modules import (
    assign,
    in_backward,
    own_values,
    replace_parameters,
    settle_buffers,
    tensors_in,
)
from megafrontier.partition.moves import Moves
from megafrontier.partition.placement import Placement, traffic_bytes
from megafrontier.partition.pool import Pool
from megafrontier.partition.unit import ROOT, InitialSlice, Phase, Unit
from megafrontier.partition.wires import Wires

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
    pass. A parameter must be used inside the block that holds it.

    dtype: type of weights and gradients in computation; masters are fp32.
    wires: format on each level; default: `dtype`.
    error_feedback: what gradient messages between the gradient and the optimizer level fail to say
        is said in the next step.
    overlap, prefetch: the policy of `lanes.py`; with one other than none, units gathered ahead.
    check_order: ranks compare what they are about to do before each collective (slow, for finding
        a hang).
    initial: first values slice by slice, for a model on the meta device; without it the model's own
        are taken, which must be the same on every rank.
    decay: by name, which parameters have weight decay; they come first in their unit.

    Raises UserError for frozen parameters, for a block that is not part of the model, and for
    values on the meta device without `initial`.
    """
    wires = wires or Wires.plain(len(hierarchy.levels.sizes), dtype)
    engine = Engine(placement, hierarchy, wires, overlap, prefetch, check_order)
    engine.take_over(model, blocks, dtype, error_feedback, initial or own_values(model), decay)
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
        lanes = Lanes(self._policy, len(hierarchy.levels.sizes), hierarchy.device)
        self._moves = Moves(hierarchy, wires, self.ledger, lanes, check_order)
        self._missing: dict[Unit, set[int]] = {}
        self._done: set[Unit] = set()
        self._reducing: deque[Unit] = deque()
        self._is_last = False

    def take_over(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        dtype: torch.dtype,
        error_feedback: bool,
        initial: InitialSlice,
        decay: Decay,
    ) -> None:
        """Make units of a model's parameters and hang hooks on its modules."""
        settle_buffers(model, self.hierarchy.device)
        owned = list(assign(model, blocks))
        # So that neighbours have different seats, and a unit's reduction has been waited for when
        # that of the next micro-batch begins.
        self._prefetch = min(self._prefetch, len(owned) - 1)
        self.pool = Pool(self._prefetch + 1, dtype, self.hierarchy.device)
        for name, _, parameters in owned:
            decayed = [named for named in parameters if decay(named[0])]
            unit = Unit(
                name, parameters, decayed, self.placement, self._moves, self.pool, error_feedback
            )
            unit.initialise(initial)
            self.units.append(unit)
        replace_parameters(model, self.units)
        for index, (_, module, _) in enumerate(owned):
            self._attach(module, index)
        self.place(from_masters=True)

    def stays_gathered(self, unit: Unit) -> bool:
        """Whether a unit is gathered once for forward and backward: the root unit, which runs all
        the while, and the last block, whose backward follows its forward at once."""
        return unit.name == ROOT or unit is self.units[-1]

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
                1 if self.stays_gathered(unit) else 2,
            )
            for unit in self.units
        )
        return [sum(level) for level in zip(*units, strict=True)]

    def _attach(self, module: nn.Module, index: int) -> None:
        unit = self.units[index]
        given: dict[int, object] = {}

        def before(_module: nn.Module, *arguments: Any) -> None:
            given.clear()  # of a forward that ended early, as a recomputation does
            given.update((id(t), t.grad_fn) for t in tensors_in(arguments))
            if in_backward():  # recomputed: the units after it have had their turn
                self._done.discard(unit)
                self._gather(index, ahead=0)
                unit.phase = Phase.BACKWARD
            else:
                self._gather(index, ahead=1)
                unit.phase = Phase.FORWARD

        def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
            # What a block passes on as it came has its gradient in the backward of another block.
            made = [t for t in tensors_in(output) if given.get(id(t), self) is not t.grad_fn]
            given.clear()
            self._after_forward(index, [t for t in made if t.requires_grad])

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        for i, parameter in enumerate(unit.parameters):
            parameter.register_post_accumulate_grad_hook(self._on_gradient(index, i))

    def _gather(self, index: int, ahead: Literal[-1, 0, 1]) -> None:
        """Make a unit whole, and begin with those that run after it (`ahead` 1) or before (-1)."""
        self.units[index].start_gathering()
        for distance in range(1, self._prefetch + 1):
            neighbour = index + ahead * distance
            if 0 <= neighbour < len(self.units):
                self.units[neighbour].start_gathering()
        if ahead > 0:
            self._start_publishing(index)
        with self.ledger.waiting(f"gather {self.units[index].name}"):
            self.units[index].gather()

    def _after_forward(self, index: int, made: list[torch.Tensor]) -> None:
        unit = self.units[index]
        for tensor in made:
            tensor.register_hook(lambda _gradient: self._before_backward(index))
        # Recomputed within its own backward it still needs the weights.
        if not in_backward() and not (made and self.stays_gathered(unit)):
            unit.release()

    def _before_backward(self, index: int) -> None:
        if self.units[index] in self._done:
            return  # what is left of its backward has no parameters
        self._gather(index, ahead=-1)
        self.units[index].phase = Phase.BACKWARD

    def _on_gradient(self, index: int, parameter: int) -> Callable[[torch.Tensor], None]:
        unit = self.units[index]

        def ready(_parameter: torch.Tensor) -> None:
            is_whole = unit.is_persistent or unit.phase is Phase.BACKWARD
            if not is_whole or unit.is_finishing:
                raise RuntimeError(
                    f"parameter {unit.layout.entries[parameter].name}: a gradient outside of the "
                    f"backward of {unit.name!r}; its output must be tensors, in tuples, lists, "
                    "dicts or dataclasses, and checkpoints around blocks need use_reentrant=False"
                )
            unit.take_gradient(parameter)
            if unit not in self._missing:
                self._missing[unit] = set(range(len(unit.parameters)))
            self._missing[unit].discard(parameter)
            if not self._missing[unit]:
                self._finish_backward(unit, index - 1 - self._prefetch)

        return ready

    def _finish_backward(self, unit: Unit, next_index: int = -1) -> None:
        """Reduce a unit's gradient and, into its place, begin to gather the unit whose turn comes
        after those already gathered, if there is one."""
        self._missing.pop(unit, None)
        self._done.add(unit)
        unit.release()
        # As many full gradients wait for their reduction as units are gathered ahead: bounded.
        while len(self._reducing) > self._prefetch:
            with self.ledger.waiting(f"reduce {self._reducing[0].name}"):
                self._reducing.popleft().finish_reducing()
        with self._moves.woven():
            if self._prefetch and next_index >= 0 and not self.units[next_index].is_stale:
                self.units[next_index].start_gathering()
            unit.start_reducing()
        if self._policy == "none":
            unit.finish_reducing()  # it is done, and its memory serves the next unit
        else:
            self._reducing.append(unit)
        if self._is_last:
            unit.start_finishing()

    def backward(self, loss: torch.Tensor, is_last: bool = False) -> None:
        """Backward of one micro-batch; gradients go to their shards, summed over the ranks.

        `loss` is a scalar sum (over tokens): dividing is left to the end of the step. With
        `is_last`, the step's last micro-batch, each unit goes on to the optimizer level at once.

        Raises RuntimeError for a parameter that gets a gradient when the engine cannot have had its
        weights there, or a second one after its unit was done. After an exception the engine is of
        no more use.
        """
        self._is_last = is_last
        loss.backward()
        for unit in reversed(self.units):
            if unit in self._missing:  # some parameter took no part, and it still waits for it
                self._finish_backward(unit)
            else:
                unit.release()  # if it was gathered ahead, but its turn never came
        self._done.clear()

    def finish_gradients(self) -> list[torch.Tensor]:
        """Reduce from the gradient level to the optimizer level, once per step.

        Returns this rank's shard of each unit, fp32, summed over everything since `clear`.
        """
        self._reducing.clear()
        with self.ledger.waiting("finish gradients"):
            self.finish_publishing()
            return [unit.finish_gradient() for unit in self.units]

    def clear_gradients(self) -> None:
        """Start the next accumulation from zero."""
        for unit in self.units:
            unit.clear_gradient()

    def publish(self) -> None:
        """Bring the masters' present values to the weights of every rank.

        With overlap this only begins: it runs under the next forward, first unit first, each one
        with its gathering or, where levels run side by side, before it.
        """
        for unit in self.units:
            unit.release()
            unit.is_stale = True
        if self._policy == "none":
            self.finish_publishing()
        self._start_publishing(-1)

    def _start_publishing(self, index: int) -> None:
        """Where levels run side by side, begin with those that come after unit `index` and after
        those gathered ahead of it: 2 · prefetch + 1 in all, so that what is on its way stays
        bounded. On one lane they would hold up the gathering of the units before them."""
        if self._policy == "full":
            for unit in self.units[index + 1 : index + 2 * (self._prefetch + 1)]:
                if unit.is_stale:
                    unit.start_publishing()

    def finish_publishing(self) -> None:
        """Return when every copy of the weights is up to date."""
        for unit in self.units:
            unit.finish_publishing()

    def place(self, from_masters: bool) -> None:
        """Bring each rank's `published` shards to every rank exactly, after they, or with
        `from_masters` the masters they are then copied from, have been filled from outside."""
        for unit in self.units:
            unit.release()
            if from_masters:
                unit.published.copy_(unit.master)
            unit.place()

    def scale_errors(self, factor: torch.Tensor) -> None:
        """Multiply by `factor` [] all that gradient messages have left unsaid."""
        for unit in self.units:
            for error in unit.errors.values():
                error.mul_(factor)

    def fold_errors(self) -> None:
        """Make every unit's `error` hold all that is left unsaid; before a checkpoint."""
        for unit in self.units:
            unit.fold_errors()
