"""Hooks that unshard a block's units before it runs and reduce their gradients after its backward.

A hook point is a module with one or more units, which are unsharded and reduced together. Hook
points may lie inside each other, and the model itself is one, for the root's units.

Note [Backward as events]
The engine does not start backward. The gradient of a block's output shows that its backward begins,
and a callback of autograd shows that the whole backward is over. So a backward may come from
`loss.backward()`, from `torch.autograd.grad`, or from a pipeline that has several micro-batches in
flight. A backward that gives no parameter a gradient reduces nothing.

Note [Order of collectives]
Every rank runs the same blocks in the same order. The hooks issue the collectives of a block at
points that depend on this order alone, not on timing and not on which parameters of the block get a
gradient. So every rank issues the same collectives in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn

from megafrontier.comm.ledger import Ledger
from megafrontier.comm.streams import CommStreams, Policy
from megafrontier.common.errors import UserError
from megafrontier.partition.modules.hook_points import (
    BackwardPass,
    BlockPart,
    ForwardRecord,
    HookPoint,
    PendingForwards,
)
from megafrontier.partition.modules.wrap import (
    forbid_inplace,
    in_backward,
    refuse_weights,
    tensors_in,
)
from megafrontier.partition.unit import Phase, Unit

Backward = Literal["whole", "inputs", "weights"]
"""The gradients that a backward gives: all, or those of inputs or of weights alone."""


class ModuleHooks:
    """Decides when the units of a model are unsharded and when their gradients are reduced."""

    def __init__(
        self,
        points: Sequence[HookPoint],
        stages: Sequence[Sequence[str]],
        streams: CommStreams,
        ledger: Ledger,
        policy: Policy,
        prefetch: int,
    ) -> None:
        """Attach hooks to the modules of `points`, given in the order in which their forwards
        begin. `stages`: names of the outermost points of each part of the model that runs by
        itself."""
        self.points = points
        self.is_last = True
        """Whether the next backward is the last of the optimizer step for these blocks, so that
        each gradient is reduced to the optimizer level as soon as it is complete."""
        self.is_last_of_root = True
        """The same for the root."""
        self.backward: Backward = "whole"
        """Which gradients the next backward gives."""
        self.reducing: deque[HookPoint] = deque()
        """Points whose gradients are being reduced to their shards, oldest first."""
        self._finishing: deque[HookPoint] = deque()
        self._streams = streams
        self._ledger = ledger
        self._policy = policy
        self._prefetch = prefetch
        self._pending = PendingForwards()
        self._running: list[HookPoint] = []
        self._pass: BackwardPass | None = None
        self._forward_place = {point: place for place, point in enumerate(points)}
        self.parts = [
            BlockPart([p for p in points if p.is_in(names)], prefetch) for names in stages
        ]
        if not stages:
            self.parts = [BlockPart(points, prefetch)]
        self.part = self.parts[0]
        """The part of the model that runs now."""
        for point in points:
            self._attach(point)

    @contextmanager
    def running(
        self,
        part: int | None,
        is_last: bool,
        is_last_of_root: bool,
        backward: Backward = "whole",
    ) -> Iterator[None]:
        """Set `is_last`, `is_last_of_root` and `backward` for the body, in which this part of the
        model runs, None: the same as before."""
        self.part = self.part if part is None else self.parts[part]
        before = self.is_last, self.is_last_of_root, self.backward
        self.is_last, self.is_last_of_root, self.backward = is_last, is_last_of_root, backward
        try:
            yield
        finally:
            self.is_last, self.is_last_of_root, self.backward = before

    def clear(self) -> None:
        """Forget the points whose gradients are being reduced."""
        self.reducing.clear()
        self._finishing.clear()

    def refuse_failed_backward(self) -> None:
        """Raises RuntimeError if the last backward did not come to its end."""
        if self._pass is not None:
            raise RuntimeError("engine: an earlier backward failed, need a new engine and model")

    def start_publishing(self, place: int) -> None:
        """If levels have streams of their own, begin to publish the points after the one at `place`
        and after those prefetched with it.

        At most 2 · prefetch + 1 points, so that the memory in use is bounded. On a single stream
        they would delay the gathering of the units before them.
        """
        if self._policy == "full":
            for point in self.points[place + 1 : place + 2 * (self._prefetch + 1)]:
                for unit in point.units:
                    if unit.is_stale:
                        unit.start_publishing()

    def _attach(self, point: HookPoint) -> None:
        # A single rank with persistent weights has nothing to gather and no order to keep.
        if not (point.is_persistent and all(unit.has_no_messages for unit in point.units)):

            def before(_module: nn.Module, *arguments: Any) -> None:
                self._before_forward(point, arguments)

            def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
                self._after_forward(point, output)

            # The compiler must not trace the hooks: it would take their result as constant.
            hidden = torch.compiler.disable
            # First, because other hooks compute a weight from parameters, as weight_norm's do.
            point.module.register_forward_pre_hook(hidden(before), with_kwargs=True, prepend=True)
            point.module.register_forward_hook(hidden(after))
        for slot, unit in enumerate(point.units):
            for number, parameter in enumerate(unit.parameters):
                parameter.requires_grad_()  # else torch accepts no hook
                hook = self._on_gradient(point, slot, number)
                parameter.register_post_accumulate_grad_hook(hook)
                parameter.requires_grad_(not unit.is_frozen)

    # Forward

    def _before_forward(self, point: HookPoint, arguments: Any) -> None:
        point.inputs = {id(tensor): tensor.grad_fn for tensor in tensors_in(arguments)}
        if in_backward():  # recomputed: the units after this one are done
            if self._pass is not None:
                self._pass.done.discard(point)
            self._unshard(point, Phase.BACKWARD)
            return
        self.refuse_failed_backward()
        self._note_running(point)
        ahead = self.part.after(point, False)
        self._unshard(point, Phase.FORWARD, ahead, publishes=True)

    def _note_running(self, point: HookPoint) -> None:
        if not point.is_root:
            self._pending.number += 1
        if point in self._running:  # its last forward raised an error
            self._running.remove(point)
        for outer in self._running:
            if not point.lies_in(outer):
                outer.intruder = point
        self._running.append(point)
        point.intruder = None

    def _after_forward(self, point: HookPoint, output: Any) -> None:
        made = self._made_by(point, tensors_in(output))
        forbid_inplace(made)
        is_recomputed = in_backward()
        record = ForwardRecord(point, self._pending.number, self._begin_backward)
        for tensor in made:
            tensor.register_hook(record)
        if is_recomputed:
            return  # the units stay unsharded, because this block's own backward comes next
        self._refuse_intruder(point)
        if made:
            self._pending.add(record)
        if not (made and point in self.part.kept_after_forward):
            point.reshard()

    def _made_by(self, point: HookPoint, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The output tensors whose gradient shows that the backward of this block begins.

        Raises UserError if the block returns a view of its weights, or only its inputs: a layer
        that is skipped on some ranks does so, and its collectives would be missing there.
        """
        # The gradient of a tensor that is passed on belongs to the block that made it.
        made = [t for t in outputs if point.inputs.get(id(t), self) is not t.grad_fn]
        point.inputs = {}
        for unit in point.units:
            refuse_weights(made, point.name, unit)
        if outputs and not made and torch.is_grad_enabled():
            raise UserError(
                f"block {point.name!r}: returns only its inputs, need a new tensor among its "
                "outputs (x.clone()), or all ranks not to call it"
            )
        # Not leaves: a parameter that is returned as it is would collect hooks.
        return [tensor for tensor in made if tensor.requires_grad and not tensor.is_leaf]

    def _refuse_intruder(self, point: HookPoint) -> None:
        """Raises UserError if a block ran inside this one that is no submodule of it: it may have
        taken this block's buffer, and the order of backward would not be known."""
        self._running.remove(point)
        if point.intruder is not None:
            raise UserError(
                f"block {point.intruder.name!r}: runs inside of block {point.name!r} and is no "
                "submodule of it, need one of them left out of the blocks"
            )

    def _unshard(
        self,
        point: HookPoint,
        phase: Phase,
        ahead: Sequence[HookPoint] = (),
        publishes: bool = False,
    ) -> None:
        """Unshard a point for `phase`, and begin to unshard those that run next."""
        if not (self._policy == "none" and point.is_resident):
            point.start_unshard()
            for other in ahead:
                other.start_unshard()
            if publishes:
                self.start_publishing(self._forward_place[point])
            with self._ledger.waiting(f"gather {point.name}"):
                point.unshard()
        point.set_phase(phase)

    # Backward

    @property
    def _needs_no_weights(self) -> bool:
        """Whether this backward reads no weights: they stay as the forwards around it need them."""
        return self.backward == "weights"

    def _open_pass(self) -> BackwardPass:
        """The backward in progress; the first event of a backward begins it."""
        if self._pass is None:
            self._pass = BackwardPass(self.backward != "inputs" and self._gives_gradients())
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_pass)
        return self._pass

    def _gives_gradients(self) -> bool:
        """Whether autograd is going to give any parameter a gradient in this backward.
        `torch.autograd.grad` gives none."""
        return any(
            torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(p).node)
            for point in self.points
            for unit in point.trained
            for p in unit.parameters
            if p.requires_grad
        )

    def _begin_backward(self, record: ForwardRecord) -> None:
        self._pending.discard(record)
        current, point = self._open_pass(), record.point
        if point in current.done:  # the rest of its backward needs no parameters
            return
        current.newest = max(current.newest, record.number)
        if current.reduces:
            self._finish_earlier(current, point, record.number)
            current.begin(point)
        ahead = self.part.after(point, True)
        self._unshard(point, Phase.BACKWARD, [p for p in ahead if p not in current.done])

    def _finish_earlier(self, current: BackwardPass, point: HookPoint, number: int) -> None:
        """Finish the blocks whose backward is over although a parameter may have got no gradient,
        perhaps on this rank alone (an expert without tokens).

        Autograd runs the nodes of one forward before those of any forward before it. The backward
        of a block around this one goes on, and so does that of a block inside it.
        """
        for other in list(current.missing):
            is_nested = other.is_root or point.lies_in(other) or other.lies_in(point)
            if not is_nested and not self._pending.has(other, number):
                self._finish_backward(current, other)

    def _on_gradient(
        self, point: HookPoint, slot: int, number: int
    ) -> Callable[[nn.Parameter], None]:
        # Weak, because the garbage collector does not see what the hooks of a parameter hold. The
        # hooks of modules hold `self`; on one rank, where modules have none, the engine does.
        owner, weak_point = ref(self), ref(point)

        def ready(parameter: nn.Parameter) -> None:
            hooks, point = owner(), weak_point()
            if hooks is None or point is None:
                raise RuntimeError("engine: deleted, need it for the backward of its model")
            hooks._collect_gradient(point, slot, number, parameter)

        return ready

    def _collect_gradient(
        self, point: HookPoint, slot: int, number: int, parameter: nn.Parameter
    ) -> None:
        current, unit = self._open_pass(), point.units[slot]
        is_timely = unit.is_persistent or unit.phase is Phase.BACKWARD or self._needs_no_weights
        if unit.is_frozen or not is_timely or unit.is_finishing:
            name = unit.layout.entries[number].name
            raise RuntimeError(f"parameter {name}: {_untimely(unit)}")
        current.reduces = True
        unit.collect_gradient(number, parameter)
        missing = current.begin(point)
        missing.discard((slot, number))
        # The root comes last. And after its last gradient, a block may still read a weight in
        # backward (`w.detach()` was used): if it is not persistent, it is over when the next block
        # begins.
        reads_weights = not (point.is_persistent or self._needs_no_weights)
        if missing or point.is_root or reads_weights:
            return
        if not self._pending.has(point, current.newest):
            self._finish_backward(current, point)

    def _finish_backward(self, current: BackwardPass, point: HookPoint) -> None:
        """Reduce a point's gradients. In the buffers that it leaves, begin to gather the point that
        follows those already prefetched."""
        current.missing.pop(point)
        current.done.add(point)
        if not self._needs_no_weights:
            self._reshard(point)
        # As many full gradients wait for their reduction as units are prefetched.
        while len(self.reducing) > self._prefetch:
            with self._ledger.waiting(f"reduce {self.reducing[0].name}"):
                self.reducing.popleft().finish_reducing()
        with self._streams.collect() as gathers:
            for following in self._next_gathered(current, point):
                following.start_unshard()
        with self._streams.collect() as reductions:
            point.start_reducing()
        self._streams.issue_interleaved(gathers, reductions)
        if self._policy == "none":
            point.finish_reducing()  # its buffer serves the next unit
        else:
            self.reducing.append(point)
        if self.is_last_of_root if point.is_root else self.is_last:
            point.start_finishing()
            self._finishing.append(point)
            while len(self._finishing) > self._prefetch + 1:
                self._finishing.popleft().release_gradients()

    def _next_gathered(self, current: BackwardPass, point: HookPoint) -> list[HookPoint]:
        """The point to gather in the buffers that `point` leaves in backward, if there is one."""
        if self._needs_no_weights:
            return []
        skipped = current.done | current.missing.keys()
        following = self.part.beyond(point)
        return [other for other in following if not (other.is_stale or other in skipped)]

    def _reshard(self, point: HookPoint) -> None:
        """Reshard a point after backward, unless it is among the first in the next forward."""
        if point in self.part.kept_after_backward:
            point.keep_unsharded()
        else:
            point.reshard()

    def _end_pass(self) -> None:
        """Called by autograd at the end of a backward."""
        current = self._pass
        assert current is not None
        for point in self.part.backward:
            if point in current.missing:  # the root, or a parameter was not used
                self._finish_backward(current, point)
            elif not self._needs_no_weights:
                self._reshard(point)  # it may have been prefetched for a block that did not run
        self._pass = None


def _untimely(unit: Unit) -> str:
    """Why a gradient cannot be accepted now, and what to do."""
    if unit.is_frozen:
        return "was frozen when it was sharded; need requires_grad before `shard`"
    if unit.is_finishing:
        return (
            "gradient after the last one of the step; need `no_sync()` around all backwards of a "
            "step but the last, `clear_gradients` after it, and use_reentrant=False if several "
            "checkpoints run this block"
        )
    return (
        f"gradient outside of the backward of {unit.name!r}; need the block's outputs to be "
        "tensors in tuples, lists, dicts or dataclasses, and use_reentrant=False in checkpoints "
        "around blocks"
    )
