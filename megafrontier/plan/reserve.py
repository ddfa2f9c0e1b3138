"""How much of a device a layout may fill, and what it leaves.

Note [Reserve]
A rank's tensors are counted to the byte, but a device also holds what no tensor is. Without
`machine.device.reserved_gib` an accelerator keeps free:

    context        1 GiB: the driver's context, loaded kernels, workspaces of matrix products
    communicators  0.1 GiB each: 16 channels with a receive buffer of 4 MiB (NCCL_BUFFSIZE), and
                   those of the protocols for short messages
    holes          4 % of the device: blocks of the caching allocator that no tensor fills

These are assumptions; a run logs what it reached (`memory_gib` of metrics.jsonl). On a CPU 10 % of
`memory_gib` stay free, for the system.
"""

from dataclasses import dataclass

from megafrontier.config.machine import DeviceConfig
from megafrontier.model.moe.experts import EXPERT_AXES
from megafrontier.parallel.mesh import AXES, DATA_PARALLEL
from megafrontier.plan.resolve import RunPlan

CONTEXT_GIB = 1.0
COMMUNICATOR_GIB = 0.1
HOLES = 0.04
"""Share of the device."""
HOST = 0.1
"""Share of a host's memory, if the host is what computes."""


@dataclass(frozen=True)
class Reserve:
    """GiB of a device that tensors leave, by what takes them."""

    parts: dict[str, float]

    @property
    def gib(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gib:.3g}" for name, gib in self.parts.items())
        return f"{self.gib:.3g} GiB reserved ({parts})"

    @classmethod
    def of_device(cls, device: DeviceConfig, communicators: int = 0) -> "Reserve":
        """Of one device with so many communicators (Note [Reserve])."""
        if device.reserved_gib is not None:
            return cls({"machine.device.reserved_gib": device.reserved_gib})
        memory = device.memory_gib or 0.0
        if not device.is_accelerator:
            return cls({"system": HOST * memory})
        return cls(
            {
                "context": CONTEXT_GIB,
                f"{communicators} communicators": COMMUNICATOR_GIB * communicators,
                "holes": HOLES * memory,
            }
        )

    @classmethod
    def of(cls, plan: RunPlan) -> "Reserve":
        """Of each rank of a plan."""
        return cls.of_device(plan.machine.device, communicators(plan))


def usable_gib(plan: RunPlan) -> float | None:
    """The most GiB that the tensors of a rank may need: what `Reserve` leaves of the device. None
    if the machine file does not state its memory.

    `train`, `--dry-run`, `plan`, `auto` and the preflight all go by it.
    """
    memory = plan.machine.device.memory_gib
    return None if memory is None else max(0.0, memory - Reserve.of(plan).gib)


def communicators(plan: RunPlan) -> int:
    """How many a rank makes: one for each set of peers with which it has collectives, and one a
    level for the control plane."""
    shape, splits = plan.shape, plan.shape.splits
    axes: list[tuple[str, ...]] = [DATA_PARALLEL]
    axes += [("context", "data"), ("tensor",)] * (splits.tensor > 1)
    axes += [("context",)] * (splits.context > 1)
    axes += [("pipeline",)] * (splits.pipeline > 1)
    axes += [EXPERT_AXES] * (splits.expert > 1)
    peers = {ranks for over in axes for ranks in shape.peers(0, over) if len(ranks) > 1}
    if splits.expert > 1:
        found = shape.joined_peers(0, ("expert",), plan.joined)
        peers |= {ranks for ranks in found if len(ranks) > 1}
    if splits.pipeline > 1:
        peers.add(shape.pipeline_ranks(0))
    return len(peers) + sum(len(ranks) > 1 for ranks in shape.peers(0, AXES))
