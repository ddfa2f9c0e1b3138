"""A unit: the parameters of one block in one flat buffer, and this rank's shard of each state."""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cached_property, partial

import torch
from torch import nn

from megafrontier.comm.collectives import LevelCollectives
from megafrontier.comm.streams import DONE, HOST, AsyncChain, WorkHandle
from megafrontier.comm.wires.wire import Wires
from megafrontier.common.norms import KnownNorms, row_norms
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.parallel.param_spec import ParamSpec, spec_of
from megafrontier.partition.error_feedback import ErrorFeedback
from megafrontier.partition.flat_buffers import GradientBuffers, UnitParameters, clear_unused
from megafrontier.partition.layout import Layout
from megafrontier.partition.memory import UnitBuffer, UnitBufferPool
from megafrontier.partition.offload import HostShard
from megafrontier.partition.placement import Placement
from megafrontier.partition.rules import StateRules

ROOT = "root"
"""Name of the unit of all parameters outside of blocks. It is unsharded for the whole pass."""
Named = tuple[str, nn.Parameter]
InitialSlice = Callable[[ParamSpec, int, int], torch.Tensor]
"""(spec, start, stop) → elements [start, stop) of a parameter's initial value, 1-D fp32."""


class Phase(Enum):
    """What the unsharded weights of a unit are used for."""

    RESHARDED = auto()
    FORWARD = auto()
    BACKWARD = auto()


class Unit:
    """The flat buffers of one block. Each tensor is a 1-D contiguous slice of the same layout.

    master: this rank's optimizer shard of the weights, fp32. The weights of record.
    weights: the slice of the weights that gathers read from, in the computing type; empty if they
        read the masters (`Placement.has_copy`).
    feedback: the quantisation errors of the unit's gradient messages.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Named],
        optimizer: str,
        collectives: LevelCollectives,
        buffer: UnitBuffer,
        pool: UnitBufferPool,
        rules: StateRules,
        is_frozen: bool = False,
    ) -> None:
        """`parameters`: in the order of the flat buffer. `optimizer`: the name of the one that
        updates them. `buffer`: memory of the unsharded weights, in the computing type; while they
        are resharded, another unit may have it. `pool`: memory of the gradients. `rules`: those of
        its parameters, with a placement on the levels. `is_frozen`: they get no gradient."""
        size = collectives.hierarchy.size
        self.name = name
        self.optimizer = optimizer
        self.placement = placement = rules.placement
        self.layout = Layout.build(name, ((n, p.shape) for n, p in parameters), size)
        self.specs = {n: spec_of(n, p) for n, p in parameters}
        self.is_frozen = is_frozen
        self.is_late = rules.update != "at_once"
        self.is_overlapped = rules.update == "overlapped"
        self.updating: WorkHandle = DONE
        """The newest late update of the master."""
        self.gradient_norms = KnownNorms()  # if this rank counts it
        self._measures_norms = rules.measures_norms
        self._collectives = collectives
        self.is_persistent = placement.is_persistent
        self.buffer = buffer
        self.buffer.reserve(self.layout.numel)
        self.phase = Phase.RESHARDED
        self.is_stale = False
        self._full_gradient: torch.Tensor | None = None
        self._finished: AsyncChain | None = None
        self.is_finishing = False
        """Whether the reduction to the optimizer level has begun. A gradient that comes later would
        be added to a sum over all ranks."""
        _, shards = self.hierarchy.shard_index(placement.gradients)
        feedback_levels = rules.feedback_levels(self.hierarchy.levels)
        self._gradients = GradientBuffers(self.layout, shards, buffer.dtype, pool)
        self._allocate(feedback_levels, is_offloaded=rules.update == "on_host")
        self._publishing = AsyncChain(self.weights, f"publish {name}")
        self._gathering = AsyncChain(self.weights, f"gather {name}")
        self._reducing = AsyncChain(self.gradient, f"reduce {name}")
        self.clear_gradient()
        self._parameters = UnitParameters(self.layout, buffer.dtype, buffer.device)
        self._parameters.reshard()

    def _allocate(self, feedback_levels: Sequence[int], is_offloaded: bool) -> None:
        place, dtype = self.placement, self.buffer.dtype
        self.weights = torch.empty(0, dtype=dtype, device=self.buffer.device)
        if place.has_copy:
            depth = place.backward_weights
            self.weights = self.full if self.is_persistent else self._empty(depth, dtype)
        self.host: HostShard | None = None
        """Of an offloaded unit."""
        # If every rank updates all weights and computes in fp32, the weights are the masters.
        is_same = place.optimizer == 0 and dtype is torch.float32
        self.computes_with_masters = is_same and self.is_persistent and not is_offloaded
        if is_offloaded:
            start, stop = self.range
            self.host = HostShard(stop - start, dtype, self.buffer.device)
            self.master = self.host.master
        elif self.computes_with_masters:
            self.master = self.full
        else:
            self.master = self._empty(place.optimizer, torch.float32)
        self.master.zero_()
        levels = () if self.is_frozen else feedback_levels
        errors = {level: self._empty(level, torch.bfloat16).zero_() for level in levels}
        self.feedback = ErrorFeedback(self.layout, self._collectives, place.optimizer, errors)

    def _empty(self, depth: int, dtype: torch.dtype) -> torch.Tensor:
        _, shards = self.hierarchy.shard_index(depth)
        return torch.empty(self.layout.numel // shards, dtype=dtype, device=self.buffer.device)

    @cached_property
    def full(self) -> torch.Tensor:
        """The unsharded weights [numel]; while resharded, the memory may hold another unit's."""
        return self.buffer.memory[: self.layout.numel]

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient shard, fp32 [n]; empty before a step's first backward, if it is not kept."""
        return self._gradients.shard

    @property
    def hierarchy(self) -> Hierarchy:
        """The data-parallel levels over which the unit's state is sharded."""
        return self._collectives.hierarchy

    @property
    def wires(self) -> Wires:
        """The formats of the unit's messages."""
        return self._collectives.wires

    @property
    def collectives(self) -> LevelCollectives:
        """The collectives over the levels of `hierarchy`."""
        return self._collectives

    @property
    def has_no_messages(self) -> bool:
        """Whether no state of the unit comes from another rank or from a late update."""
        return self.hierarchy.size == 1 and not self.is_late

    @property
    def counts(self) -> bool:
        """Whether this rank counts its optimizer shard in a sum over all ranks: its replicas do
        not."""
        return self.hierarchy.is_first_replica(self.placement.optimizer)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that modules hold, in the order of the layout."""
        return self._parameters.parameters

    @property
    def range(self) -> tuple[int, int]:
        """[start, stop) of this rank's optimizer shard in the flat buffer."""
        return self.layout.bounds(*self.hierarchy.shard_index(self.placement.optimizer))

    def initialise(self, initial: InitialSlice) -> None:
        """Fill the master shard. Padding stays zero."""
        start, stop = self.range
        for entry, first, last, at in self.layout.within(start, stop):
            self.master[at : at + last - first] = initial(self.specs[entry.name], first, last)

    # Weights

    @property
    def published(self) -> torch.Tensor:
        """This rank's optimizer shard of the weights, as they were last published."""
        place = self.placement
        return self._collectives.local_slice(self.weights, place.backward_weights, place.optimizer)

    def mark_stale(self) -> None:
        """The masters have changed. Until they are published, parameters read outside of the hooks
        are NaN."""
        self._publishing.wait()
        self.reshard()
        is_published = self.computes_with_masters and not self.is_overlapped
        self._parameters.begin_step(self.full if is_published else None)
        self.is_stale = True

    def start_publishing(self) -> None:
        """Begin to bring the masters to every copy of the weights that gathers read from."""
        self.is_stale = False
        place, label, update = self.placement, self._publishing.label, self.updating
        if self.computes_with_masters:
            self._publishing = AsyncChain(self.weights, label, update)
        elif place.has_copy:
            start, stop, is_on_host = place.optimizer, place.backward_weights, self.host is not None
            source = self.master if self.host is None else self.host.take_weights(update)
            self._publishing = self._collectives.publish(
                source, self.weights, start, stop, label, update, is_on_host
            )

    def finish_publishing(self) -> None:
        """Wait until the copies hold the published values of the masters."""
        if self.is_stale:
            self.start_publishing()
        self._publishing.wait()
        if not self.placement.has_copy:
            self._gathering.wait()  # it reads the masters
        self._finish_update()
        self._show_if_persistent()

    def _show_if_persistent(self) -> None:
        """Persistent weights can be read from now on, not only while the unit's block runs."""
        if self.is_persistent:
            self._parameters.unshard(self.full)

    def broadcast_weights(self, from_masters: bool) -> None:
        """Copy each owner's `published` shard, or with `from_masters` its master, to all ranks
        without rounding, to begin or resume."""
        self.is_stale = False
        if not self.placement.has_copy:
            return
        if from_masters:
            self.published.copy_(self.master)
        self._collectives.gather_exact(
            self.weights,
            self.placement.optimizer,
            self.placement.backward_weights,
            f"place {self.name}",
        ).wait()
        self._show_if_persistent()

    def start_unshard(self) -> None:
        """Begin to gather the weights, unless they are unsharded or have begun to be."""
        if self.phase is not Phase.RESHARDED:
            return
        self.phase = Phase.FORWARD
        if self.is_stale:
            self.start_publishing()
        if not self.is_persistent:
            self.buffer.acquire(self)
            self._gathering = self._start_gather(self.placement, self._gathering.label)
        self._parameters.unshard(self.full)

    def _start_gather(self, place: Placement, label: str) -> AsyncChain:
        if not place.has_copy:
            start = place.optimizer
            return self._collectives.publish(self.master, self.full, start, 0, label, self.updating)
        depth, published = place.backward_weights, self._publishing.work
        return self._collectives.gather(self.weights, self.full, depth, 0, label, published)

    @property
    def is_resident(self) -> bool:
        """Whether the parameters are always unsharded and there is nothing to publish."""
        return self.is_persistent and not self.is_stale

    def unshard(self) -> None:
        """Wait until the parameters are unsharded."""
        self.start_unshard()
        self._gathering.wait()
        self._publishing.wait()  # over already, because the gathering comes after it
        self._finish_update()

    def keep_unsharded(self) -> None:
        """Stay unsharded for the next forward, unless another unit needs the buffer, or the weights
        are published, before that."""
        if self.phase is not Phase.RESHARDED:
            self.phase = Phase.FORWARD

    def reshard(self) -> None:
        """Drop the gathered weights. The shards stay."""
        if self.phase is Phase.RESHARDED:
            return
        self.phase = Phase.RESHARDED
        if not self.is_persistent:
            self._gathering.wait()  # it may have been prefetched and not used
            self._parameters.reshard()

    # Gradients

    def clear_gradient(self) -> None:
        """Start accumulating from zero. Raises RuntimeError as `Engine.clear_gradients` does."""
        if self._finished is not None:
            raise RuntimeError("gradients cleared while reduced; need engine.finish_gradients()")
        # A reduction in flight ends first. Else it would be added to the new gradient and errors.
        self.finish_reducing()
        self._is_fresh = True
        self.is_finishing = False
        if not self.is_overlapped or self.updating is DONE:
            self._free_gradient()

    def _free_gradient(self) -> None:
        self._gradients.clear()
        self._reducing.value = self.gradient

    def _finish_update(self) -> None:
        """Wait for an overlapped update, and free the gradient that it has read."""
        if self.is_overlapped and self.updating is not DONE:
            self.updating.wait()
            self.updating = DONE
            self._free_gradient()

    def collect_gradient(self, index: int, parameter: nn.Parameter) -> None:
        """Move the new gradient of parameter `index` into the flat gradient."""
        fresh, parameter.grad = parameter.grad, None
        assert fresh is not None
        self._start_gradient()
        self._gradients.flat.put(index, fresh)

    def _start_gradient(self) -> None:
        if self._gradients.flat.buffer is None:
            self.finish_reducing()  # a unit has at most one full gradient
            self._gradients.start_full()

    def start_reducing(self) -> None:
        """Begin to reduce a micro-batch's gradient to the gradient level and add it to the shard.

        Without any gradient on this rank zeros are reduced, because other ranks may have one.
        """
        depth = self.placement.gradients
        if depth == 0:
            self._gradients.flat.write()
            return
        self._start_gradient()
        self._gradients.allocate_shard()
        self._full_gradient = self._gradients.flat.complete()
        label, errors = self._reducing.label, self.feedback.errors
        self._reducing = self._collectives.reduce(self._full_gradient, 0, depth, label, errors)
        accumulate = partial(self._accumulate, self._is_fresh)
        self._collectives.then(self._reducing, depth - 1, accumulate)
        self._is_fresh = False

    def _accumulate(self, is_first: bool, reduced: torch.Tensor) -> torch.Tensor:
        return self.gradient.copy_(reduced) if is_first else self.gradient.add_(reduced)

    def finish_reducing(self) -> None:
        """Wait until the gradient shard holds all micro-batches so far, and release the buffer of
        the full gradient. Does not wait for `start_finishing`."""
        if self._full_gradient is None:
            return
        self._reducing.wait()
        self._gradients.release_full(self._full_gradient)
        self._full_gradient = None

    def start_finishing(self) -> None:
        """Begin to reduce the gradient shard to the optimizer level, and over replicas."""
        self.is_finishing = True
        if self.host is not None and self.is_stale:  # its weights lie where the gradient goes
            self.start_publishing()
        place = self.placement
        if place.gradients == 0:
            self._start_gradient()  # if no backward gave one
            self._gradients.flat.complete()
        elif self._is_fresh:
            self._gradients.allocate_shard().zero_()
        self._finished = self._collectives.reduce(
            self.gradient,
            place.gradients,
            place.optimizer,
            f"finish {self.name}",
            self.feedback.errors,
            self._reducing.work,
        )
        level = HOST if self.host is not None else place.optimizer - 1
        self._collectives.sum_over_replicas(self._finished, place.optimizer, level, self._complete)

    def _complete(self, gradient: torch.Tensor) -> torch.Tensor:
        """The optimizer shard of the gradient, zero where it belongs to no parameter that is
        trained. That of an offloaded unit is copied to the host."""
        clear_unused(gradient, self.layout, self.range, self.parameters)
        norms = row_norms(gradient) if self._measures_norms and self.counts else None
        complete = gradient if self.host is None else self.host.receive(gradient)
        self.gradient_norms.keep(norms, complete)
        return complete

    def finish_gradient(self) -> torch.Tensor:
        """Wait for `start_finishing`. Returns this rank's optimizer shard of the gradient, fp32,
        summed over all ranks and micro-batches.

        Raises RuntimeError the second time, because sums of replicas would be summed again.
        """
        if self._finished is None:
            raise RuntimeError("gradients finished twice; need engine.clear_gradients() between")
        gradient = self._finished.wait()
        self._finished = None
        self.finish_reducing()  # over already
        return gradient

    def release_gradient(self) -> None:
        """Free the gradient shard of an offloaded unit when its copy to the host has ended."""
        if self.host is not None and self._finished is not None:
            self._finished.wait()
            self._free_gradient()
