"""Hooks that unshard a unit before its module runs and reduce its gradient after its backward.

Note [Order of collectives]
Every rank runs the same blocks in the same order. The hooks issue the collectives of a block at
points that depend on this order alone, not on timing and not on which parameters of the block get a
gradient. So every rank issues the same collectives in the same order.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal
from weakref import WeakSet, ref

import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.comm.ledger import Ledger
from megafrontier.partition.comm.streams import Policy
from megafrontier.partition.unit import ROOT, Phase, Unit
from megafrontier.partition.wrap import forbid_inplace, in_backward, refuse_weights, tensors_in


class ForwardRecord:
    """One forward of a block, as the gradient hook of the tensors that it made.

    It lives as long as the graph of that forward. `index` is the unit's, `number` counts the
    forwards of all blocks that had begun when this one ended.
    """

    def __init__(self, index: int, number: int, begin_backward: "BeginBackward") -> None:
        self.index = index
        self.number = number
        self._begin_backward = begin_backward

    def __call__(self, _gradient: torch.Tensor) -> None:
        """Called with the gradient of each tensor; the first one begins the block's backward."""
        self._begin_backward(self)


BeginBackward = Callable[[ForwardRecord], None]


class BackwardOrder:
    """Tracks the forwards of all blocks whose backward is pending.

    Autograd runs them backward in reverse order, so the numbers of forwards tell which are over.
    """

    def __init__(self) -> None:
        self._number = 0
        self.newest = 0
        """Index of the unit whose block began to run last."""
        # Weak, because a graph may be dropped without a backward.
        self._pending: dict[int, WeakSet[ForwardRecord]] = defaultdict(WeakSet)

    def begin_forward(self, index: int) -> int:
        """A block begins to run. Returns the number of this forward."""
        self._number += 1
        self.newest = index
        return self._number

    def is_newest(self, number: int) -> bool:
        """Whether no other block has begun to run since."""
        return number == self._number

    def end_forward(
        self,
        index: int,
        made: Sequence[torch.Tensor],
        begin_backward: BeginBackward,
        is_recomputed: bool,
    ) -> None:
        """A block has `made` these tensors. If recomputed, its backward has begun already."""
        record = ForwardRecord(index, self._number, begin_backward)
        for tensor in made:
            tensor.register_hook(record)
        if made and not is_recomputed:
            self._pending[index].add(record)

    def is_pending(self, index: int, number: float = inf) -> bool:
        """Whether a backward of this unit is pending, among forwards up to `number`: later ones
        belong to another graph."""
        return any(record.number <= number for record in self._pending[index])

    def begin_backward(self, record: ForwardRecord) -> None:
        """The backward of this forward is no longer pending."""
        self._pending[record.index].discard(record)


@dataclass
class HookPoint:
    """A module with hooks, and its forward that is running now."""

    index: int
    unit: Unit
    number: int = 0
    inputs: dict[int, object] = field(default_factory=dict)
    """The grad_fn of each input tensor, by the tensor's id."""


class ModuleHooks:
    """Decides when each unit of a model is unsharded and when its gradient is reduced."""

    def __init__(
        self,
        units: Sequence[Unit],
        modules: Sequence[nn.Module],
        collectives: LevelCollectives,
        ledger: Ledger,
        policy: Policy,
        prefetch: int,
    ) -> None:
        """Attach hooks to `modules`, those of `units` in the order in which they run."""
        self.units = units
        self.reducing: deque[Unit] = deque()
        """Units whose gradient is being reduced to its shard, oldest first."""
        self._collectives = collectives
        self._ledger = ledger
        self._policy = policy
        self._prefetch = prefetch
        self._order = BackwardOrder()
        # Of units whose backward has begun and is not over, the parameters without a gradient.
        self._missing: dict[int, set[int]] = {}
        self._done: set[int] = set()
        self._is_last = False
        self._leads_backward = False  # else the user runs a backward that leaves no gradients here
        # Where forward turns to backward, and backward to the next forward, the units that ran last
        # are the first to run, and no other unit needs their buffers: they stay unsharded. So does
        # the root unit, which has a buffer of its own.
        blocks = [unit for unit in units if unit.name != ROOT]
        roots = [unit for unit in units if unit.name == ROOT]
        self._kept_after_backward = {*roots, *blocks[: prefetch + 1]}
        self._kept_after_forward = {*roots, *blocks[-1 - prefetch :]}
        for index, (unit, module) in enumerate(zip(units, modules, strict=True)):
            # A single rank with persistent weights has nothing to gather and no order to keep.
            if collectives.hierarchy.size > 1 or not unit.is_persistent:
                self._attach(module, HookPoint(index, unit))
            for number, parameter in enumerate(unit.parameters):
                parameter.register_post_accumulate_grad_hook(self._on_gradient(index, number))

    def gathers(self, unit: Unit, micro_batches: int) -> int:
        """How often a step of `micro_batches` gathers a unit: for each forward and each backward in
        which it is not unsharded still."""
        forward = 1 if unit in self._kept_after_backward else micro_batches
        return forward + (0 if unit in self._kept_after_forward else micro_batches)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """See `Engine.backward`."""
        if self._leads_backward:
            raise RuntimeError("engine: an earlier backward failed, need a new engine and model")
        if loss.numel() != 1 or not loss.requires_grad:  # refused before any harm is done
            shape = tuple(loss.shape)
            raise RuntimeError(f"loss: shape {shape}, need a scalar that depends on the model")
        self._is_last, self._leads_backward = is_last, True
        loss.backward()
        for index, unit in reversed(list(enumerate(self.units))):
            if index in self._missing:  # the root, or a unit with a parameter that was not used
                self._finish_backward(index)
            else:
                self._reshard(unit)  # it may have been prefetched for a block that did not run
        self._leads_backward = False
        self._done.clear()

    def start_publishing(self, index: int) -> None:
        """If levels have streams of their own, begin to publish the units after unit `index` and
        after those prefetched with it.

        At most 2 · prefetch + 1 units, so that the memory in use is bounded. On a single stream
        they would delay the gathering of the units before them.
        """
        if self._policy == "full":
            for unit in self.units[index + 1 : index + 2 * (self._prefetch + 1)]:
                if unit.is_stale:
                    unit.start_publishing()

    def _attach(self, module: nn.Module, point: HookPoint) -> None:
        def before(_module: nn.Module, *arguments: Any) -> None:
            self._before_forward(point, arguments)

        def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
            self._after_forward(point, output)

        # The compiler must not trace the hooks: it would take their result as constant over steps.
        hidden = torch.compiler.disable
        # First, because other hooks compute a weight from parameters, as those of weight_norm do.
        module.register_forward_pre_hook(hidden(before), with_kwargs=True, prepend=True)
        module.register_forward_hook(hidden(after))

    def _before_forward(self, point: HookPoint, arguments: Any) -> None:
        point.inputs = {id(tensor): tensor.grad_fn for tensor in tensors_in(arguments)}
        if in_backward():  # recomputed: the units after this one are done
            self._done.discard(point.index)
            self._unshard(point.index, ahead=0)
            point.unit.phase = Phase.BACKWARD
        else:
            self._unshard(point.index, ahead=1)
            point.unit.phase = Phase.FORWARD
            if point.unit.name != ROOT:  # which runs around all blocks
                point.number = self._order.begin_forward(point.index)

    def _after_forward(self, point: HookPoint, output: Any) -> None:
        made = self._made_by(point, tensors_in(output))
        forbid_inplace(made)
        is_recomputed = in_backward()
        if not is_recomputed and point.unit.name != ROOT:
            self._refuse_inner(point)
        self._order.end_forward(point.index, made, self._begin_backward, is_recomputed)
        # A recomputed unit stays unsharded, because its own backward comes next.
        if not is_recomputed and not (made and point.unit in self._kept_after_forward):
            point.unit.reshard()

    def _made_by(self, point: HookPoint, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The output tensors whose gradient shows that the backward of this block begins.

        Raises UserError if the block returns a view of its weights, or only its inputs: a layer
        that is skipped on some ranks does so, and its collectives would be missing there.
        """
        # The gradient of a tensor that is passed on belongs to the block that made it.
        made = [t for t in outputs if point.inputs.get(id(t), self) is not t.grad_fn]
        point.inputs = {}
        refuse_weights(made, point.unit)
        if outputs and not made and torch.is_grad_enabled():
            raise UserError(
                f"block {point.unit.name!r}: returns only its inputs, need a new tensor among its "
                "outputs (x.clone()), or all ranks not to call it"
            )
        # Not leaves: a parameter that is returned as it is would collect hooks.
        return [tensor for tensor in made if tensor.requires_grad and not tensor.is_leaf]

    def _refuse_inner(self, point: HookPoint) -> None:
        """Raises UserError if another block ran inside this one: it may have taken this unit's
        buffer, and the order of backward would not be known."""
        if not self._order.is_newest(point.number):
            raise UserError(
                f"block {self.units[self._order.newest].name!r}: runs inside of block "
                f"{point.unit.name!r}, need one of them left out of the blocks"
            )

    def _unshard(self, index: int, ahead: Literal[-1, 0, 1]) -> None:
        """Unshard a unit, and prefetch those that run after it (`ahead` 1) or before it (-1)."""
        if self._policy == "none" and self.units[index].is_resident:
            return
        self.units[index].start_unshard()
        for distance in range(1, self._prefetch + 1):
            neighbour = index + ahead * distance
            if 0 <= neighbour < len(self.units):
                self.units[neighbour].start_unshard()
        if ahead > 0:
            self.start_publishing(index)
        with self._ledger.waiting(f"gather {self.units[index].name}"):
            self.units[index].unshard()

    def _begin_backward(self, record: ForwardRecord) -> None:
        self._order.begin_backward(record)
        index = record.index
        if index in self._done:  # the rest of its backward needs no parameters
            return
        if self._leads_backward:
            self._finish_earlier(index, record.number)
            self._missing_of(index)
        self._unshard(index, ahead=-1)
        self.units[index].phase = Phase.BACKWARD

    def _finish_earlier(self, index: int, number: int) -> None:
        """Finish the units whose backward is over although a parameter may have got no gradient,
        perhaps on this rank alone (an expert without tokens).

        Autograd runs the nodes of one forward before those of any forward before it.
        """
        for other in list(self._missing):
            is_block = other != index and self.units[other].name != ROOT
            if is_block and not self._order.is_pending(other, number):
                self._finish_backward(other)

    def _missing_of(self, index: int) -> set[int]:
        if index not in self._missing:
            self._missing[index] = set(range(len(self.units[index].parameters)))
        return self._missing[index]

    def _on_gradient(self, index: int, number: int) -> Callable[[nn.Parameter], None]:
        # Weak, because the garbage collector does not see what the hooks of a parameter hold. The
        # hooks of modules hold `self`; on one rank, where modules have none, the engine does.
        owner = ref(self)

        def ready(parameter: nn.Parameter) -> None:
            hooks = owner()
            if hooks is None:
                raise RuntimeError("engine: deleted, need it for the backward of its model")
            hooks._collect_gradient(index, number, parameter)

        return ready

    def _collect_gradient(self, index: int, number: int, parameter: nn.Parameter) -> None:
        unit = self.units[index]
        is_unsharded = unit.is_persistent or unit.phase is Phase.BACKWARD
        if not self._leads_backward or not is_unsharded or unit.is_finishing:
            name = unit.layout.entries[number].name
            raise RuntimeError(f"parameter {name}: {_untimely(unit, self._leads_backward)}")
        unit.collect_gradient(number, parameter)
        missing = self._missing_of(index)
        missing.discard(number)
        # The root comes last. And after its last gradient, a block may still read a weight in
        # backward (`w.detach()` was used): if it is not persistent, it is over when the next block
        # begins.
        if missing or unit.name == ROOT or not unit.is_persistent:
            return
        if not self._order.is_pending(index):
            self._finish_backward(index)

    def _reshard(self, unit: Unit) -> None:
        """Reshard a unit after backward, unless it is among the first in the next forward."""
        if unit in self._kept_after_backward:
            unit.keep_unsharded()
        else:
            unit.reshard()

    def _finish_backward(self, index: int) -> None:
        """Reduce a unit's gradient. In the buffer that it leaves, begin to gather the unit that
        follows those already prefetched."""
        unit, next_index = self.units[index], index - 1 - self._prefetch
        self._missing.pop(index)
        self._done.add(index)
        self._reshard(unit)
        # As many full gradients wait for their reduction as units are prefetched.
        while len(self.reducing) > self._prefetch:
            with self._ledger.waiting(f"reduce {self.reducing[0].name}"):
                self.reducing.popleft().finish_reducing()
        if self._prefetch and next_index >= 0 and not self.units[next_index].is_stale:
            with self._collectives.interleaved():
                self.units[next_index].start_unshard()
                unit.start_reducing()
        else:
            unit.start_reducing()
        if self._policy == "none":
            unit.finish_reducing()  # its buffer serves the next unit
        else:
            self.reducing.append(unit)
        if self._is_last:
            unit.start_finishing()


def _untimely(unit: Unit, leads_backward: bool) -> str:
    """Why a gradient cannot be accepted now, and what to do."""
    if not leads_backward:
        return (
            "gradient produced outside engine.backward(); call engine.backward(loss), or detach "
            "this model from that loss"
        )
    if unit.is_finishing:
        return (
            "gradient after the last one of the step; need `is_last` in the last backward before "
            "`finish_gradients` only, `clear_gradients` after it, and use_reentrant=False if "
            "several checkpoints run this block"
        )
    return (
        f"gradient outside of the backward of {unit.name!r}; need the block's outputs to be "
        "tensors in tuples, lists, dicts or dataclasses, and use_reentrant=False in checkpoints "
        "around blocks"
    )
