"""Values that are right one by one but do not fit each other, or lie out of range."""

from dataclasses import asdict
from typing import Any, get_args
from unicodedata import category

from megafrontier.common.errors import UserError
from megafrontier.config.schema import (
    Config,
    LevelConfig,
    MachineConfig,
    ModelConfig,
    RotaryScalingConfig,
    WireFormat,
    WiresConfig,
)


def check(config: Config) -> None:
    """Refuse values that do not fit each other. Raises UserError naming key, value and fix."""
    _check_folders(config)
    _check_ranges(config)
    _check_model(config.model)
    _check_data(config)
    _check_steps(config)
    _check_wires(config.partition.wires)


def _check_folders(config: Config) -> None:
    name, directory = config.run.name, config.run.directory
    # Or all runs without a name would share the folder above.
    _need(name != "", "run.name", "empty", "need a name")
    _need(directory != "", "run.directory", "empty", "need a folder")
    # No shell opens it behind a `run.directory=`, and a folder of that name is a trap.
    _need(not directory.startswith("~"), "run.directory", directory, "need it without ~, as $HOME")
    paths = {"run.name": name, "run.directory": directory}
    for key, path in (paths | {"checkpoint.resume": config.checkpoint.resume}).items():
        is_plain = all(category(letter) != "Cc" for letter in path)
        _need(is_plain, key, repr(path), "need it without control characters")


def check_machine(machine: MachineConfig, origin: str) -> None:
    """Refuse a machine that `origin` does not describe whole. Raises UserError."""
    names = list(machine.levels)
    key = f"{origin}: levels"
    _need(1 <= len(names) <= 5, key, names or "none", "need 1 to 5 levels, fastest link first")
    _need("none" not in names, key, names, "need other names than 'none', which means unsharded")
    for name, level in machine.levels.items():
        _check_level(f"{key}.{name}", level, outermost=name == names[-1])
    device = machine.device
    _need_positive(
        {
            f"{origin}: device.memory_gib": device.memory_gib,
            f"{origin}: device.peak_tflops": device.peak_tflops,
            f"{origin}: device.ranks_per_host": device.ranks_per_host,
        }
    )


def _check_level(key: str, level: LevelConfig, outermost: bool) -> None:
    _need(
        outermost or level.size is not None,
        f"{key}.size",
        "not given",
        "only the outermost level may leave it open",
    )
    _need(level.size is None or level.size >= 1, f"{key}.size", level.size, "need at least 1")
    _need_positive({f"{key}.gigabytes_per_second": level.gigabytes_per_second})


TOO_MANY = 2**31
"""Of anything: what torch and others of integers of 32 bits take is below."""

LONGEST_WINDOW = 1_000_000

HIGHEST_LOSS_SCALE = 2**32
"""To begin with: fp16 ends at 65504, and one that fp32 cannot hold is infinite, as are its halves.
"""


def _need(condition: bool, key: str, value: Any, fits: str) -> None:
    if not condition:
        raise UserError(f"{key}: {value}, {fits}")


def _need_positive(values: dict[str, float | None]) -> None:
    for key, value in values.items():
        _need(value is None or value > 0, key, value, "need more than 0")


def _check_ranges(config: Config) -> None:
    model, train = config.model, config.train
    at_least_one: dict[str, int | None] = {
        "model.layers": model.layers,
        "model.hidden": model.hidden,
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.head_size": model.head_size,
        "model.ffn_hidden": model.ffn_hidden,
        "model.sequence_length": model.sequence_length,
        "model.vocab_size": model.vocab_size,
        "model.vocab_multiple": model.vocab_multiple,
        "train.steps": train.steps,
        "train.global_batch": train.global_batch,
        "train.micro_batch": train.micro_batch,
        "train.loss_chunk_tokens": train.loss_chunk_tokens,
        "train.nonfinite_limit": train.nonfinite_limit,
        "train.spike_window": train.spike_window,
        "log.every": config.log.every,
    }
    for key, count in at_least_one.items():
        _need(count is None or count >= 1, key, count, "need at least 1")
        _need(count is None or count < TOO_MANY, key, count, f"need less than {TOO_MANY}")
    window = train.spike_window  # 16 bytes a step are set aside for it at the start
    _need(window <= LONGEST_WINDOW, "train.spike_window", window, f"need at most {LONGEST_WINDOW}")
    not_negative: dict[str, float] = {
        "run.seed": config.run.seed,
        "train.clip_grad_norm": train.clip_grad_norm,
        "train.hang_seconds": train.hang_seconds,
        "train.attempts": train.attempts,
        "optimizer.lr": config.optimizer.lr,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "schedule.min_lr": config.schedule.min_lr,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "partition.prefetch": config.partition.prefetch,
        "evaluate.every": config.evaluate.every,
        "evaluate.batches": config.evaluate.batches,
        "preflight.slow_link": config.preflight.slow_link,
        "log.stragglers_every": config.log.stragglers_every,
        "train.gc_every": config.train.gc_every,
    }
    for key, value in not_negative.items():
        _need(value >= 0, key, value, "need at least 0")
    _need_positive(
        {
            "model.norm_eps": model.norm_eps,
            "optimizer.eps": config.optimizer.eps,
            "model.rotary_base": model.rotary_base,
            "model.init_std": model.init_std,
            "train.loss_scale": train.loss_scale,
        }
    )
    most = HIGHEST_LOSS_SCALE
    _need(train.loss_scale <= most, "train.loss_scale", train.loss_scale, f"need at most {most}")


def _check_model(model: ModelConfig) -> None:
    kv_heads = model.heads if model.kv_heads is None else model.kv_heads
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
        model.position == "learned"
        or (0 < model.rotary_fraction <= 1 and rotary > 0 and rotary % 2 == 0),
        "model.rotary_fraction",
        model.rotary_fraction,
        f"must be above 0, at most 1, and leave an even number of rotating dimensions (2 or "
        f"more) in a head of {head_size}",
    )
    _need(0 <= model.dropout < 1, "model.dropout", model.dropout, "need 0 or more, below 1")
    if model.rotary_scaling is not None:
        _check_rotary_scaling(model, model.rotary_scaling)


def _check_rotary_scaling(model: ModelConfig, scaling: RotaryScalingConfig) -> None:
    key = "model.rotary_scaling"
    is_rotary = model.position == "rotary"
    _need(is_rotary, key, asdict(scaling), "need null, or model.position=rotary")
    _need(scaling.factor >= 1, f"{key}.factor", scaling.factor, "need at least 1")
    length = scaling.original_length
    _need(length >= 1, f"{key}.original_length", length, "need at least 1")
    _need_positive({f"{key}.low_frequency": scaling.low_frequency})
    _need(
        scaling.high_frequency > scaling.low_frequency,
        f"{key}.high_frequency",
        scaling.high_frequency,
        f"need more than {key}.low_frequency ({scaling.low_frequency})",
    )


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
    for i, start_stop in enumerate(data.skip):
        _need(
            len(start_stop) == 2 and 0 <= start_stop[0] < start_stop[1] < 2**48,
            f"data.skip[{i}]",
            start_stop,
            "need [from, to] with 0 <= from < to, which a run may come to",
        )


def _check_steps(config: Config) -> None:
    train, schedule, optimizer = config.train, config.schedule, config.optimizer
    for key, factor in (
        ("train.spike_loss", train.spike_loss or None),
        ("train.spike_grad_norm", train.spike_grad_norm or None),
        ("log.straggler", config.log.straggler),
    ):
        _need(factor is None or factor > 1, key, factor, "need more than 1")
    _need(
        train.global_batch % train.micro_batch == 0,
        "train.global_batch",
        train.global_batch,
        f"must be a multiple of train.micro_batch ({train.micro_batch})",
    )
    _need(
        all(0 <= beta < 1 for beta in optimizer.betas),
        "optimizer.betas",
        list(optimizer.betas),
        "need two numbers, each 0 or more, below 1",
    )
    _need(
        schedule.warmup_steps <= train.steps,
        "schedule.warmup_steps",
        schedule.warmup_steps,
        f"need at most train.steps ({train.steps})",
    )
    _need(
        schedule.min_lr <= optimizer.lr,
        "schedule.min_lr",
        schedule.min_lr,
        f"need at most optimizer.lr ({optimizer.lr})",
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


def _check_wires(wires: WiresConfig) -> None:
    known = get_args(WireFormat)
    for move, formats in (("gather", wires.gather), ("reduce", wires.reduce)):
        fits = [wire for wire in known if move == "gather" or not wire.startswith("delta")]
        for level, wire in formats.items():
            key = f"partition.wires.{move}.{level}"
            _need(wire in fits, key, wire, f"need one of {', '.join(fits)}")
