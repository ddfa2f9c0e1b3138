"""Whether a checkpoint fits the configured model, and what else in the config has changed since.

All keys of `model` are compared, except those listed here; so a key that is new is compared.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from math import isclose
from typing import Any, TypeVar

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.common.errors import UserError
from megafrontier.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    config_to_dict,
)
from megafrontier.data.sampling.loader import data_step
from megafrontier.optim.schedule import learning_rate
from megafrontier.training.trainer import Trainer

Section = TypeVar("Section", ModelConfig, TrainConfig, OptimizerConfig, ScheduleConfig)

ROTARY_KEYS = ("rotary_base", "rotary_scaling")
"""Keys of `model` whose change is a warning: longer sequences need other frequencies."""
MODEL_KEYS_NOT_REFUSED = {
    *ROTARY_KEYS,
    "dropout",  # reported
    "init",  # no effect on loaded weights
    "init_std",
    "vocab_multiple",  # the padded size is a shape, which is compared
}
ORDER_KEYS = (
    "run.seed",
    "model.sequence_length",
    "tokenizer",
    "data.train",
    "data.split",
    "data.document_mask",
)
"""Keys whose change is a warning: sample numbers then stand for other tokens."""
REPORTED_KEYS = (
    "train.precision",
    "train.clip_grad_norm",
    "model.dropout",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.no_decay",
    "train.spike_loss",
    "train.spike_grad_norm",
    "train.spike_window",
)
"""Keys whose change is reported, because training goes on differently."""
COMPARED_STEPS = 1000
"""The most steps at which two learning-rate schedules are compared."""


def check_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise UserError if the checkpoint is of a model that computes something else, even if its
    weights have the same shapes."""
    saved = _saved(checkpoint.manifest, "model", ModelConfig)
    if saved is None:
        return
    before, now = _resolved(saved), _resolved(model)
    for key in now:
        if key not in MODEL_KEYS_NOT_REFUSED and now[key] != before[key]:
            raise UserError(
                f"model.{key}: {now[key]}, but {checkpoint.path} was trained with {before[key]}"
            )


def _resolved(model: ModelConfig) -> dict[str, Any]:
    """The keys of `model`, with defaults that depend on other keys filled in."""
    is_learned = model.position == "learned"
    return asdict(model) | {
        "kv_heads": model.num_kv_heads,
        "head_size": model.head_dim,
        "ffn_hidden": model.mlp_hidden,
        "rotary_fraction": model.rotary_dims / model.head_dim,
        "sequence_length": model.sequence_length if is_learned else None,
    }


def _saved(manifest: Manifest, name: str, kind: type[Section]) -> Section | None:
    """A section of the config that a checkpoint was trained with, if it has it. Keys that an older
    version lacked have their defaults; keys that only it had are left out."""
    saved = manifest.config.get(name)
    if not isinstance(saved, Mapping):
        return None
    known = {field.name for field in fields(kind)}
    return kind(**{key: value for key, value in saved.items() if key in known})


def changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Lines on what has changed since the checkpoint and may be intended."""
    config = trainer.config
    lines = rotary_changes(config.model, manifest)
    changed = _changed_keys(config, manifest) if manifest.step else {}
    order = {key: changed[key] for key in ORDER_KEYS if key in changed}
    if _has_only_moved(trainer, manifest):
        order.pop("data.train", None)
    if manifest.step:
        different = list(order.values()) or corpus_changes(trainer, manifest)
        lines += [f"warning: {line}; samples are others from here on" for line in different]
    feedback = (unit.feedback.errors for unit in trainer.engine.units)
    if "error" in manifest.states and not any(feedback):
        lines.append("error feedback: none on these levels; the errors kept so far are dropped")
    if "train.global_batch" in changed:
        _, sample = trainer.loader.position(trainer.step)
        lines.append(f"{changed['train.global_batch']}; the data go on at sample {sample}")
    lines += [changed[key] for key in REPORTED_KEYS if key in changed]
    return lines + list(_rate_changes(config, manifest))


def rotary_changes(model: ModelConfig, manifest: Manifest) -> list[str]:
    """Warnings if rotary frequencies are not those of the checkpoint."""
    saved = _saved(manifest, "model", ModelConfig)
    if saved is None or model.position != "rotary":
        return []
    now, before = asdict(model), asdict(saved)
    return [
        f"warning: model.{key}: {now[key]}, was {before[key]}"
        for key in ROTARY_KEYS
        if now[key] != before[key]
    ]


def _changed_keys(config: Config, manifest: Manifest) -> dict[str, str]:
    """The keys that have another value than in the checkpoint's config, with a text on each."""
    now = _flatten(json.loads(json.dumps(config_to_dict(config))))
    before = now | _flatten(manifest.config)
    return {key: f"{key}: {now[key]}, was {before[key]}" for key in now if now[key] != before[key]}


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of all sections, as `section.key`."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": found for key, found in value.items()}
        else:
            flat[name] = value
    return flat


def _rate_changes(config: Config, manifest: Manifest) -> Iterator[str]:
    """A line if the learning rate goes on differently, for instance because more steps stretch the
    schedule."""
    train = _saved(manifest, "train", TrainConfig)
    optimizer = _saved(manifest, "optimizer", OptimizerConfig)
    schedule = _saved(manifest, "schedule", ScheduleConfig)
    if not (manifest.step and train and optimizer and schedule):
        return
    # Two schedules may be equal for a while: during warm-up, or on the plateau of wsd.
    last = max(train.steps, config.train.steps)
    for step in range(manifest.step, last, max(1, (last - manifest.step) // COMPARED_STEPS)):
        before = learning_rate(step, train.steps, optimizer, schedule)
        now = learning_rate(step, config.train.steps, config.optimizer, config.schedule)
        if not isclose(before, now):
            start = "here" if step == manifest.step else f"about step {step}"
            yield f"learning rate: {now:.3g} from {start} on, would have been {before:.3g}"
            return


def _has_only_moved(trainer: Trainer, manifest: Manifest) -> bool:
    """Whether `data.train` has the same content and weights as before, perhaps in other files. Only
    rank 0 knows."""
    before = _flatten(manifest.config).get("data.train") or []
    weights = [corpus.weight for corpus in trainer.config.data.train]
    return (
        trainer.is_first
        and weights == [corpus["weight"] for corpus in before]
        and trainer.loader.samples.fingerprints == manifest.extra.get("contents")
    )


def corpus_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """A line if corpora with the same names are not the same: grown, or made again.

    The order is one of all windows, so a corpus that has grown changes all of it.
    """
    samples = trainer.loader.samples
    now = samples.windows
    before = manifest.extra.get("windows", now)
    if not isinstance(before, list):  # older checkpoints hold the sum
        now, before = [sum(now)], [before]
    changed = [f"{n} windows, was {b}" for n, b in zip(now, before, strict=False) if n != b]
    contents = manifest.extra.get("contents")
    if not changed and contents is not None and trainer.is_first:
        corpora = zip(trainer.config.data.train, samples.fingerprints, contents, strict=False)
        changed = [f"{corpus.path}: made anew, of other ids" for corpus, n, b in corpora if n != b]
    if not changed:
        return []
    more = f" (and {len(changed) - 1} more corpora)" if len(changed) > 1 else ""
    return [f"data.train: {changed[0]}{more}"]


def old_position(manifest: Manifest) -> tuple[int, int]:
    """The data step and the sample at which training goes on, for a checkpoint from before these
    were saved."""
    config = _flatten(manifest.config)
    step = data_step(manifest.step, config.get("data.skip") or [])
    return step, step * int(config.get("train.global_batch") or 0)
