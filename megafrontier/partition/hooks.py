"""The schedule: hooks that gather a unit when its module runs and reduce its gradient when done.

Note on order. Every rank runs the same modules in the same order, so hooks issue the same
collectives in the same order on every rank; nothing here depends on timing, or on which parameters
of a block have a gradient.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.partition.backward_order import Run, Runs
from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.comm.ledger import Ledger
from megafrontier.partition.comm.streams import Policy
from megafrontier.partition.unit import ROOT, Phase, Unit
from megafrontier.partition.wrap import (
    Copy,
    bases_of,
    in_backward,
    refuse_views,
    tensors_in,
)


class ModuleHooks:
    """When each unit of a model is whole, and when its gradient is reduced."""

    def __init__(
        self,
        units: Sequence[Unit],
        modules: Sequence[nn.Module],
        collectives: LevelCollectives,
        ledger: Ledger,
        policy: Policy,
        prefetch: int,
    ) -> None:
        """`modules` are those of `units`, in the order in which they run; they get the hooks, where
        there is something to gather or an order to keep."""
        self.units = units
        self.reducing: deque[Unit] = deque()
        """Units whose gradient is on its way to its shard, oldest first."""
        self._collectives = collectives
        self._ledger = ledger
        self._policy = policy
        self._prefetch = prefetch
        self._runs = Runs()
        # By number of unit: of those whose backward has begun and is not done, the parameters that
        # have no gradient yet; those that are done.
        self._missing: dict[int, set[int]] = {}
        self._done: set[int] = set()
        self._is_last = False
        self._leads = False  # a backward; another's, for its own ends, leaves no gradients here
        # Where the pass turns round those that have just run are the next to run, and nobody else
        # wants their buffers: they stay. So does the root, which has its own.
        in_turns = [unit for unit in units if unit.name != ROOT]
        roots = [unit for unit in units if unit.name == ROOT]
        self._first = {*roots, *in_turns[: prefetch + 1]}
        self._last = {*roots, *in_turns[-1 - prefetch :]}
        for index, (unit, module) in enumerate(zip(units, modules, strict=True)):
            # One rank, whose weights are never away, has nothing to gather and no order to keep.
            if collectives.hierarchy.size > 1 or not unit.is_persistent:
                self._attach(module, index)
            for number, parameter in enumerate(unit.parameters):
                parameter.register_post_accumulate_grad_hook(self._on_gradient(index, number))

    def gathers(self, unit: Unit, micro_batches: int) -> int:
        """How often a step of so many micro-batches gathers a unit: for each forward, unless it has
        stayed from the backward before, and for each backward, unless it stays for that."""
        forward = 1 if unit in self._first else micro_batches
        return forward + (0 if unit in self._last else micro_batches)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """See `Engine.backward`."""
        if self._leads:
            raise RuntimeError("a backward of this engine has failed; need it and its model anew")
        if loss.numel() != 1 or not loss.requires_grad:  # nothing has been led yet: no harm is done
            shape = tuple(loss.shape)
            raise RuntimeError(f"loss: of shape {shape}, need a scalar that comes of the model")
        self._is_last, self._leads = is_last, True
        self._runs.begin_backward()
        loss.backward()
        for run in self._runs.due_at_last():
            self._begin_run(run)
        for index, unit in reversed(list(enumerate(self.units))):
            if index in self._missing:  # the root, or some parameter took no part
                self._finish_backward(index)
            else:
                self._reshard(unit)  # if it was gathered ahead, but its turn never came
        self._leads = False
        self._done.clear()

    def start_publishing(self, index: int) -> None:
        """Where levels run side by side, begin with those that come after unit `index` and after
        those gathered ahead of it: 2 · prefetch + 1 in all, so that what is on its way stays
        bounded. On one lane they would hold up the gathering of the units before them."""
        if self._policy == "full":
            for unit in self.units[index + 1 : index + 2 * (self._prefetch + 1)]:
                if unit.is_stale:
                    unit.start_publishing()

    def _attach(self, module: nn.Module, index: int) -> None:
        unit = self.units[index]
        given: dict[int, object] = {}
        number = 0

        def before(_module: nn.Module, *arguments: Any) -> None:
            nonlocal number
            given.clear()  # of a forward that ended early, as a recomputation does
            given.update((id(t), t.grad_fn) for t in tensors_in(arguments))
            if in_backward():  # recomputed: the units after it have had their turn
                self._done.discard(index)
                self._gather(index, ahead=0)
                unit.phase = Phase.BACKWARD
            else:
                self._gather(index, ahead=1)
                unit.phase = Phase.FORWARD
                if unit.name != ROOT:  # around all of them
                    number = self._runs.enter(index)

        def after(_module: nn.Module, _arguments: Any, output: Any) -> Any:
            # What a block passes on as it came has its gradient in the backward of another block.
            made = [t for t in tensors_in(output) if given.get(id(t), self) is not t.grad_fn]
            refuse_views(made, unit)
            # A parameter that it returns as it is would keep each run's hook.
            made = [t for t in made if t.requires_grad and not t.is_leaf]
            made += bases_of(made, given.values())
            given.clear()
            if in_backward():  # the unit stays as it is: its own backward still needs it
                if not made and torch.is_grad_enabled():
                    output, made = self._pass_on(index, output)
                self._runs.recompute(index, made, self._before_backward)
                return output
            if unit.name != ROOT and not self._runs.is_newest(number):
                self._refuse_inner(index)
            if not made and torch.is_grad_enabled():
                output, made = self._pass_on(index, output)
            has_backward = made or torch.is_grad_enabled()
            if has_backward:
                self._runs.end(index, made, self._before_backward)
            if not (has_backward and unit in self._last):
                unit.reshard()
            return output

        # Before hooks that compute a weight of others, as weight_norm's does.
        # A compiler that traced them would take what they bring for the same in each step.
        hidden = torch.compiler.disable
        module.register_forward_pre_hook(hidden(before), with_kwargs=True, prepend=True)
        module.register_forward_hook(hidden(after))

    def _gather(self, index: int, ahead: Literal[-1, 0, 1]) -> None:
        """Make a unit whole, and begin with those that run after it (`ahead` 1) or before (-1)."""
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

    def _pass_on(self, index: int, output: Any) -> tuple[Any, list[torch.Tensor]]:
        """The block has computed nothing on this rank (an expert without tokens, a dropped layer).
        Its turn in backward must come all the same, for the order of collectives: so a tensor is
        copied. Returns the output, and what of it has a gradient of its own then."""
        if isinstance(output, torch.Tensor) and output.requires_grad:
            own = Copy.apply(output)  # no view, which an in-place operation would take out of it
            return own, [own]
        if any(tensor.requires_grad for tensor in tensors_in(output)):
            raise UserError(
                f"block {self.units[index].name!r} returns only what it was given; need a tensor "
                "of its own among it (x.clone())"
            )
        return output, []

    def _refuse_inner(self, index: int) -> None:
        """Raises UserError for a run in which another block ran: it may have taken the outer one's
        place, and nobody could tell when the outer one's backward is over."""
        raise UserError(
            f"block {self.units[self._runs.newest].name!r}: runs inside of block "
            f"{self.units[index].name!r}, need one of them left out of the blocks"
        )

    def _before_backward(self, run: Run) -> None:
        if self._leads:
            for idle in self._runs.due_before(run):
                self._begin_run(idle)
        self._begin_run(run)

    def _begin_run(self, run: Run) -> None:
        self._runs.begin(run)
        if run.index not in self._done:  # else what is left of its backward has no parameters
            self._begin_backward(run.index, run.number)

    def _begin_backward(self, index: int, number: int) -> None:
        if self._leads:
            self._finish_those_before(index, number)
            self._missing_of(index)
        self._gather(index, ahead=-1)
        self.units[index].phase = Phase.BACKWARD

    def _finish_those_before(self, index: int, number: int) -> None:
        """Finish the units whose backward is over, though a parameter may have taken no part in it,
        perhaps on this rank alone.

        Autograd runs the nodes of one run of a block before those of any run before it.
        """
        for other in list(self._missing):
            if (
                other != index
                and not self._runs.is_waiting(other, number)
                and self.units[other].name != ROOT
            ):
                self._finish_backward(other)

    def _missing_of(self, index: int) -> set[int]:
        if index not in self._missing:
            self._missing[index] = set(range(len(self.units[index].parameters)))
        return self._missing[index]

    def _on_gradient(self, index: int, number: int) -> Callable[[nn.Parameter], None]:
        # The collector does not see what a parameter's hooks hold: they would hold the engine, and
        # with it the parameter, for ever. Those of the modules hold it while there is a model; on
        # one rank, where modules have none, its engine alone does.
        owner = ref(self)

        def ready(parameter: nn.Parameter) -> None:
            schedule = owner()
            if schedule is None:
                raise RuntimeError("backward through a model whose engine is gone")
            schedule._take_gradient(index, number, parameter)

        return ready

    def _take_gradient(self, index: int, number: int, parameter: nn.Parameter) -> None:
        unit = self.units[index]
        is_whole = unit.is_persistent or unit.phase is Phase.BACKWARD
        if not self._leads or not is_whole or unit.is_finishing:
            name = unit.layout.entries[number].name
            raise RuntimeError(f"parameter {name}: {_untimely(unit, self._leads)}")
        unit.collect_gradient(number, parameter)
        missing = self._missing_of(index)
        missing.discard(number)
        # Of one whose weights go away more may be to come that needs them (a use of `w.detach()`):
        # it is over when another one's backward begins. The root comes last in any case.
        if missing or unit.name == ROOT or not unit.is_persistent:
            return
        if not self._runs.is_waiting(index):
            self._finish_backward(index)

    def _reshard(self, unit: Unit) -> None:
        """Its backward is over: release it, but for those that run first in the next forward."""
        if unit in self._first:
            unit.keep_unsharded()
        else:
            unit.reshard()

    def _finish_backward(self, index: int) -> None:
        """Reduce a unit's gradient and, into its place, begin to gather the unit whose turn comes
        after those already gathered, if there is one."""
        unit, next_index = self.units[index], index - 1 - self._prefetch
        self._missing.pop(index)
        self._done.add(index)
        self._reshard(unit)
        # As many full gradients wait for their reduction as units are gathered ahead: bounded.
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
            unit.finish_reducing()  # it is done, and its memory serves the next unit
        else:
            self.reducing.append(unit)
        if self._is_last:
            unit.start_finishing()


def _untimely(unit: Unit, is_led: bool) -> str:
    """Why a gradient cannot be taken now."""
    if not is_led:
        return (
            "a gradient of a backward that the engine does not lead; need engine.backward(loss), "
            "or another model's loss without this one's gradients"
        )
    if unit.is_finishing:
        return (
            "a gradient after the step's last one: `is_last` is for the last backward before "
            "`finish_gradients`, after which comes `clear_gradients`, and a block that several "
            "reentrant checkpoints run needs use_reentrant=False"
        )
    return (
        f"a gradient outside of the backward of {unit.name!r}; its output must be tensors, in "
        "tuples, lists, dicts or dataclasses, and checkpoints around blocks need "
        "use_reentrant=False"
    )
