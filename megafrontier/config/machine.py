"""What a machine file says: the levels of links, and the device of a rank."""

from dataclasses import dataclass, field

from megafrontier.config.fields import bounded


@dataclass
class LevelConfig:
    size: int | None = bounded(None, at_least=1)
    """Groups of the next faster level (ranks, on the first one) in a group of this level. Only the
    outermost level may leave it open."""
    gigabytes_per_second: float | None = bounded(None, above=0)
    """Bandwidth of one rank over this level that collectives reach, in one direction. The preflight
    compares with it, and `plan` computes with it."""
    line_gigabytes_per_second: float | None = bounded(None, above=0)
    """The same by the data sheet. Collectives reach a part of it: `probe` says which part, and is
    surprised by more."""
    latency_microseconds: float = bounded(10.0, at_least=0)
    """What a message over this level takes before its first byte arrives. For `plan`."""
    slows_compute: float = bounded(0.0, at_least=0)
    """Seconds that computing loses for each second of a collective over this level that runs
    beside it. 0: nothing; 0.16: computing takes 19 % longer meanwhile; 1: the two take turns; more:
    they hinder each other. `probe` measures it. For `plan`, whose choice of `partition.overlap`
    follows from it."""


@dataclass
class DeviceConfig:
    name: str = "any"
    """any: an accelerator if there is one. cpu: the CPU even if there is an accelerator. Otherwise
    an accelerator's name, and ranks started by a launcher must find one."""
    memory_gib: float | None = bounded(None, above=0)
    """Memory of one device. A run is refused if the state, buffers and block inputs of a rank need
    more of it than `reserved_gib` leaves, and the preflight refuses a host with less than that free
    (on a CPU: installed)."""
    reserved_gib: float | None = bounded(None, at_least=0)
    """GiB of a device that layouts leave free: for the framework, communicators and holes of the
    allocator. Default: 1, 0.1 for each communicator of a rank and 4 % of `memory_gib`; on a CPU
    10 % of `memory_gib`."""
    host_memory_gib: float | None = bounded(None, above=0)
    """Memory of the host for each rank. A run is refused if the state that `partition.offload`
    keeps there exceeds it. Default: what this host has, divided by the ranks on it."""
    peak_tflops: float | None = bounded(None, above=0)
    """Dense peak of one device in 16 bits, for MFU, also with `train.linear_precision`. There is no
    MFU without it, for fp32 training on an accelerator, and if a CPU stands in for an
    accelerator."""
    matrix_tflops: float | None = bounded(None, above=0)
    """Dense rate that matrix products reach in training in 16 bits (on a CPU: in fp32). For `plan`;
    default: 42 % of `peak_tflops`."""
    line_matrix_tflops: float | None = bounded(None, above=0)
    """The same of large square products alone, as `probe` measures it. In training, shapes are less
    favourable and a device has less power."""
    memory_gigabytes_per_second: float | None = bounded(None, above=0)
    """Bytes that elementwise operations read and write. For `plan`."""
    host_link_gigabytes_per_second: float = bounded(25.0, above=0)
    """Bandwidth between a device and its host, in one direction. For `plan` with
    `partition.offload`."""
    host_memory_gigabytes_per_second: float = bounded(50.0, above=0)
    """Bytes that a rank's cores read and write while they update offloaded masters. For `plan`."""
    launch_microseconds: float = bounded(5.0, at_least=0)
    """What the host needs to start one operation. For `plan`."""
    ranks_per_host: int | None = bounded(None, above=0)
    """Ranks that Slurm or torchrun must start on each host. Default: not checked."""

    @property
    def is_accelerator(self) -> bool:
        """Whether `name` says that each rank has an accelerator."""
        return self.name not in ("any", "cpu")

    def is_stood_in_for_by(self, kind: str) -> bool:
        """Whether the device in use, of torch's type `kind`, is a CPU although `name` is an
        accelerator, as in a rehearsal of Frontier on a laptop."""
        return kind == "cpu" and self.is_accelerator


@dataclass
class StorageConfig:
    """The file system of checkpoints. For `plan --mtbf`."""

    host_gigabytes_per_second: float = bounded(2.0, above=0)
    """What one host writes, while all do."""
    gigabytes_per_second: float | None = bounded(None, above=0)
    """What all hosts write together, at most; default: no limit."""
    latency_seconds: float = bounded(1.0, at_least=0)
    """How long the steps wait for a checkpoint besides its copies in host memory: ranks agree, and
    files are created."""


@dataclass
class MachineConfig:
    levels: dict[str, LevelConfig] = field(default_factory=dict)
    """Levels, fastest link first."""
    device: DeviceConfig = field(default_factory=DeviceConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
