"""One rank of a command that runs on many: joined to the others, and watched."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from megafrontier.config import Config
from megafrontier.launch.device import choose_device, prepare_allocator
from megafrontier.launch.health.liveness import LivenessCheck
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.health.watchdog import Watchdog
from megafrontier.launch.rendezvous import join
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.world import World
from megafrontier.plan.resolve import RunPlan, resolve_plan
from megafrontier.training.device import explain_out_of_memory
from megafrontier.training.logging.run_log import RunLogger


@dataclass(frozen=True)
class RunContext:
    """What a command has on each of its ranks."""

    config: Config
    identity: Identity
    plan: RunPlan
    mesh: Mesh
    watchdog: Watchdog
    run_logger: RunLogger

    @property
    def world(self) -> World:
        return self.mesh.world

    def explain_out_of_memory(self, advice: str) -> AbstractContextManager[None]:
        """Raise one line with `advice` for a device that runs out of memory in the body."""
        return explain_out_of_memory(f"rank {self.identity.rank} on {self.identity.host}", advice)


@contextmanager
def open_context(
    config: Config,
    directory: Path,
    open_logger: Callable[[bool], AbstractContextManager[RunLogger]] | None = None,
) -> Iterator[RunContext]:
    """Join the other ranks, and watch over them while the body runs.

    directory: gets the reports of hangs and the list of excluded nodes.
    open_logger: given whether this is rank 0. It is closed after the watchdog, because that may
        take minutes. None: keep nothing.

    Raises as `join` does.
    """
    identity = identify(os.environ)
    timeouts = Timeouts.of(identity.world_size, config.train.hang_seconds)
    with (
        closing(Watchdog(identity, directory, timeouts)) as watchdog,
        join_machine(config, watchdog.start, watchdog.fail) as (plan, mesh),
        open_logger(mesh.rank == 0) if open_logger else nullcontext(RunLogger(None)) as run_logger,
        watchdog.watching(),
    ):
        yield RunContext(config, identity, plan, mesh, watchdog, run_logger)


@contextmanager
def join_machine(
    config: Config,
    on_met: Callable[[LivenessCheck | None], None] = lambda liveness: None,
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> Iterator[tuple[RunPlan, Mesh]]:
    """Join the other ranks on the machine of a configuration. Arguments and errors as of `join`."""
    identity = identify(os.environ)
    plan = resolve_plan(config, identity.world_size)
    device = choose_device(identity, plan.machine.device.name)
    if device.type == "cuda":
        where = f"rank {identity.rank} on {identity.host}"
        with explain_out_of_memory(where, "a device without another process's memory"):
            torch.cuda.set_device(device)  # allocates some of its memory
    prepare_allocator(device)
    timeouts = Timeouts.of(identity.world_size, config.train.hang_seconds)
    with join(identity, plan.shape, device, timeouts, on_met, on_failure) as mesh:
        yield plan, mesh
