"""The config that goes on with a run of Megatron core, from the arguments in its checkpoint."""

from typing import Any

from megafrontier.commands.fine_tuning import MACHINE, SPLIT, Line
from megafrontier.commands.megatron.arguments import ArgumentReader
from megafrontier.config import OptimizerConfig

MORE_STEPS = 300
"""Steps of the run if Megatron's are over."""
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "WSD": "wsd",
    "inverse-square-root": "cosine",  # which we lack; the line's comment has Megatron's
}
_CHECKPOINTING: dict[Any, str] = {None: "none", "selective": "selective", "full": "block"}


def continued(reader: ArgumentReader, step: int, optimizer: OptimizerConfig) -> list[Line]:
    """The lines of a config that goes on after a step. `optimizer`: that of the arguments. Raises
    UserError by argument."""
    steps = reader.optional_count("train_iters") or 0
    steps = steps if steps > step else step + MORE_STEPS
    return [
        Line("data.train", [], "yours to give: [{path: PREFIX}], Megatron's own files too"),
        SPLIT,
        Line("data.document_mask", reader.flag("reset_attention_mask", False), "by document"),
        *_training(reader, step, steps),
        Line("optimizer.lr", optimizer.lr, "--lr"),
        Line("optimizer.betas", list(optimizer.betas), "--adam-beta1, --adam-beta2"),
        Line("optimizer.eps", optimizer.eps, "--adam-eps"),
        Line("optimizer.weight_decay", optimizer.weight_decay, "--weight-decay"),
        Line("optimizer.no_decay", ["norm", "bias"], "Megatron decays embeddings, too"),
        *_schedule(reader, steps),
        MACHINE,
    ]


def _training(reader: ArgumentReader, step: int, steps: int) -> list[Line]:
    """The section `train` of a run of these steps, which goes on after `step`."""
    precision = "bf16" if reader.flag("bf16", False) else "fp32"
    precision = "fp16" if reader.flag("fp16", False) else precision
    micro = reader.count("micro_batch_size", 1)
    return [
        Line("train.steps", steps, f"in all; the checkpoint is of step {step}"),
        Line("train.global_batch", reader.count("global_batch_size", micro), "sequences of a step"),
        Line("train.micro_batch", micro, "sequences that a rank computes at a time"),
        Line("train.precision", precision, "of weights and activations; masters are fp32"),
        Line("train.clip_grad_norm", reader.fraction("clip_grad", 1.0), "--clip-grad"),
        Line(
            "train.activation_checkpointing",
            reader.chosen("recompute_granularity", _CHECKPOINTING),
            "none, selective, block or auto",
        ),
    ]


def _schedule(reader: ArgumentReader, steps: int) -> list[Line]:
    """The section `schedule` of a run of these steps."""
    style = reader.one_of("lr_decay_style", "linear", *_SCHEDULES)
    name = _SCHEDULES[style]
    decay = reader.optional_count("lr_decay_iters") or steps
    warmup = int(reader.number("lr_warmup_iters", 0))
    warmup = warmup or round(reader.fraction("lr_warmup_fraction", 0.0) * decay)
    lines = [
        Line("schedule.name", name, f"--lr-decay-style {style}"),
        Line("schedule.min_lr", reader.fraction("min_lr", 0.0), "--min-lr"),
        Line("schedule.warmup_steps", min(warmup, decay), "--lr-warmup-iters"),
    ]
    if name != "constant":
        lines.append(Line("schedule.decay_steps", decay, "--lr-decay-iters"))
    if name == "wsd":
        share = reader.number("lr_wsd_decay_iters", 0) / decay
        lines.append(Line("schedule.decay_fraction", min(share, 1.0), "--lr-wsd-decay-iters"))
    return lines
