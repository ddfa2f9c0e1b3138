"""Whether a checkpoint is of the model that is to go on, and what else differs from then."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from math import isclose
from typing import Any, TypeVar

from megafrontier.checkpoint.load import Checkpoint
from megafrontier.checkpoint.manifest import Manifest
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

COMPARED_STEPS = 1000
"""Of those to come, in two schedules."""

ROTARY_KEYS = ("rotary_base", "rotary_scaling")
"""Of `model`; others may be meant, for longer sequences."""

ORDER_KEYS = (
    "run.seed",
    "model.sequence_length",
    "tokenizer",
    "data.train",
    "data.split",
    "data.document_mask",
)
"""On what it depends which tokens a sample's number stands for."""

TOLD_KEYS = (
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
"""What also makes another training of it, unseen."""


def check_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuse weights that fit, of a model that computes something else with them. Raises
    UserError."""
    saved = _saved(checkpoint.manifest, "model", ModelConfig)
    if saved is None:
        return
    ours = _function(model)
    for name, theirs in _function(saved).items():
        if ours[name] != theirs:
            raise UserError(
                f"model.{name}: {ours[name]}, but {checkpoint.path} was trained with {theirs}"
            )


def _function(model: ModelConfig) -> dict[str, Any]:
    """What the shapes of the weights do not tell, under the names of the config's keys; and what
    they do tell, before what follows from it."""
    return {
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.num_kv_heads,
        "head_size": model.head_dim,
        "vocab_size": model.vocab_size,
        "norm": model.norm,
        "norm_eps": model.norm_eps,
        "activation": model.activation,
        "position": model.position,
        "rotary_fraction": model.rotary_dims / model.head_dim,
        "parallel_residual": model.parallel_residual,
        "sequence_length": model.sequence_length if model.position == "learned" else None,
    }


def _saved(manifest: Manifest, name: str, kind: type[Section]) -> Section | None:
    """A section of the config that a checkpoint was trained with, if it tells; an older version's
    may lack some keys, and have others."""
    saved = manifest.config.get(name)
    if not isinstance(saved, Mapping):
        return None
    known = {field.name for field in fields(kind)}
    return kind(**{key: value for key, value in saved.items() if key in known})


def changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """What may be another on purpose, such as rotary frequencies for longer sequences."""
    lines = rotary_changes(trainer.config.model, manifest)
    lines += _data_changes(trainer, manifest) or _corpus_changes(trainer, manifest)
    if "error" in manifest.states and not any(
        unit.feedback.errors for unit in trainer.engine.units
    ):
        lines.append("error feedback: none on these levels; the errors kept so far are dropped")
    before, now = _global_batch(manifest), trainer.config.train.global_batch
    if manifest.step and before != now:
        _, sample = trainer.loader.position(trainer.step)
        lines.append(f"train.global_batch: {now}, was {before}; the data go on at sample {sample}")
    lines += [
        f"{key}: {now}, was {before}"
        for key, now, before in _changed(trainer.config, manifest, TOLD_KEYS)
    ]
    return lines + _rate_changes(trainer.config, manifest)


def rotary_changes(model: ModelConfig, manifest: Manifest) -> list[str]:
    """Rotary frequencies that are others than a checkpoint's, for longer sequences perhaps."""
    saved = _saved(manifest, "model", ModelConfig)
    if saved is None or model.position != "rotary":
        return []
    now, before = asdict(model), asdict(saved)
    return [
        f"warning: model.{key}: {now[key]}, was {before[key]}"
        for key in ROTARY_KEYS
        if now[key] != before[key]
    ]


def _rate_changes(config: Config, manifest: Manifest) -> list[str]:
    """More steps, say, stretch a schedule that was nearly at its end."""
    train = _saved(manifest, "train", TrainConfig)
    optimizer = _saved(manifest, "optimizer", OptimizerConfig)
    schedule = _saved(manifest, "schedule", ScheduleConfig)
    if not (manifest.step and train and optimizer and schedule):
        return []
    # In a warm-up, or on wsd's plain, the rates of two schedules are alike for a while.
    last = max(train.steps, config.train.steps)
    for step in range(manifest.step, last, max(1, (last - manifest.step) // COMPARED_STEPS)):
        before = learning_rate(step, train.steps, optimizer, schedule)
        now = learning_rate(step, config.train.steps, config.optimizer, config.schedule)
        if not isclose(before, now):
            start = "here" if step == manifest.step else f"about step {step}"
            return [f"learning rate: {now:.3g} from {start} on, would have been {before:.3g}"]
    return []


def _data_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """What gives the numbers of the samples another meaning: some are then read twice."""
    is_moved = _is_moved(trainer, manifest)
    return [
        f"warning: {key}: {now}, was {before}; samples are others from here on"
        for key, now, before in _changed(trainer.config, manifest, ORDER_KEYS)
        if not (key == "data.train" and is_moved)
    ]


def _is_moved(trainer: Trainer, manifest: Manifest) -> bool:
    """Whether `data.train` means the same as before, in other places perhaps; to the first rank."""
    before = _value(manifest.config, "data.train") or []
    weights = [corpus.weight for corpus in trainer.config.data.train]
    return (
        trainer.is_first
        and weights == [corpus["weight"] for corpus in before]
        and trainer.loader.samples.fingerprints == manifest.extra.get("contents")
    )


def _changed(
    config: Config, manifest: Manifest, keys: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Those of the keys that a checkpoint in the midst of training was made with another value of:
    key, value now, value before."""
    ours = config_to_dict(config)
    for key in keys if manifest.step else ():
        now, before = _value(ours, key), _value(manifest.config, key)
        now = list(now) if isinstance(now, tuple) else now  # as JSON has it
        if before is not None and before != now:
            yield key, now, before


def _corpus_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Of corpora that are given as before, and are others: grown, say, or made anew."""
    changed = _window_changes(trainer, manifest) or _content_changes(trainer, manifest)
    if not changed:
        return []
    more = f" (and {len(changed) - 1} more corpora)" if len(changed) > 1 else ""
    return [f"warning: data.train: {changed[0]}{more}; samples are others from here on"]


def _window_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """The order is one of all windows: a corpus that has grown, or `data.valid` in place of a part
    of `data.train`, changes it from the first to the last."""
    now = trainer.loader.samples.windows
    before = manifest.extra.get("windows", now) if manifest.step else now
    if not isinstance(before, list):  # from before checkpoints told those of each corpus
        now, before = [sum(now)], [before]
    return [f"{n} windows, was {b}" for n, b in zip(now, before, strict=False) if n != b]


def _content_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Which corpora of as many windows have other ids in them; to the first rank, which tells."""
    before = manifest.extra.get("contents") if manifest.step else None
    if before is None or not trainer.is_first:
        return []
    corpora = zip(
        trainer.config.data.train, trainer.loader.samples.fingerprints, before, strict=False
    )
    return [f"{corpus.path}: made anew, of other ids" for corpus, n, b in corpora if n != b]


def _value(config: Mapping[str, Any], key: str) -> Any:
    """None where an older or imported checkpoint does not say."""
    section, _, name = key.rpartition(".")
    return (config.get(section, {}) if section else config).get(name)


def _global_batch(manifest: Manifest) -> int:
    return int(_value(manifest.config, "train.global_batch") or 0)


def old_position(manifest: Manifest) -> tuple[int, int]:
    """Where the data stood, from before checkpoints said so."""
    own = data_step(manifest.step, _value(manifest.config, "data.skip") or [])
    return own, own * _global_batch(manifest)
