"""A unit: the parameters of one block in one flat buffer, and this rank's shard of each state."""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cached_property, partial

import torch
from torch import nn

from megafrontier.partition.comm.collectives import LevelCollectives
from megafrontier.partition.comm.streams import AsyncChain
from megafrontier.partition.error_feedback import ErrorFeedback
from megafrontier.partition.flat_gradient import FlatGradient
from megafrontier.partition.layout import Layout
from megafrontier.partition.parameters import Parameters
from megafrontier.partition.placement import Placement
from megafrontier.partition.unit_buffers import UnitBuffer, UnitBufferPool

ROOT = "root"
"""The unit of all that no block owns; it is whole for the whole pass."""
Named = tuple[str, nn.Parameter]
InitialSlice = Callable[[str, tuple[int, ...], int, int], torch.Tensor]
"""(parameter, shape, start, stop) → fp32 elements [start, stop) of its first value."""


class Phase(Enum):
    """What a unit's gathered weights are being used for."""

    RESHARDED = auto()
    FORWARD = auto()
    BACKWARD = auto()


class Unit:
    """Flat buffers of one block; every tensor a 1-D contiguous slice of the same layout.

    `master`: this rank's optimizer shard, fp32 [numel / ranks that share the optimizer state]; the
    authoritative weights. `weights`: the slice that gathers read from, in the computing type.
    `gradient`: the gradient shard, fp32, in whose memory it is finished. `feedback`: the errors of
    its messages.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Named],
        decayed: Sequence[Named],
        placement: Placement,
        collectives: LevelCollectives,
        pool: UnitBufferPool,
        feedback_levels: Sequence[int],
    ) -> None:
        """`decayed` are those of `parameters` with weight decay; they lie first in the buffer.
        `feedback_levels` are the levels with error feedback."""
        first = {parameter for parameter, _ in decayed}
        ordered = [*decayed, *(named for named in parameters if named[0] not in first)]
        hierarchy = collectives.hierarchy
        self.name = name
        self.placement = placement
        self.layout = Layout.build(name, ((n, p.shape) for n, p in ordered), hierarchy.size)
        self._collectives = collectives
        self._pool = pool
        self.is_persistent = placement.backward_weights == 0
        self._buffer = self._choose_buffer()
        self._buffer.reserve(self.layout.numel)
        self._decay_numel = sum(parameter.numel() for _, parameter in decayed)
        self.phase = Phase.RESHARDED
        self.is_stale = False
        self._lent: torch.Tensor | None = None
        self._finished: AsyncChain | None = None
        self.is_finishing = False
        """Whether the step's gradient has begun to be reduced to the optimizer level: what came
        after it would be added to a sum over all ranks."""
        self._allocate(feedback_levels)
        self._publishing = AsyncChain(self.weights, f"publish {name}")
        self._gathering = AsyncChain(self.weights, f"gather {name}")
        self._reducing = AsyncChain(self.gradient, f"reduce {name}")
        self._flat = FlatGradient(self.layout)
        self.clear_gradient()
        self._parameters = Parameters(self.layout, pool.dtype, pool.device)
        self._parameters.hide()

    def _choose_buffer(self) -> UnitBuffer:
        if self.is_persistent:  # for good: its state, not the pool's
            return UnitBuffer(self._pool.dtype, self._pool.device)
        return self._pool.own_buffer() if self.name == ROOT else self._pool.next_buffer()

    def _allocate(self, feedback_levels: Sequence[int]) -> None:
        place = self.placement
        self.weights = (
            self.full
            if self.is_persistent
            else self._empty(place.backward_weights, self._pool.dtype)
        )
        self.gradient = self._empty(place.gradients, torch.float32).zero_()
        # Where every rank updates all of the weights, and computes in fp32, they are the masters.
        self.computes_with_masters = place.optimizer == 0 and self._pool.dtype is torch.float32
        self.master = (
            self.full if self.computes_with_masters else self._empty(place.optimizer, torch.float32)
        ).zero_()
        errors = {level: self._empty(level, torch.bfloat16).zero_() for level in feedback_levels}
        self.feedback = ErrorFeedback(self.layout, self._collectives, place.optimizer, errors)

    def _empty(self, depth: int, dtype: torch.dtype) -> torch.Tensor:
        _, pieces = self._collectives.hierarchy.shard_index(depth)
        return torch.empty(self.layout.numel // pieces, dtype=dtype, device=self._pool.device)

    @cached_property
    def full(self) -> torch.Tensor:
        """The whole weights, while the unit is gathered; another's else."""
        return self._buffer.memory[: self.layout.numel]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of the layout."""
        return self._parameters.all

    @property
    def range(self) -> tuple[int, int]:
        """[start, stop) of this rank's optimizer shard in the flat buffer."""
        return self.layout.bounds(
            *self._collectives.hierarchy.shard_index(self.placement.optimizer)
        )

    @property
    def decay_stop(self) -> int:
        """Elements of the optimizer shard, from its start, that have weight decay."""
        start, stop = self.range
        return max(0, min(self._decay_numel, stop) - start)

    def initialise(self, initial: InitialSlice) -> None:
        """Fill the master shard; padding stays zero."""
        start, stop = self.range
        for entry, first, last, at in self.layout.within(start, stop):
            self.master[at : at + last - first] = initial(entry.name, entry.shape, first, last)

    # Weights

    @property
    def published(self) -> torch.Tensor:
        """This rank's optimizer shard of the weights as all ranks last saw them."""
        place = self.placement
        return self._collectives.local_slice(self.weights, place.backward_weights, place.optimizer)

    def mark_stale(self) -> None:
        """The masters have changed, so the copies are out of date: until the next publication a
        parameter that is read outside of the hooks is NaN."""
        self.wait_published()
        self.reshard()
        self._parameters.renew(self.full if self.computes_with_masters else None)
        self.is_stale = True

    def start_publishing(self) -> None:
        """Begin to bring the masters to every copy of the weights that gathers read from."""
        place = self.placement
        self.is_stale = False
        if self.computes_with_masters:
            return
        self._publishing = self._collectives.publish(
            self.master,
            self.weights,
            place.optimizer,
            place.backward_weights,
            self._publishing.label,
        )

    def wait_published(self) -> None:
        """Return when a publication that has begun is over."""
        self._publishing.wait()

    def finish_publishing(self) -> None:
        """Return when the copies hold the masters' last published values."""
        if self.is_stale:
            self.start_publishing()
        self._publishing.wait()
        self._show_if_persistent()

    def _show_if_persistent(self) -> None:
        """Weights that are never away can be read from here on, not only while the unit runs."""
        if self.is_persistent:
            self._parameters.show(self.full)

    def broadcast_weights(self) -> None:
        """Copy each owner's `published` shard to all ranks as it is, not quantised: at the start of
        a run, or its resumption."""
        self.is_stale = False
        depth = self.placement.backward_weights
        placed = self._collectives.gather_exact(
            self.weights, self.placement.optimizer, depth, f"place {self.name}"
        )
        placed.wait()
        self._show_if_persistent()

    def start_unshard(self) -> None:
        """Begin to make the parameters whole. Does nothing when they are, or have begun to be."""
        if self.phase is not Phase.RESHARDED:
            return
        self.phase = Phase.FORWARD
        if self.is_stale:
            self.start_publishing()
        if not self.is_persistent:
            self._buffer.acquire(self)
            self._gathering = self._collectives.gather(
                self.weights,
                self.full,
                self.placement.backward_weights,
                0,
                self._gathering.label,
                self._publishing.work,
            )
        self._parameters.show(self.full)

    @property
    def is_resident(self) -> bool:
        """Whether the parameters are whole for good, and nothing is to be published."""
        return self.is_persistent and not self.is_stale

    def unshard(self) -> None:
        """Return when the parameters are whole."""
        self.start_unshard()
        self._gathering.wait()
        self._publishing.wait()  # it came before

    def keep_unsharded(self) -> None:
        """Stay gathered for the next forward, until another unit or a publication comes first."""
        if self.phase is not Phase.RESHARDED:
            self.phase = Phase.FORWARD

    def reshard(self) -> None:
        """Give the gathered weights back; the shards stay."""
        if self.phase is Phase.RESHARDED:
            return
        self.phase = Phase.RESHARDED
        if not self.is_persistent:
            self._gathering.wait()  # gathered ahead, but not used
            self._parameters.hide()

    # Gradients

    def clear_gradient(self) -> None:
        """Start from zero: what comes next is written over what is there, not added to it. What is
        under way ends first, or it would be there, and in the errors, after all. Raises
        RuntimeError as `Engine.clear_gradients`."""
        if self._finished is not None:
            raise RuntimeError("gradients cleared under way; need engine.finish_gradients() before")
        self.finish_reducing()
        self._is_fresh = True
        self.is_finishing = False
        if self.placement.gradients == 0:
            self._flat.start(self.gradient)

    def collect_gradient(self, index: int, parameter: nn.Parameter) -> None:
        """Move the fresh gradient of the `index`-th parameter into the flat one."""
        fresh, parameter.grad = parameter.grad, None
        assert fresh is not None
        if fresh.layout is not torch.strided:  # an embedding's, if it is asked for
            fresh = fresh.to_dense()
        if self._flat.whole is None:
            self._start_gradient()
        self._flat.put(index, fresh)

    def _start_gradient(self) -> None:
        self.finish_reducing()  # a unit has one buffer at a time
        self._flat.start(self._pool.acquire_gradient(self.layout.numel))

    def start_reducing(self) -> None:
        """Begin to add this micro-batch's gradient, reduced to the gradient level, to its shard;
        zeros where none has come to this rank, for others may have one."""
        depth = self.placement.gradients
        if depth == 0:
            self._flat.write()
            return
        if self._flat.whole is None:
            self._start_gradient()
        self._lent = self._flat.complete()
        chain = self._collectives.reduce(
            self._lent, 0, depth, self._reducing.label, self.feedback.errors
        )
        self._collectives.then(chain, depth - 1, partial(self._accumulate, self._is_fresh))
        self._is_fresh = False
        self._reducing = chain

    def _accumulate(self, is_first: bool, reduced: torch.Tensor) -> torch.Tensor:
        return self.gradient.copy_(reduced) if is_first else self.gradient.add_(reduced)

    def finish_reducing(self) -> None:
        """Return when the gradient shard holds every micro-batch so far, and the full gradient's
        memory serves the next unit. Levels beyond may still be crossed: that is not waited for."""
        if self._lent is None:
            return
        self._reducing.wait()
        self._pool.release_gradient(self._lent)
        self._lent = None

    def start_finishing(self) -> None:
        """Begin to reduce the gradient shard to the optimizer level, and over replicas."""
        self.is_finishing = True
        place = self.placement
        if place.gradients == 0:
            self._flat.complete()
        elif self._is_fresh:
            self.gradient.zero_()
        self._finished = self._collectives.reduce(
            self.gradient,
            place.gradients,
            place.optimizer,
            f"finish {self.name}",
            self.feedback.errors,
            self._reducing.work,
        )
        self._collectives.sum_over_replicas(self._finished, place.optimizer)

    def finish_gradient(self) -> torch.Tensor:
        """What `start_finishing` has begun: the sum over all ranks and micro-batches of this rank's
        optimizer shard, fp32. Raises RuntimeError the second time: replicas would be added to
        replicas."""
        if self._finished is None:
            raise RuntimeError("gradients finished twice; need engine.clear_gradients() between")
        gradient = self._finished.wait()
        self._finished = None
        self.finish_reducing()  # it came before
        # A rotation mixes parameters with what lies beside them, and messages round.
        gradient[self.layout.padding_within(*self.range)].zero_()
        pairs = zip(self.layout.entries, self.parameters, strict=True)
        frozen = {entry.name for entry, parameter in pairs if not parameter.requires_grad}
        for entry, first, last, at in self.layout.within(*self.range) if frozen else ():
            if entry.name in frozen:
                gradient[at : at + last - first].zero_()
        return gradient
