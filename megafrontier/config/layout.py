"""Where state and work lie: placements, wires and splits."""

from dataclasses import dataclass, field
from typing import Literal

from megafrontier.config.fields import bounded, count

WireFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "delta8", "delta4"]


@dataclass
class WiresConfig:
    preset: Literal["exact", "zero++", "low"] = "exact"
    """exact: `train.precision` everywhere. zero++: weights int8 between nodes, gradients int4
    between nodes and within the node. low: exact within the first level; beyond it weights as 4-bit
    deltas (int8 where the placement gathers them in every micro-batch) and rotated gradients, int8
    in the node and int4 between nodes. The last level counts as between nodes. `wires: low` is
    short for `wires: {preset: low}`, but discards formats given before it for single levels."""
    # str and not WireFormat, because a dict of literals is no dict of str; validation.py checks.
    gather: dict[str, str] = field(default_factory=dict)
    """Format of weights on the wire of each level, `{LEVEL: FORMAT}`, over the preset's: bf16,
    int8, int4, `train.precision` fp32 or fp16, and where weights are published also delta8 and
    delta4 (their quantized change)."""
    reduce: dict[str, str] = field(default_factory=dict)
    """Format of gradients on the wire of each level, over the preset's: fp32, bf16, int8, int4, and
    fp16 with train.precision fp16. Sums are fp32."""
    activations: dict[str, str] | Literal["auto"] = field(default_factory=dict)
    """Format of activations and of their gradients on the wire of each level that tensor or context
    parallelism or a pipeline crosses, `{LEVEL: FORMAT}`: bf16 or int8 (one scale for 256 elements).
    Sums are fp32, and what the loss exchanges keeps its type. Default: `train.precision`. auto:
    int8 on the slowest level between the stages of a pipeline, by the machine file's
    `gigabytes_per_second`."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Format of tokens on their way to experts and back, and of their gradients, on the wire of
    each level that expert parallelism crosses, `{LEVEL: FORMAT}`: bf16 or int8 (one scale for 256
    elements). Sums are fp32. Default: `train.precision`."""
    rotation: bool | None = None
    """Rotate gradients (block Hadamard) before a low-bit wire. Default: true with `low`."""


@dataclass
class ExpertsPartitionConfig:
    """What experts have in place of the keys of `partition`."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3", "mics", "hpz", "topo"] | None = None
    """A named placement. Default: that of the other parameters."""
    weights: str | None = None
    """As `partition.weights`."""
    backward_weights: str | None = None
    """As `partition.backward_weights`."""
    gradients: str | None = None
    """As `partition.gradients`."""
    optimizer: str | None = None
    """As `partition.optimizer`."""
    wires: WiresConfig | None = None
    """Wire formats. Default: those of the other parameters."""


@dataclass
class OffloadConfig:
    optimizer: Literal["none", "cpu"] = "none"
    """cpu: masters and the states of the optimizer are in host memory, where AdamW, SGD or Muon
    runs on the rank's cores; Muon's matrices cross to the device for its iterations. A gradient
    shard crosses to the host while backward goes on; new weights, in `train.precision`, cross to
    the device under the next forward. The numbers are the same."""


@dataclass
class PartitionConfig:
    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3", "mics", "hpz", "topo"] | None = None
    """A named placement. topo if neither this nor a placement is given. auto: the placement that
    `plan` predicts to be the fastest is chosen at start."""
    weights: str | None = None
    """Level through which weights are sharded, or `none`."""
    backward_weights: str | None = None
    """Level of the secondary copy that gathers read from. Default: `weights`, no copy."""
    gradients: str | None = None
    """Level through which gradients are sharded, or `none`."""
    optimizer: str | None = None
    """Level through which master weights and optimizer state are sharded, or `none`."""
    weights_copy: bool = True
    """Keep a copy of the weights in `train.precision` beside the fp32 masters. With false, the
    weights of a block are cast from the masters whenever it runs, and are released afterwards. That
    takes 2 bytes an element less, and a cast in each forward and backward. It needs `weights` (and
    `backward_weights`) and `optimizer` sharded through the same levels, or a single device."""
    wires: WiresConfig = field(default_factory=WiresConfig)
    """Wire formats."""
    experts: ExpertsPartitionConfig | None = None
    """Placement and wires of the experts of `model.moe`. Default: as the other parameters."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """States in host memory instead of the device's."""
    error_feedback: bool | None = None
    """Add the quantization error of a gradient message to the next one, on the levels between
    `gradients` and `optimizer`. If the two are the same level: on the levels within it, in every
    micro-batch, which takes up to a full gradient in bf16. Default: true with the wires `low`,
    unless it takes that memory."""
    overlap: Literal["none", "safe", "full"] = "safe"
    """Overlap of collectives with computation. none: none. safe: one collective in flight, because
    several communicators at once hang on MI250X (ROCm/rccl#2191). full: one per level."""
    overlap_update: bool = False
    """Let AdamW or SGD update each unit's masters under the next forward, on a stream of its own,
    just before the unit's weights are published. A unit's gradient shard stays until then. The
    numbers are the same. With `offload` this is always so. Muon's matrices are updated at once."""
    prefetch: int = bounded(1, at_least=0)
    """Units gathered ahead of the one that runs, and full gradients that wait for their reduction.
    None with 0 or `overlap: none`."""
    check_order: bool = False
    """Compare each collective over all ranks before it starts, and stop with the first rank and
    unit that differ. Slow; for finding the cause of a hang."""


@dataclass
class ParallelConfig:
    tensor: int | str = bounded(1, at_least=1)
    """Ranks that share each matrix, and between matrices the tokens: the innermost. `auto`
    (`parallel: auto` for short): the number that `plan` predicts to be the fastest, and with it
    every split that is 1. A number, which must fill each level before it enters the next, or a
    level's name: all ranks up to that level that no inner split takes. Ranks that no split takes
    are data-parallel."""
    context: int | str = bounded(1, at_least=1)
    """Ranks that share each sequence: the next after `tensor`. Twice the number must divide
    `model.sequence_length`."""
    expert: int | str = bounded(1, at_least=1)
    """Ranks that share the experts of a block: the innermost of the context and data-parallel
    ranks. Must divide `model.moe.experts`. A token crosses each level once for each group of ranks
    beyond it that has some of its experts. `auto` as for `tensor`; `parallel: auto` chooses all,
    unless a number of ranks above 1 is given here."""
    token_pieces: int = count(1)
    """`expert`: pieces in which the tokens of a micro-batch move to their experts and back. While
    the experts process one piece, the next is on its way, and so are the results of the one
    before. Only with `partition.overlap`."""
    dispatch: Literal["auto", "levels", "flat"] = "auto"
    """`expert`: how tokens move to their experts and back. levels: over one level after the other,
    which sends the fewest rows over slow levels. flat: over all levels at once, as over the
    outermost, with the fewest messages. auto: neighbouring levels are one if the machine file gives
    the outer one at least half the `gigabytes_per_second` of the inner one."""
    pipeline: int | str = bounded(1, at_least=1)
    """Ranks that share the blocks: the outermost. A number fills the levels from outside; a level's
    name stands for all ranks from the outermost level down to it."""
    stages_per_rank: int = count(1)
    """Stages of a pipeline on each rank: at least 2 for `interleaved`, 1 or 2 for `zero_bubble`."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the forwards and backwards of a pipeline. `zero_bubble` computes the gradients of
    weights when a rank would wait: ZB-H1, or ZB-V with two stages per rank."""
    layers: list[int] = field(default_factory=list, metadata={"at_least": 1})
    """Blocks of each stage, first stage first. Empty: divided so that the most expensive stage,
    with the embedding or the head, costs least."""
