"""Each bad value is refused in one line: key, value, fix."""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_args

from megafrontier.common.errors import need
from megafrontier.config.building import shown
from megafrontier.config.data import CorpusConfig, weight_at
from megafrontier.config.fields import RESUME
from megafrontier.config.layout import WireFormat, WiresConfig
from megafrontier.config.machine import MachineConfig
from megafrontier.config.model.blocks import LatentConfig, check_attention
from megafrontier.config.model.gpt import ModelConfig
from megafrontier.config.model.moe import check_moe
from megafrontier.config.model.rotary import check_rotary_scaling
from megafrontier.config.model.scaling import check_scaling
from megafrontier.config.optimizer import OptimizerConfig, ScheduleConfig
from megafrontier.config.schema import BatchWarmupConfig, Config, TrainConfig
from megafrontier.config.sites import check_sites

_BOUNDS = {
    "at_least": (operator.ge, "need at least"),
    "above": (operator.gt, "need more than"),
    "at_most": (operator.le, "need at most"),
    "below": (operator.lt, "need less than"),
}


def _check_bounds(value: Any, key: str, bounds: Mapping[str, float]) -> None:
    """Check `bounded` fields in a dataclass, or the numbers in such a field."""
    if is_dataclass(value):
        for f in fields(value):
            _check_bounds(getattr(value, f.name), f"{key}.{f.name}".lstrip("."), f.metadata)
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_bounds(part, f"{key}.{name}", bounds)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            _check_bounds(part, f"{key}[{i}]", bounds)
    elif isinstance(value, int | float):
        for name, limit in bounds.items():
            if name == RESUME:
                continue
            holds, words = _BOUNDS[name]
            need(holds(value, limit), key, value, f"{words} {limit}")


def check(config: Config) -> None:
    """Check bounds and how values fit each other. Raises UserError with key, value and fix."""
    _check_folders(config)
    _check_bounds(config, "", {})
    _check_model(config.model)
    _check_data(config)
    _check_steps(config)
    _check_optimizer(config.optimizer)
    if config.optimizer.qk_clip:
        _check_qk_clip(config)
    _check_wires(config.partition.wires, "partition.wires")
    _check_experts_partition(config)
    if config.partition.offload.optimizer != "none":
        _check_offload(config)
    if config.partition.overlap_update:
        _check_overlap_update(config)
    if config.train.cuda_graphs:
        _check_cuda_graphs(config)
    if config.sites is not None:
        check_sites(config.sites, config.train.global_batch, config.train.hang_seconds)
        _check_data_of_sites(config)


def _check_data_of_sites(config: Config) -> None:
    """All sites count samples alike, so that no two read the same ones."""
    fits = "need null, or one site (sites=null)"
    need(config.train.batch_warmup is None, "train.batch_warmup", "given", fits)
    for i, corpus in enumerate(config.data.train):
        is_fixed = isinstance(corpus.weight, int | float)
        need(is_fixed, f"data.train[{i}].weight", corpus.weight, "need a number, or one site")


def check_machine(machine: MachineConfig, origin: str) -> None:
    """Refuse an incomplete machine from the file or key `origin`. Raises UserError."""
    names = list(machine.levels)
    key = f"{origin}: levels"
    need(1 <= len(names) <= 5, key, names or "none", "need 1 to 5 levels, fastest link first")
    need("none" not in names, key, names, "need other names than 'none', which means unsharded")
    for name in names[:-1]:
        is_given = machine.levels[name].size is not None
        fits = "only the outermost level may leave it open"
        need(is_given, f"{key}.{name}.size", "not given", fits)
    _check_bounds(machine.levels, key, {})
    _check_bounds(machine.device, f"{origin}: device", {})


def _check_folders(config: Config) -> None:
    name, directory = config.run.name, config.run.directory
    # Without a name, all runs would share the folder above.
    need(name != "", "run.name", "empty", "need a name")
    need(directory != "", "run.directory", "empty", "need a folder")
    # No shell expands it after `run.directory=`, and a folder named ~ is a trap.
    need(not directory.startswith("~"), "run.directory", directory, "need it without ~, as $HOME")
    local = config.checkpoint.local.folder
    is_path = local == "auto" or local.startswith("/")
    need(is_path, "checkpoint.local.folder", local or "empty", "need auto or an absolute path")


def _check_latent(model: ModelConfig, latent: LatentConfig) -> None:
    key, sizes = "model.attention.latent", latent.rope_size % 2 == 0
    need(sizes, f"{key}.rope_size", latent.rope_size, "need an even number")
    fits = f"need at most {key}.rope_size + nope_size ({latent.head_size})"
    need(latent.value_size <= latent.head_size, f"{key}.value_size", latent.value_size, fits)
    for name, value, only in (
        ("position", model.position, "rotary"),
        ("rotary_fraction", model.rotary_fraction, 1.0),
        ("kv_heads", model.num_kv_heads, model.heads),
        ("head_size", model.head_size, None),
        ("qk_norm", model.qk_norm, "none"),
        ("qkv_bias", model.has_qkv_bias, False),
        ("attention.output_gate", model.attention.output_gate, False),
        ("scaling", model.scaling and "given", None),
    ):
        fits = f"need {'null' if only is None else str(only).lower()} with {key}"
        need(value == only, f"model.{name}", value, fits)


def _check_model(model: ModelConfig) -> None:
    latent = model.attention.latent
    if latent is not None:
        _check_latent(model, latent)
    has_size = model.head_size is not None or latent is not None
    divides = has_size or model.hidden % model.heads == 0
    need(divides, "model.heads", model.heads, f"must divide model.hidden ({model.hidden})")
    kv_heads, heads = model.num_kv_heads, model.heads
    need(heads % kv_heads == 0, "model.kv_heads", kv_heads, f"must divide model.heads ({heads})")
    fraction, dims = model.rotary_fraction, model.rotary_dims
    need(
        model.position == "learned" or (0 < fraction <= 1 and dims > 0 and dims % 2 == 0),
        "model.rotary_fraction",
        fraction,
        "must be above 0, at most 1, and give an even number of rotating dimensions (2 or more) in "
        f"a head of {model.head_dim}",
    )
    is_rotary, scaling = model.position == "rotary", model.rotary_scaling
    if scaling is not None:
        fits = "need null, or model.position=rotary"
        need(is_rotary, "model.rotary_scaling", asdict(scaling), fits)
        check_rotary_scaling(scaling)
    check_attention(model.attention, model.layers, is_rotary, model.dropout)
    fits = "need false, or model.norm=rmsnorm"
    is_rms, offset = model.norm == "rmsnorm", model.norm_unit_offset
    need(is_rms or not offset, "model.norm_unit_offset", offset, fits)
    need(
        not is_rms or model.norm_bias,
        "model.norm_bias",
        False,
        "need true, or model.norm=layernorm",
    )
    if model.moe is not None:
        check_moe(model.moe, model.layers)
    if model.prediction is not None:
        fits = "need {} with model.prediction"
        need(is_rotary, "model.position", model.position, fits.format("rotary"))
        need(model.scaling is None, "model.scaling", "given", fits.format("null"))
    if model.scaling is not None:
        check_scaling(model.scaling)
        for key in ("scale_embedding", "norm_unit_offset"):
            need(not getattr(model, key), f"model.{key}", "true", "need false with model.scaling")


def _check_data(config: Config) -> None:
    data = config.data
    for key, corpora in (("train", data.train), ("valid", data.valid)):
        for i, corpus in enumerate(corpora):
            need(corpus.path != "", f"data.{key}[{i}].path", "empty", "need a corpus prefix")
            is_name = re.fullmatch(r"[\w.-]*", corpus.name) is not None
            fits = "need letters, digits, `.`, `_` or `-`"
            need(is_name, f"data.{key}[{i}].name", corpus.name, fits)
            _check_weight(f"data.{key}[{i}].weight", corpus.weight, key == "train")
            fits = "need null; only data.train is read several times"
            has_epochs = key == "train" or corpus.epochs is None
            need(has_epochs, f"data.{key}[{i}].epochs", corpus.epochs, fits)
        _check_curriculum(f"data.{key}", corpora)
    is_split = len(data.split) == 2 and min(data.split) >= 0 and data.split[0] > 0
    fits = "need two parts, training above 0 and validation 0 or more"
    need(is_split, "data.split", data.split, fits)
    fits = "need none, or data.document_mask=true"
    need(data.packing == "none" or data.document_mask, "data.packing", data.packing, fits)
    for i, part in enumerate(data.skip):
        is_range = len(part) == 2 and 0 <= part[0] < part[1] < 2**48
        need(is_range, f"data.skip[{i}]", part, "need [from, to] with 0 <= from < to < 2**48")


def _check_weight(key: str, weight: float | list[list[float]], may_change: bool) -> None:
    if not isinstance(weight, list):
        need(weight > 0, key, weight, "need more than 0")
        return
    need(may_change, key, shown(weight), "need a number; only data.train has a curriculum")
    steps = [part[0] for part in weight if len(part) == 2]
    is_ordered = len(steps) == len(weight) > 0 and steps[0] == 0 and steps == sorted(set(steps))
    fits = "need [[0, weight], [step, weight], …] with steps that increase"
    need(is_ordered and all(step % 1 == 0 for step in steps), key, shown(weight), fits)
    need(min(part[1] for part in weight) >= 0, key, shown(weight), "need weights of at least 0")


def _check_curriculum(key: str, corpora: Sequence[CorpusConfig]) -> None:
    """Refuse a step at which no corpus has a weight."""
    curricula = [corpus.weights for corpus in corpora]
    for step in {int(start) for curriculum in curricula for start, _ in curriculum}:
        total = sum(weight_at(step, curriculum) for curriculum in curricula)
        need(total > 0, f"{key}: weights of step", step, "need one above 0")


def _check_steps(config: Config) -> None:
    train, schedule, lr = config.train, config.schedule, config.optimizer.lr
    spikes = {"train.spike_loss": train.spike_loss, "train.spike_grad_norm": train.spike_grad_norm}
    for key, factor in spikes.items():
        need(factor == 0 or factor > 1, key, factor, "need more than 1, or 0 for never")
    _check_checkpointing(config)
    batch, micro, length = train.global_batch, train.micro_batch, config.model.sequence_length
    # Tokens are counted in 32 bits.
    fits = f"need at most {(2**31 - 1) // length} with model.sequence_length ({length})"
    need(micro * length < 2**31, "train.micro_batch", micro, fits)
    fits = f"must be a multiple of train.micro_batch ({micro})"
    need(batch % micro == 0, "train.global_batch", batch, fits)
    if train.batch_warmup is not None:
        _check_batch_warmup(train, train.batch_warmup)
    fits = "need null, or train.precision=bf16"
    is_plain = train.linear_precision is None or train.precision == "bf16"
    need(is_plain, "train.linear_precision", train.linear_precision, fits)
    steps, stop = train.steps, train.stop_at
    _check_schedule(schedule)
    fits = f"need at most optimizer.lr ({lr})"
    need(schedule.min_lr <= lr, "schedule.min_lr", schedule.min_lr, fits)
    is_inside = stop is None or 1 <= stop <= steps
    need(is_inside, "train.stop_at", stop, f"need 1 to train.steps ({steps})")


def _check_schedule(schedule: ScheduleConfig) -> None:
    decay, warmup = schedule.decay_steps, schedule.warmup_steps
    decays = decay is None or schedule.name != "constant"
    need(decays, "schedule.decay_steps", decay, "need null with schedule.name=constant")
    has_both = warmup > 0 and schedule.warmup_fraction > 0
    fits = f"need 0 with schedule.warmup_fraction ({schedule.warmup_fraction:g})"
    need(not has_both, "schedule.warmup_steps", warmup, fits)
    fits = f"need at most schedule.decay_steps ({decay})"
    need(decay is None or warmup <= decay, "schedule.warmup_steps", warmup, fits)


def _check_checkpointing(config: Config) -> None:
    given, memory = config.train.activation_checkpointing, config.train.memory_gib
    blocks, key = config.model.trained_layers, "train.activation_checkpointing"
    fits = f"need {blocks} modes, one for each block"
    need(isinstance(given, str) or len(given) == blocks, key, shown(given), fits)
    fits = f"need null, or {key}=auto"
    need(memory is None or given == "auto", "train.memory_gib", memory, fits)


def _check_batch_warmup(train: TrainConfig, warmup: BatchWarmupConfig) -> None:
    key, batch, micro = "train.batch_warmup", train.global_batch, train.micro_batch
    fits = f"need less than train.global_batch ({batch})"
    need(warmup.start < batch, f"{key}.start", warmup.start, fits)
    grows = batch - warmup.start
    fits = f"must divide {grows} (train.global_batch - {key}.start)"
    need(grows % warmup.step_by == 0, f"{key}.step_by", warmup.step_by, fits)
    fits = f"must be a multiple of train.micro_batch ({micro})"
    for name, size in (("start", warmup.start), ("step_by", warmup.step_by)):
        need(size % micro == 0, f"{key}.{name}", size, fits)


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    for number, group in enumerate(optimizer.groups):
        key = f"optimizer.groups[{number}]"
        need(group.match != "", f"{key}.match", "empty", "need a kind, a pattern, or KIND:PATTERN")
        is_in_proportion = group.lr is None or optimizer.lr > 0
        fits = "need more than 0, because learning rates of groups are in proportion to it"
        need(is_in_proportion, "optimizer.lr", optimizer.lr, fits)


def _check_qk_clip(config: Config) -> None:
    """Refuse models whose logits do not grow with the weights, and those whose attention does not
    return log-sums."""
    model, where = config.model, "with optimizer.qk_clip"
    attention, norm = model.attention, model.qk_norm
    need(norm == "none", "model.qk_norm", norm, f"need none {where}")
    need(not attention.softcap, "model.attention.softcap", attention.softcap, f"need null {where}")
    need(not attention.sinks, "model.attention.sinks", "true", f"need false {where}")
    need(model.dropout == 0, "model.dropout", model.dropout, f"need 0 {where}")
    graphs = config.train.cuda_graphs
    need(not graphs, "train.cuda_graphs", "true", f"need false {where}")


def _check_experts_partition(config: Config) -> None:
    experts = config.partition.experts
    if experts is not None:
        fits = "need null, or a mixture of experts (model.moe)"
        need(config.model.moe is not None, "partition.experts", "given", fits)
        if experts.wires is not None:
            _check_wires(experts.wires, "partition.experts.wires")


def _check_offload(config: Config) -> None:
    optimizer, where = config.optimizer, "with partition.offload.optimizer"
    need(optimizer.fused != "apex", "optimizer.fused", "apex", f"need torch or none {where}")
    need(config.sites is None, "sites", "given", f"need null {where}")
    need(config.partition.weights_copy, "partition.weights_copy", "false", f"need true {where}")


def _check_overlap_update(config: Config) -> None:
    partition, where = config.partition, "with partition.overlap_update"
    need(partition.overlap != "none", "partition.overlap", "none", f"need safe or full {where}")
    need(config.sites is None, "sites", "given", f"need null {where}")
    offload = partition.offload.optimizer
    fits = f"need none {where}, which it implies"
    need(offload == "none", "partition.offload.optimizer", offload, fits)


def _check_cuda_graphs(config: Config) -> None:
    """Refuse what lets a block's kernels differ between micro-batches, and what torch leaves out of
    graphs: attention that is recomputed keeps its random state on the host."""
    train, parallel, where = config.train, config.parallel, "with train.cuda_graphs"
    need(train.compile, "train.compile", "false", f"need true {where}")
    need(config.model.moe is None, "model.moe", "given", f"need null {where}")
    need(not config.data.document_mask, "data.document_mask", "true", f"need false {where}")
    for name in ("tensor", "context", "expert", "pipeline"):
        size = getattr(parallel, name)
        need(size == 1, f"parallel.{name}", size, f"need 1 {where}")
    given, key = train.activation_checkpointing, "train.activation_checkpointing"
    modes = {given} if isinstance(given, str) else set(given)
    need(modes <= {"none", "selective"}, key, shown(given), f"need none or selective {where}")


def _check_wires(wires: WiresConfig, prefix: str) -> None:
    known, of_work = get_args(WireFormat), ("fp32", "bf16", "fp16", "int8")
    activations = {} if isinstance(wires.activations, str) else wires.activations
    for move, formats, allowed in (
        ("gather", wires.gather, known),
        ("reduce", wires.reduce, [wire for wire in known if not wire.startswith("delta")]),
        ("activations", activations, of_work),
        ("tokens", wires.tokens, of_work),
    ):
        for level, wire in formats.items():
            key = f"{prefix}.{move}.{level}"
            need(wire in allowed, key, wire, f"need one of {', '.join(allowed)}")
