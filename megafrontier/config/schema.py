"""Every option, as dataclasses.

The docstring under a field is its entry in `docs/configuration.md`, which
`scripts/config_reference.py` writes. Checks of several fields at once are in `validation.py`. The
options of a model are in `model/`, of data in `data.py`, of the optimizer in `optimizer.py`, of
placements and splits in `layout.py`, and of a machine file in `machine.py`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from megafrontier.config.data import DataConfig
from megafrontier.config.fields import bounded, count, marked, section
from megafrontier.config.layout import ParallelConfig, PartitionConfig
from megafrontier.config.model.gpt import ModelConfig
from megafrontier.config.optimizer import OptimizerConfig, ScheduleConfig
from megafrontier.config.sites import SitesConfig

CheckpointingMode = Literal["none", "block", "selective", "offload"]


@dataclass
class RunConfig:
    name: str = "run"
    """Name of the run and of its folder."""
    directory: str = "runs/${run.name}"
    """Run directory, for config, metrics, log, checkpoints and report. The default in a run's own
    config.yaml follows an override of `run.name`."""
    seed: int = bounded(1234, "samples", at_least=0)
    """Seed of initial weights, sample order and dropout."""
    spare_nodes: int = bounded(0, at_least=0)
    """Nodes that a job of slurm/train.sbatch has beyond those that train, so that the ranks start
    again in the same job when a node is lost (see frontier.md#when-something-fails)."""


@dataclass
class BatchWarmupConfig:
    """A batch that grows, in equal increments at equal distances."""

    start: int = count(8)
    """Sequences in the first step."""
    step_by: int = count(8)
    """Sequences by which the batch grows, until it is `train.global_batch`. Both this and `start`
    must be multiples of what all ranks process at a time."""
    until: int = count(1000)
    """The first step with the whole `train.global_batch`, counted from 0."""


@dataclass
class TrainConfig:
    steps: int = count(1000, "report")
    """Optimizer steps of the whole run."""
    stop_at: int | None = None
    """Stop with a checkpoint after this step. The learning rate schedule still spans `steps`."""
    global_batch: int = count(8, "batch")
    """Sequences in one optimizer step, over all ranks."""
    batch_warmup: BatchWarmupConfig | None = marked(None, "batch")
    """Begin with a smaller batch. null: no. See also `schedule.by`."""
    micro_batch: int = count(1)
    """Sequences that one rank processes at a time. The rest is gradient accumulation."""
    precision: Literal["bf16", "fp32", "fp16"] = marked("bf16", "report")
    """Type of weights and activations. Master weights, sums and optimizer state are fp32."""
    linear_precision: Literal["fp8"] | None = marked(None, "report")
    """fp8: in training, the linear layers of blocks multiply in float8, forward and backward, on
    devices that have it (see performance.md#training-in-float8). Experts, routers and the head keep
    `precision`, which must be bf16. null: they all keep it."""
    clip_grad_norm: float = bounded(1.0, "report", at_least=0)
    """Maximum global gradient norm; 0: no clipping."""
    compile: bool = False
    """Compile the blocks with torch.compile. Without a working compiler the run only warns."""
    cuda_graphs: bool = False
    """On a GPU, launch the kernels of a compiled block as one CUDA or HIP graph, so that the host
    keeps up with small models. It needs `compile`, data parallelism alone, no
    `data.document_mask`, and activation checkpointing none or selective. The graphs have memory of
    their own. Experimental: it has not run on a GPU yet."""
    activation_checkpointing: (
        Literal["none", "block", "selective", "offload", "auto"] | list[CheckpointingMode]
    ) = "none"
    """block: save only each block's input and recompute the block in backward. selective: save the
    results of matrix products and attention, recompute the rest. offload: as block, with the inputs
    in pinned host memory (on a CPU the same as block). auto: none, selective or block for each
    block, so that a rank needs `memory_gib` at most and recomputes as little as possible. A list
    has the mode of each block."""
    memory_gib: float | None = bounded(None, above=0)
    """With `activation_checkpointing: auto`: the most memory that all tensors of a rank may need.
    Default: what `machine.device.reserved_gib` leaves of `machine.device.memory_gib`."""
    loss_chunk_tokens: int = count(1024)
    """Number of tokens whose logits exist at the same time in the loss."""
    z_loss: float = bounded(0.0, "report", at_least=0)
    """Coefficient of the z-loss, the square of the log of the sum of the exponentials of a token's
    logits, which keeps logits from drifting (PaLM: 1.0e-4). metrics.jsonl has it as `z_loss`, and
    `loss` stays the cross-entropy. 0: none."""
    nonfinite_limit: int = count(10)
    """Stop after this many consecutive steps with a non-finite loss or gradient. Each such step is
    skipped. fp16 steps that only lower the loss scale do not count."""
    spike_loss: float = marked(0.0, "report")
    """Skip a step whose loss is above this factor times the median of the last `spike_window`
    steps; 0: never."""
    spike_grad_norm: float = marked(0.0, "report")
    """The same for the gradient norm before clipping; 0: never."""
    spike_window: int = bounded(128, "report", at_least=1, at_most=1_000_000)
    """Steps in the median that spikes are compared with. No step is skipped before that many."""
    hang_seconds: float = bounded(600.0, at_least=0)
    """End the run, with all stacks in RUN/hang, if no micro-batch, save or evaluation batch has
    finished for this long (three times as long during start-up and the first step); 0: never. Time
    while the whole run is suspended (Ctrl-Z, `scontrol suspend`) for less than this does not count.
    The ranks must also meet within the time for start-up, at most 10 minutes."""
    attempts: int = bounded(5, at_least=0)
    """Stop restarting after this many consecutive starts without progress: all from the same
    checkpoint and none with a new step, or in a Slurm job before all ranks had met; 0: never."""
    gc_every: int = bounded(100, at_least=0)
    """Run Python's garbage collector every this many steps, on all ranks at once, and never in
    between; 0: leave it to Python, which pauses each rank at a different moment."""
    # fp16 ends at 65504. A scale that fp32 cannot hold would be infinite, and so would its halves.
    loss_scale: float = bounded(65536.0, above=0, at_most=2**32)
    """Initial loss scale of fp16. It is halved at an overflow and doubled after 1000 good steps."""
    elastic: bool = False
    """In a Slurm job: if nodes are lost and no spare ones are left, go on over the most on which
    the layout can run, and over more when they are back (see frontier.md#when-something-fails).
    The global batch stays. It need not divide over the ranks: some then have a micro-batch of
    padding."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time (slower on a GPU; a CPU's always do)."""


@dataclass
class SnapshotConfig:
    """Snapshots in the memory of the nodes, or on their own disks (checkpoint-format.md)."""

    every: int = bounded(0, at_least=0)
    """Steps between snapshots, from which a start after a failure goes on without the storage; 0:
    none. If the one before is still being written, or copied to another node, a snapshot is left
    out."""
    folder: str = "auto"
    """Where each node keeps them. auto: the first of /dev/shm, $MEGAFRONTIER_SNAPSHOT_DISK (which
    slurm/train.sbatch sets to the cluster's node_disk), $SLURM_TMPDIR and $TMPDIR that has room; in
    memory they take at most 40 % of the host's. Or the absolute path of a folder on each node."""
    copies: int = bounded(1, at_least=0, at_most=1)
    """Copies of each shard on another node, so that a lost node costs no more than a lost process.
    A run on one node has none."""


@dataclass
class CheckpointConfig:
    every: int = bounded(1000, at_least=0)
    """Steps between checkpoints; 0: none by steps. The last step, and a step after which the run
    stops, are saved anyway."""
    minutes: float = bounded(30.0, at_least=0)
    """Minutes after which a checkpoint is saved, by the clock of rank 0, if `every` has not come
    first; 0: none by time. It is saved a step later. If the one before is still being written, the
    next follows that. Saving folds the errors of error feedback, so with these and
    `train.deterministic` only `every` counts."""
    keep: int = bounded(2, at_least=0)
    """Number of newest checkpoints to keep; 0: all. Older ones are deleted behind the steps."""
    keep_every: int = bounded(0, at_least=0)
    """Also keep each checkpoint whose step is a multiple of this, for which `every` should divide
    it; 0: none."""
    asynchronous: bool = True
    """Write checkpoints behind the next steps. Training waits only while each rank copies its
    shards to host memory, which needs room for one such copy. The last step, and a step after which
    the run stops, are saved at once. A checkpoint that is still being written when the next one is
    due is waited for."""
    resume: str = "auto"
    """auto: the run's newest complete checkpoint, if any. never: start from scratch, refused if the
    run has checkpoints. Or the path of a checkpoint to start from (of a run or a folder of
    checkpoints: the newest). A run with checkpoints of its own continues from them, unless the path
    is one of them."""
    weights_only: bool = False
    """Load only the weights of the path in `resume`, and start at step 0 with a new optimizer, a
    new schedule and the first sample, for example to fine-tune."""
    local: SnapshotConfig = field(default_factory=SnapshotConfig)
    """Snapshots near the ranks, between two checkpoints."""


@dataclass
class EvaluateConfig:
    every: int = bounded(0, at_least=0)
    """Steps between evaluations; 0: evaluate only at the end."""
    batches: int = bounded(10, at_least=0)
    """Global batches of one evaluation; 0: no evaluation."""
    average: int = bounded(0, at_least=0)
    """Also evaluate the average of the weights at this number of newest evaluations, as
    `average_valid_loss`; 0: none. Each rank keeps copies of its shards in host memory. A run that
    resumes begins without copies. `checkpoint average` makes a checkpoint of such weights."""
    tasks: list[str] = field(default_factory=list)
    """Tasks or groups of tasks of lm-evaluation-harness, evaluated with the model as it is sharded
    (pip install megafrontier[evaluate]). metrics.jsonl has the results under `tasks`."""
    tasks_every: int = bounded(0, at_least=0)
    """Steps between evaluations of the tasks; 0: only at the end."""
    tasks_limit: int | None = count(None)
    """Documents of each task that are used, from the first one on. Default: all."""
    tasks_path: str | None = None
    """Folder of task files (YAML) of your own."""


@dataclass
class LogConfig:
    every: int = count(10)
    """Steps between lines on the terminal and in log.txt (metrics.jsonl has every step)."""
    tensor_norms: int = bounded(0, at_least=0)
    """Steps between measurements of norms by kind of parameter and by block, of gradients and of
    updates, and of a bound of attention's logits (watching.md#what-a-step-measures); 0: none. An
    update is measured with a copy of the masters that are updated at the same time."""
    stragglers_every: int = bounded(100, at_least=0)
    """Steps between comparisons of the ranks' own time (without waiting); 0: never. log.txt names
    a slow rank and its host, once until it has recovered."""
    straggler: float = bounded(1.5, above=1)
    """A rank is slow if its own time is above this factor times the median of all ranks."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases. online continues offline if the service cannot be reached."""
    wandb_project: str = "megafrontier"
    """Project of the run, or ENTITY/PROJECT to name its owner, too."""
    tensorboard: bool = False
    """Write TensorBoard events into the run directory."""
    mlflow: str = ""
    """URI of an MLflow tracking server. Metrics are sent to it in the background. Empty: none."""
    trace: bool = False
    """Write a timeline of the first rank, with the first 200,000 events, to trace.json in the run
    directory (open it in ui.perfetto.dev). `train --trace` is short for it."""
    callbacks: list[str] = field(default_factory=list)
    """Your own classes, as `package.Class`, called around the steps of a run: subclasses of
    `megafrontier.training.callbacks.base.Callback`. They may record metrics and keep state."""


@dataclass
class PreflightConfig:
    enabled: bool = True
    """Before the first step, test devices, links, storage and clocks on every rank. Hosts that fail
    are named, and written to bad-nodes.txt in the run directory."""
    slow_link: float = bounded(0.25, at_least=0)
    """A link is slow below this fraction of the machine file's bandwidth, or of the median over all
    ranks if the file has none. (Links within one host are not tested if the file has none.)"""
    if_slow: Literal["warn", "fail"] = "warn"
    """What to do about a slow link."""


@dataclass
class Config:
    run: RunConfig = section(RunConfig, "ignore")
    model: ModelConfig = section(ModelConfig, "refuse")
    tokenizer: str = marked("bytes", "samples")
    """SentencePiece file, Hugging Face tokenizer folder or name, `bytes`, or `none` (no text)."""
    data: DataConfig = section(DataConfig, "ignore")
    train: TrainConfig = section(TrainConfig, "ignore")
    optimizer: OptimizerConfig = section(OptimizerConfig, "report")
    schedule: ScheduleConfig = section(ScheduleConfig, "report")
    machine: Any = marked("laptop", "ignore")
    """A name from configs/machines, the path of a machine file, or levels and device inline."""
    partition: PartitionConfig = section(PartitionConfig, "ignore")
    parallel: ParallelConfig = section(ParallelConfig, "ignore")
    sites: SitesConfig | None = marked(None, "ignore")
    """Train one model at several sites, each of which is a job of its own. null: at one."""
    checkpoint: CheckpointConfig = section(CheckpointConfig, "ignore")
    evaluate: EvaluateConfig = section(EvaluateConfig, "ignore")
    preflight: PreflightConfig = section(PreflightConfig, "ignore")
    log: LogConfig = section(LogConfig, "ignore")

    @property
    def checkpointing(self) -> list[CheckpointingMode]:
        """The mode of activation checkpointing of each trained block. With `auto`, before the
        planner has chosen: `block`."""
        given = self.train.activation_checkpointing
        if isinstance(given, list):
            return given
        return ["block" if given == "auto" else given] * self.model.trained_layers

    @property
    def needs_planner(self) -> bool:
        """Whether the planner is to choose anything before the ranks start."""
        return self.has_auto_layout or self.train.activation_checkpointing == "auto"

    @property
    def has_auto_layout(self) -> bool:
        """Whether the planner is to choose the placement or the splits."""
        parallel = self.parallel
        return "auto" in (self.partition.strategy, parallel.tensor, parallel.expert)
