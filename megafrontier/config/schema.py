"""Every option there is, as dataclasses.

The docstring under a field is its documentation: `scripts/config_reference.py` turns this file
into `docs/configuration.md`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

WireFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "delta8", "delta4"]


@dataclass
class RunConfig:
    name: str = "run"
    """Name of the run, also of its folder."""
    directory: str = "runs/${run.name}"
    """Run directory: config, metrics, log, checkpoints, report. Where a run's own config.yaml has
    the default, it follows an override of `run.name`."""
    seed: int = 1234
    """Seed of initial weights, sample order and dropout."""


@dataclass
class RotaryScalingConfig:
    """Llama 3's scaling of rotary positions, by wavelength in tokens: those below original_length /
    high_frequency stay, those above original_length / low_frequency become `factor` times as long,
    and between the two it is interpolated."""

    factor: float = 8.0
    """How many times longer texts are than those that the model was first trained on."""
    low_frequency: float = 1.0
    """Frequencies that turn less often than this within `original_length` are divided whole."""
    high_frequency: float = 4.0
    """Frequencies that turn more often than this are left as they are."""
    original_length: int = 8192
    """Tokens of a sequence in the first training."""


@dataclass
class ModelConfig:
    layers: int = 12
    """Transformer blocks."""
    hidden: int = 768
    """Width of the residual stream."""
    heads: int = 12
    """Query heads; divides `hidden` unless `head_size` is given."""
    kv_heads: int | None = None
    """Key and value heads (grouped-query attention); divides `heads`. Default: `heads`."""
    head_size: int | None = None
    """Width of one head. Default: hidden / heads."""
    ffn_hidden: int | None = None
    """Width inside the MLP. Default: 4 · hidden; with swiglu 8/3 · hidden rounded up to 64."""
    sequence_length: int = 1024
    """Tokens in one sequence."""
    vocab_size: int = 50304
    """Token ids the model knows; at least the tokenizer's but special ones added behind."""
    vocab_multiple: int = 128
    """The embedding's rows are padded up to a multiple of this; padded ids never get any loss."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before attention, MLP and head."""
    norm_eps: float = 1e-5
    """Epsilon of the normalisation."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Non-linearity of the MLP."""
    position: Literal["learned", "rotary"] = "learned"
    """Learned absolute positions (GPT-2) or rotary ones (GPT-NeoX, Llama)."""
    rotary_fraction: float = 1.0
    """Part of each head that rotates, in (0, 1]; GPT-NeoX uses 0.25."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_scaling: RotaryScalingConfig | None = None
    """Rotary frequencies for longer texts, as in Llama 3.1 and 3.2."""
    parallel_residual: bool = False
    """Attention and MLP side by side on the same residual (GPT-NeoX)."""
    tie_embeddings: bool = False
    """The head uses the embedding's matrix (GPT-2)."""
    bias: bool = True
    """Biases in the linear layers of the blocks."""
    dropout: float = 0.0
    """Dropout after the embedding, on attention weights and before each residual sum."""
    init: Literal["gpt2", "neox"] = "gpt2"
    """gpt2: normal(0, init_std), output projections over sqrt(2 · layers). neox: normal(0,
    sqrt(2 / (5 · hidden))), output projections normal(0, 2 / (layers · sqrt(hidden)))."""
    init_std: float = 0.02
    """Standard deviation of `init: gpt2`, and of the learned positions in either."""

    @property
    def head_dim(self) -> int:
        """`head_size`, or its default."""
        return self.head_size or self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        """`kv_heads`, or its default."""
        return self.kv_heads or self.heads

    @property
    def rotary_dims(self) -> int:
        """Number of rotating dimensions in a head; 0 with learned positions."""
        return 0 if self.position == "learned" else round(self.head_dim * self.rotary_fraction)

    @property
    def mlp_hidden(self) -> int:
        """`ffn_hidden`, or its default. With swiglu, both the gate and the up projection have it.

        The default for swiglu keeps the parameter count of a 4 · hidden MLP (Shazeer 2020,
        arXiv:2002.05202), rounded up to a multiple of 64.
        """
        if self.ffn_hidden is not None:
            return self.ffn_hidden
        return (
            -(-8 * self.hidden // (3 * 64)) * 64 if self.activation == "swiglu" else 4 * self.hidden
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the output matrix."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass
class CorpusConfig:
    path: str = ""
    """Prefix of PREFIX.bin and PREFIX.idx."""
    weight: float = 1.0
    """Share of the samples drawn from this corpus, relative to the others'."""


@dataclass
class DataConfig:
    train: list[CorpusConfig] = field(default_factory=list)
    """Corpora to train on, blended by weight."""
    valid: list[CorpusConfig] = field(default_factory=list)
    """Corpora to evaluate on. Empty: the last part of each training corpus, as `split` says."""
    split: list[float] = field(default_factory=lambda: [0.99, 0.01])
    """Parts of each training corpus for training and validation, used when `valid` is empty."""
    document_mask: bool = False
    """Attention and loss do not cross a document's end, and positions restart there. Without a mask
    in memory, unless `model.dropout` is above 0 or a GPU has no such kernel for the heads: the
    log's `attention:` says which."""
    skip: list[list[int]] = field(default_factory=list)
    """Ranges [from, to] of data steps, counted from 0, whose batches are left out (`to` not
    included), for instance after a loss spike; later steps move up."""


@dataclass
class TrainConfig:
    steps: int = 1000
    """Optimizer steps of the whole run."""
    stop_at: int | None = None
    """Stop (with a checkpoint) after this step, though the schedule runs to `steps`."""
    global_batch: int = 8
    """Sequences in one optimizer step, over all ranks."""
    micro_batch: int = 1
    """Sequences one rank runs at a time; the rest is gradient accumulation."""
    precision: Literal["bf16", "fp32", "fp16"] = "bf16"
    """Type of weights and activations in computation; masters, sums and moments are fp32."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    compile: bool = False
    """Compile the blocks (torch.compile, one compilation for all of them); the run says so if there
    is no compiler, and goes on without."""
    activation_checkpointing: Literal["none", "block", "selective", "offload"] = "none"
    """block: keep only each block's input and run the block again in backward. selective: keep the
    results of matrix products and of attention, compute the rest again. offload: as block, the
    inputs in pinned host memory (on a CPU, where that is the same memory: as block)."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time in the loss."""
    nonfinite_limit: int = 10
    """Stop after this many steps in a row with a non-finite loss or gradient (each is skipped);
    those of fp16 that only lower the loss scale do not count."""
    spike_loss: float = 0.0
    """Skip a step whose loss is beyond so many times the median of the last `spike_window` steps;
    0: never."""
    spike_grad_norm: float = 0.0
    """The same for the gradient norm (before clipping)."""
    spike_window: int = 128
    """Steps whose median tells a spike; none is seen before there have been as many."""
    hang_seconds: float = 600.0
    """End the run, with every thread's stack in RUN/hang, when no micro-batch, save or batch of an
    evaluation has finished for so long (start-up and first step: three times as long); 0: never.
    Time for which the whole run is suspended (Ctrl-Z, `scontrol suspend`) does not count, up to a
    minute more than that. All ranks have to come within as long as for start-up, 10 minutes at the
    most."""
    attempts: int = 5
    """Give the run up for good when so many starts in a row have ended by themselves, all from the
    same checkpoint and none with a step more than the first of them, or in a Slurm job before all
    ranks had met; 0: never."""
    gc_every: int = 100
    """Collect Python's garbage after every so many steps, on all ranks at once, and at no other
    time; 0: leave it to Python, which stops each rank at another moment."""
    loss_scale: float = 65536.0
    """First loss scale of fp16; halved at an overflow, doubled after 1000 good steps."""
    deterministic: bool = False
    """Only kernels that give the same bits every time (on a GPU slower; the CPU's always do)."""


@dataclass
class OptimizerConfig:
    name: Literal["adamw"] = "adamw"
    """AdamW with decoupled weight decay."""
    lr: float = 3e-4
    """Learning rate at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    no_decay: list[Literal["norm", "bias", "embedding"]] = field(
        default_factory=lambda: ["norm", "bias", "embedding"]
    )
    """Kinds of parameters without weight decay."""
    fused: Literal["torch", "apex", "none"] = "torch"
    """Whose fused AdamW: torch's, apex's (NVIDIA's or ROCm's, on an accelerator), or none."""


@dataclass
class ScheduleConfig:
    name: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up: to `min_lr`, which the step after the last one
    would have; constant stays at `optimizer.lr`."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    min_lr: float = 0.0
    """Learning rate that the course leads to."""
    decay_fraction: float = 0.2
    """wsd: the last part of the steps, in which the rate falls linearly."""


@dataclass
class WiresConfig:
    preset: Literal["exact", "zero++", "low"] = "exact"
    """exact: the precision everywhere. zero++: weights int8 between nodes, gradients int4 there and
    over the node. low: exact inside the first level; beyond it 4-bit changes of weights (int8 where
    a placement gathers them in every micro-batch), and gradients rotated, int8 in the node and int4
    between nodes; the last level counts as between nodes. `wires: low` is short for
    `wires: {preset: low}`, but leaves nothing of what is said of single wires before."""
    # str and not WireFormat: OmegaConf refuses every value of a dict of literals; `check` looks.
    gather: dict[str, str] = field(default_factory=dict)
    """Format of weights on the wire of each level, over the preset's, `{LEVEL: FORMAT}`: bf16,
    int8, int4, with train.precision fp32 or fp16 this one too, and where weights are published
    delta8, delta4 (their quantised change)."""
    reduce: dict[str, str] = field(default_factory=dict)
    """Format of gradients on the wire of each level, over the preset's: fp32, bf16, int8, int4, and
    fp16 with train.precision fp16. Sums are fp32."""
    rotation: bool | None = None
    """Rotate gradients (block Hadamard) before a low-bit wire. Default: in `low`."""


@dataclass
class PartitionConfig:
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "mics", "hpz", "topo"] | None = None
    """A named placement; topo when neither this nor a placement is given."""
    weights: str | None = None
    """Level through which weights are sharded, or `none`."""
    backward_weights: str | None = None
    """Level of the secondary copy that gathers read from. Default: `weights`, no copy."""
    gradients: str | None = None
    """Level through which gradients are sharded, or `none`."""
    optimizer: str | None = None
    """Level through which masters and optimizer state are sharded, or `none`."""
    wires: WiresConfig = field(default_factory=WiresConfig)
    """Formats on the wires."""
    error_feedback: bool | None = None
    """Add the quantisation error of gradient messages to the next ones, on the levels between
    `gradients` and `optimizer`; where these are one level, on those within it, in each micro-batch,
    which takes up to a full gradient in bf16. Default: with the wires `low`, but where it takes
    that."""
    overlap: Literal["none", "safe", "full"] = "safe"
    """Collectives under computation. none: never. safe: one in flight at a time, for machines on
    which several communicators at once hang (MI250X, ROCm/rccl#2191). full: levels side by side."""
    prefetch: int = 1
    """Units gathered ahead of the one that runs, and full gradients waiting to be reduced; none
    with 0 or `overlap: none`."""
    check_order: bool = False
    """Before each collective the ranks compare what they are about to do, and stop with the first
    rank and unit that differ. Slow; for finding the cause of a hang."""


@dataclass
class CheckpointConfig:
    every: int = 1000
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """Also keep for good each checkpoint whose step is a multiple of this; 0: none."""
    resume: str = "auto"
    """auto: the run's newest whole checkpoint, if any. never: begin new, refused where the run has
    checkpoints. Or the path of a checkpoint at which the run begins (of a run or a folder of them
    the newest); once it has some of its own it goes on from them, unless the path is one of
    these."""
    weights_only: bool = False
    """Of the path in `resume` take the weights alone, and begin at step 0 with a new optimizer, a
    new schedule and the first sample, for instance to fine-tune."""


@dataclass
class EvaluateConfig:
    every: int = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: int = 10
    """Global batches of one evaluation; 0: no evaluation."""


@dataclass
class LogConfig:
    every: int = 10
    """Steps between lines on the terminal and in log.txt (metrics.jsonl has every step)."""
    stragglers_every: int = 100
    """Steps between comparisons of the ranks' own time (without waiting for each other); 0: none.
    A rank that is slow is named in log.txt with its host, once until it has recovered."""
    straggler: float = 1.5
    """A rank is slow beyond so many times the median rank's own time."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases; online goes on offline where it cannot be reached."""
    tensorboard: bool = False
    """Write TensorBoard events into the run directory."""
    trace: bool = False
    """Write the first rank's timeline, one row a level, to trace.json in the run directory (open it
    in ui.perfetto.dev), of its first 200,000 bars. `train --trace` is short for it."""


@dataclass
class LevelConfig:
    size: int | None = None
    """How many groups of the next faster level (ranks, on the first one) a group of this level
    holds. Only the outermost level may leave it open."""
    gigabytes_per_second: float | None = None
    """Bandwidth of one rank over this level, one direction: what the pre-flight measures by."""


@dataclass
class DeviceConfig:
    name: str = "any"
    """any: an accelerator where there is one. cpu: the CPU, whatever else there is. Or an
    accelerator's name: then a launcher's ranks must find one."""
    memory_gib: float | None = None
    """Memory of one device. In the pre-flight a host fails where less than 90 % of it is free
    (on a CPU: installed); a run whose state, buffers and blocks' inputs on a rank are more than all
    of it is refused."""
    peak_tflops: float | None = None
    """Dense peak of one device for MFU; unknown: no MFU. Of an accelerator that in 16 bits: no MFU
    either where it trains in fp32, or a CPU stands in for it."""
    ranks_per_host: int | None = None
    """Ranks that Slurm or torchrun must start on each host; unknown: not checked."""

    @property
    def is_accelerator(self) -> bool:
        """Whether `name` says that each rank has an accelerator."""
        return self.name not in ("any", "cpu")

    def is_stood_in_for_by(self, kind: str) -> bool:
        """Whether what computes, a device of torch's type `kind`, is a CPU in an accelerator's
        place, as in a rehearsal of Frontier on a laptop."""
        return kind == "cpu" and self.is_accelerator


@dataclass
class MachineConfig:
    levels: dict[str, LevelConfig] = field(default_factory=dict)
    """Levels, fastest link first."""
    device: DeviceConfig = field(default_factory=DeviceConfig)


@dataclass
class PreflightConfig:
    enabled: bool = True
    """Before the first step, try devices, links, storage and clocks on every rank; hosts that fail
    are named, and written to bad-nodes.txt in the run directory."""
    slow_link: float = 0.25
    """A link is slow below this part of the machine file's rate; where that states none, of the
    median over all ranks. (Not looked at where it states none of one host.)"""
    if_slow: Literal["warn", "fail"] = "warn"
    """What a slow link does to the run."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: str = "bytes"
    """SentencePiece file, Hugging Face tokenizer folder or name, `bytes`, or `none` (no text)."""
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    machine: Any = "laptop"
    """A name from configs/machines, the path of a machine file, or levels and device inline."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    log: LogConfig = field(default_factory=LogConfig)
