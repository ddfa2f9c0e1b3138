"""Every option, in one place: dataclasses, YAML with inheritance, `key=value` overrides, checks.

The docstring under a field is its documentation: `scripts/config_reference.py` turns this file
into `docs/configuration.md`. Values that depend on another part of the program (placements on a
machine's levels, the vocabulary of a tokenizer) are checked by that part, still before any
process group starts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megafrontier.errors import UserError

WireFormat = Literal["fp32", "bf16", "fp16"]


@dataclass
class RunConfig:
    name: str = "run"
    """Name of the run, also of its folder."""
    directory: str = "runs/${run.name}"
    """Run directory: config, metrics, log, checkpoints, report."""
    seed: int = 1234
    """Seed of initial weights, sample order and dropout."""


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
    """Token ids the model knows; at least the tokenizer's."""
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
    """Attention and loss do not cross a document's end, and positions restart there."""
    skip: list[list[int]] = field(default_factory=list)
    """Ranges [from, to] of steps whose batches are left out (`to` not included), for instance
    after a loss spike; later steps move up."""


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
    activation_checkpointing: Literal["none", "block"] = "none"
    """block: keep only each block's input and run the block again in backward."""
    loss_chunk_tokens: int = 1024
    """Tokens whose logits exist at one time in the loss."""
    nonfinite_limit: int = 10
    """Stop after this many steps in a row with a non-finite loss or gradient (each is skipped)."""
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
    fused: Literal["torch", "apex", "off"] = "torch"
    """Whose fused AdamW: torch's, apex's (NVIDIA's or ROCm's, on an accelerator), or none."""


@dataclass
class ScheduleConfig:
    name: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up, to `min_lr` at `train.steps`."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end."""
    decay_fraction: float = 0.2
    """wsd: the last part of the steps, in which the rate falls linearly."""


@dataclass
class WiresConfig:
    gather: dict[str, WireFormat] = field(default_factory=dict)
    """Format of weights on the wire of each level, `{LEVEL: FORMAT}`. Default: the precision."""
    reduce: dict[str, WireFormat] = field(default_factory=dict)
    """Format of gradients on the wire of each level. Default: the precision. Sums are fp32."""


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


@dataclass
class CheckpointConfig:
    every: int = 1000
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of every such step are kept for good; 0: none."""
    resume: str = "auto"
    """auto: the run's newest whole checkpoint, if any. never. Or the path of a checkpoint."""


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
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard events into the run directory."""


@dataclass
class LevelConfig:
    size: int | None = None
    """Units of the level below joined by this level; the outermost level may leave it open."""
    gigabytes_per_second: float | None = None
    """Bandwidth of one rank over this level, one direction."""


@dataclass
class DeviceConfig:
    name: str = "cpu"
    """Name of the device, for logs."""
    memory_gib: float | None = None
    """Memory of one device."""
    peak_tflops: float | None = None
    """Dense peak of one device in the training precision, for MFU; unknown: no MFU."""
    ranks_per_host: int | None = None
    """Ranks that Slurm or torchrun must start on each host; unknown: not checked."""


@dataclass
class MachineConfig:
    levels: dict[str, LevelConfig] = field(default_factory=dict)
    """Levels, fastest link first."""
    device: DeviceConfig = field(default_factory=DeviceConfig)


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: str = "bytes"
    """SentencePiece file, Hugging Face tokenizer folder or name, or `bytes`."""
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    machine: Any = "laptop"
    """A name from configs/machines, the path of a machine file, or levels and device inline."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, the files it inherits from, and `key=value` overrides into a Config.

    Raises UserError for a missing file, broken YAML, unknown keys, wrong types, and values that
    do not fit each other.
    """
    merged = _read_yaml(Path(path), ())
    for override in overrides:
        merged = OmegaConf.merge(merged, _parse_override(override))
    config = _structure(Config, merged, f"{path}")
    check(config)
    return config


def config_from_dict(values: dict[str, Any], origin: str) -> Config:
    """The Config saved by `config_to_dict`; `origin` names its file in errors."""
    return _structure(Config, OmegaConf.create(values), origin)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain containers that YAML and JSON can hold."""
    return asdict(config)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as YAML."""
    OmegaConf.save(OmegaConf.create(config_to_dict(config)), path)


def load_machine(machine: Any) -> MachineConfig:
    """The machine that `config.machine` names, points to or spells out.

    Raises UserError when there is no such file or it does not describe levels and a device.
    """
    if isinstance(machine, dict):
        return _check_machine(_structure(MachineConfig, OmegaConf.create(machine), "machine"))
    found = [p for p in _machine_files(str(machine)) if p.is_file()]
    if not found:
        known = sorted({p.stem for d in _machine_folders() for p in d.glob("*.yaml")})
        raise UserError(f"machine: no machine {machine!r}; give a path or one of {known}")
    return _check_machine(_structure(MachineConfig, _read_yaml(found[0], ()), str(found[0])))


def _check_machine(machine: MachineConfig) -> MachineConfig:
    if not 1 <= len(machine.levels) <= 5:
        raise UserError(f"machine.levels: {len(machine.levels)} levels, need 1 to 5")
    for name, level in machine.levels.items():
        if level.size is not None and level.size < 1:
            raise UserError(f"machine.levels.{name}.size: {level.size}, need at least 1")
    return machine


def _machine_folders() -> list[Path]:
    shipped = Path(__file__).resolve().parent.parent / "configs" / "machines"
    return [Path("configs/machines"), shipped]


def _machine_files(name: str) -> list[Path]:
    return [Path(name), *(folder / f"{name}.yaml" for folder in _machine_folders())]


def _read_yaml(path: Path, children: tuple[Path, ...]) -> DictConfig:
    """One file merged over the one that its `defaults` key names, relative to it."""
    if path.resolve() in children:
        raise UserError(f"{path}: defaults: the files inherit from each other in a circle")
    try:
        values = OmegaConf.load(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read the config: {error.strerror}") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, DictConfig):
        raise UserError(f"{path}: expected keys and values at the top")
    parent = values.pop("defaults", None)
    if parent is None:
        return values
    inherited = _read_yaml(path.parent / str(parent), (*children, path.resolve()))
    merged = OmegaConf.merge(inherited, values)
    assert isinstance(merged, DictConfig)
    return merged


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: expected key=value, as in train.steps=100")
    try:
        return OmegaConf.from_dotlist([override])
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"override {override!r}: not valid YAML after the '=': {error}") from error


def _structure(schema: type, values: Any, origin: str) -> Any:
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or origin
        reason = str(error).split("\n")[0]
        fits = _keys_beside(schema, str(key)) if "not in" in reason else ""
        raise UserError(f"{origin}: {key}: {reason}{fits}") from error


def _keys_beside(schema: Any, key: str) -> str:
    """The keys that exist where the unknown `key` was looked for."""
    for part in key.split(".")[:-1]:
        kinds = {f.name: f.type for f in fields(schema)}
        schema = kinds.get(part)
        if not is_dataclass(schema):
            return ""
    return f"; known keys: {', '.join(f.name for f in fields(schema))}"


def check(config: Config) -> None:
    """Refuse values that do not fit each other. Raises UserError naming key, value and fix."""
    _check_positive(config)
    _check_model(config.model)
    _check_data(config)
    _check_steps(config)


def _need(condition: bool, key: str, value: Any, fits: str) -> None:
    if not condition:
        raise UserError(f"{key}: {value}, {fits}")


def _check_positive(config: Config) -> None:
    model, train = config.model, config.train
    positive = {
        "model.layers": model.layers,
        "model.hidden": model.hidden,
        "model.heads": model.heads,
        "model.sequence_length": model.sequence_length,
        "model.vocab_size": model.vocab_size,
        "model.vocab_multiple": model.vocab_multiple,
        "train.steps": train.steps,
        "train.global_batch": train.global_batch,
        "train.micro_batch": train.micro_batch,
        "train.loss_chunk_tokens": train.loss_chunk_tokens,
        "train.nonfinite_limit": train.nonfinite_limit,
        "log.every": config.log.every,
    }
    for key, value in positive.items():
        _need(value >= 1, key, value, "need at least 1")
    not_negative = {
        "train.clip_grad_norm": train.clip_grad_norm,
        "optimizer.lr": config.optimizer.lr,
        "optimizer.eps": config.optimizer.eps,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "schedule.min_lr": config.schedule.min_lr,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "evaluate.every": config.evaluate.every,
        "evaluate.batches": config.evaluate.batches,
    }
    for key, value in not_negative.items():
        _need(value >= 0, key, value, "need at least 0")


def _check_model(model: ModelConfig) -> None:
    kv_heads = model.kv_heads or model.heads
    _need(
        model.head_size is not None or model.hidden % model.heads == 0,
        "model.heads",
        model.heads,
        f"must divide model.hidden ({model.hidden})",
    )
    _need(
        model.heads % kv_heads == 0,
        "model.kv_heads",
        kv_heads,
        f"must divide model.heads ({model.heads})",
    )
    head_size = model.head_size or model.hidden // model.heads
    rotary = round(head_size * model.rotary_fraction)
    _need(
        model.position == "learned" or (0 < model.rotary_fraction <= 1 and rotary % 2 == 0),
        "model.rotary_fraction",
        model.rotary_fraction,
        f"must leave an even number of rotating dimensions in a head of {head_size}",
    )
    _need(0 <= model.dropout < 1, "model.dropout", model.dropout, "need 0 or more, below 1")


def _check_data(config: Config) -> None:
    data = config.data
    for key, corpora in (("train", data.train), ("valid", data.valid)):
        for i, corpus in enumerate(corpora):
            _need(corpus.path != "", f"data.{key}[{i}].path", "empty", "need a corpus prefix")
            _need(corpus.weight > 0, f"data.{key}[{i}].weight", corpus.weight, "need more than 0")
    _need(
        len(data.split) == 2 and min(data.split) >= 0 and data.split[0] > 0,
        "data.split",
        data.split,
        "need two parts, training above 0 and validation 0 or more",
    )
    for start_stop in data.skip:
        _need(
            len(start_stop) == 2 and 0 <= start_stop[0] < start_stop[1],
            "data.skip",
            start_stop,
            "need [from, to] with 0 <= from < to",
        )


def _check_steps(config: Config) -> None:
    train, schedule = config.train, config.schedule
    _need(
        schedule.warmup_steps <= train.steps,
        "schedule.warmup_steps",
        schedule.warmup_steps,
        f"at most train.steps ({train.steps})",
    )
    _need(
        schedule.min_lr <= config.optimizer.lr,
        "schedule.min_lr",
        schedule.min_lr,
        f"at most optimizer.lr ({config.optimizer.lr})",
    )
    _need(
        0 <= schedule.decay_fraction <= 1,
        "schedule.decay_fraction",
        schedule.decay_fraction,
        "need 0 to 1",
    )
    _need(
        train.stop_at is None or 1 <= train.stop_at <= train.steps,
        "train.stop_at",
        train.stop_at,
        f"need 1 to train.steps ({train.steps})",
    )
