"""The host memory that `partition.offload` needs."""

import os

from megafrontier.common.errors import UserError
from megafrontier.config import Config
from megafrontier.training.plan import GIB, RunPlan, rank_state_bytes, rank_units


def host_gib(config: Config, plan: RunPlan) -> float:
    """GiB of host memory that each rank holds, by formula. Of a pipeline: the rank that holds
    most."""
    units = rank_units(config, plan)
    return max(rank_state_bytes(config, plan, own)["host"] for own in units) / GIB


def fits_host(config: Config, plan: RunPlan) -> bool:
    """Whether the host has the memory, as far as the machine file states it."""
    memory = plan.machine.device.host_memory_gib
    return memory is None or host_gib(config, plan) <= memory


def check_host_memory(config: Config, plan: RunPlan, ranks: int | None = None) -> None:
    """Raises UserError if a rank needs more memory than the machine file states, or than each of
    `ranks` on this host has. `ranks`: None on another host."""
    memory = plan.machine.device.host_memory_gib
    if memory is None:
        if ranks is None:
            return
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / ranks
    required = host_gib(config, plan)
    if required > memory:
        raise UserError(
            f"machine.device.host_memory_gib: {memory:.3g} for each rank, need {required:.3g} for "
            "partition.offload; take more ranks, or an optimizer sharded further"
        )
