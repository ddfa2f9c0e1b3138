"""Whether a checkpoint fits the configured model, and what else in the config has changed since.

Fields of the config say what a resume does (Note [Changed since the checkpoint]).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.common.errors import UserError
from megafrontier.config import Config, ModelConfig, OptimizerConfig, config_to_dict
from megafrontier.config.building import build, known_values
from megafrontier.config.fields import RESUME, Resume, section_class
from megafrontier.config.model.saved import FROM_CHECKPOINT
from megafrontier.model.flops import parameter_specs
from megafrontier.optim.groups import OPTIMIZERS, OptimizerGroups
from megafrontier.training.resume.upcycle import Upcycled
from megafrontier.training.trainer import Trainer


@dataclass(frozen=True)
class ChangedKey:
    """A key that has another value than in the checkpoint's config, and its mark."""

    key: str
    mark: Resume
    now: Any
    before: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.now}, was {self.before}"


def check_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise UserError, with all keys that differ, if the checkpoint is of a model that computes
    something else, even if its weights have the same shapes."""
    saved = saved_model(checkpoint.manifest)
    if saved is None:
        return
    if saved.moe is None and isinstance(checkpoint, Upcycled):
        saved = replace(saved, moe=model.moe)
    if saved.moe and model.moe and saved.moe.balance == "bias" != model.moe.balance:
        raise UserError(
            f"model.moe.balance: {model.moe.balance}, but {checkpoint.path} was trained with bias, "
            "and its experts are chosen by these biases; need bias"
        )
    found = find_changes(Config, {"model": _resolved(model)}, {"model": _resolved(saved)})
    different = [change for change in found if _computes_otherwise(change, model)]
    if different:
        first, *others = [_shown_values(change) for change in different]
        now, before = first
        keys = [f"{now}, but {checkpoint.path} was trained with {before}"]
        keys += [f"{now}, with {before}" for now, before in others]
        raise UserError(f"{'; '.join(keys)}; need the same, or model={FROM_CHECKPOINT}")


def _computes_otherwise(change: ChangedKey, model: ModelConfig) -> bool:
    is_shape = change.key == "model.sequence_length" and model.position == "learned"
    return change.mark == "refuse" or is_shape


def _shown_values(change: ChangedKey) -> tuple[str, str]:
    """`KEY: VALUE` now, and the value before."""
    now, before = (
        "given" if isinstance(value, Mapping) else str(value)
        for value in (change.now, change.before)
    )
    return f"{change.key}: {now}", before


def check_optimizer(config: Config, checkpoint: Checkpoint) -> None:
    """Raise UserError if the checkpoint has the state of another optimizer than the parameter's, or
    lacks a state. One of weights only, such as an imported one, fits."""
    manifest = checkpoint.manifest
    saved = manifest.config.get("optimizer")
    states = {state for kind in OPTIMIZERS.values() for state in kind.state_names}
    if saved is None or not manifest.states.keys() & states:
        return
    specs = parameter_specs(config.model).values()
    before = OptimizerGroups(build(OptimizerConfig, saved, "optimizer"), specs)
    now = OptimizerGroups(config.optimizer, specs)
    for spec in specs:
        (optimizer, _), (other, _) = now.of(spec), before.of(spec)
        here, advice = f"optimizer: {optimizer} for {spec.name}", "or checkpoint.weights_only=true"
        if optimizer != other:
            raise UserError(
                f"{here}, but {checkpoint.path} has states of {other}, need {other}, {advice}"
            )
        for state in OPTIMIZERS[optimizer].state_names:
            if state not in manifest.states:
                raise UserError(f"{here}, but {checkpoint.path} has no {state}, need it, {advice}")


def _resolved(model: ModelConfig) -> dict[str, Any]:
    """The keys of `model`, with defaults that depend on other keys filled in."""
    values = asdict(model)
    values["attention"] |= {
        "scale": model.attention.scale or model.head_dim**-0.5,
        "out_bias": model.has_out_bias,
    }
    values["mlp"]["bias"] = model.has_mlp_bias
    if model.moe is not None:
        values["moe"]["ffn_hidden"] = model.moe.ffn_hidden or model.mlp_hidden
    return values | {
        "kv_heads": model.num_kv_heads,
        "head_size": model.head_dim,
        "ffn_hidden": model.mlp_hidden,
        "qkv_bias": model.has_qkv_bias,
        "rotary_fraction": model.rotary_dims / model.head_dim,
    }


def saved_model(manifest: Manifest) -> ModelConfig | None:
    """The model that a checkpoint was trained with, if it has it. Keys that an older version lacked
    have their defaults; keys that only it had are left out."""
    saved = manifest.config.get("model")
    if not isinstance(saved, Mapping):
        return None
    found: ModelConfig = build(ModelConfig, known_values(ModelConfig, saved), "model")
    return found


def find_changes(
    kind: Any,
    now: Mapping[str, Any],
    before: Mapping[str, Any],
    prefix: str = "",
    mark: Resume = "ignore",
) -> Iterator[ChangedKey]:
    """The fields of the dataclass `kind`, and of the sections in it, that have other values in
    `now` than in `before`. A key that one of both lacks has not changed.

    prefix, mark: of the section that the values are.
    """
    for field in fields(kind):
        name, key = field.name, f"{prefix}{field.name}"
        if name not in now or name not in before:
            continue
        inner, own = section_class(field.type), field.metadata.get(RESUME, mark)
        is_section = isinstance(now[name], Mapping) and isinstance(before[name], Mapping)
        if inner is not None and is_section:
            yield from find_changes(inner, now[name], before[name], f"{key}.", own)
        elif now[name] != before[name]:
            yield ChangedKey(key, own, now[name], before[name])


def changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Lines on what has changed since the checkpoint and may be intended."""
    lines = rotary_changes(trainer.config, manifest)
    if not manifest.step:
        return lines
    changed = list(_changes(trainer.config, manifest))
    is_curriculum = any(isinstance(corpus.weight, list) for corpus in trainer.config.data.train)
    marks = ("samples", "batch") if is_curriculum else ("samples",)
    order = [str(change) for change in changed if change.mark in marks]
    different = order or corpus_changes(trainer, manifest)
    lines += [f"warning: {line}; samples are others from here on" for line in different]
    return lines + [str(change) for change in changed if change.mark in ("report", "batch")]


def rotary_changes(config: Config, manifest: Manifest) -> list[str]:
    """Warnings if rotary frequencies, which fields mark with `warn`, are not those of the
    checkpoint: longer sequences need others."""
    changed = _changes(config, manifest)
    return [f"warning: {change}" for change in changed if change.mark == "warn"]


def _changes(config: Config, manifest: Manifest) -> Iterator[ChangedKey]:
    now = json.loads(json.dumps(config_to_dict(config)))
    return find_changes(Config, now, manifest.config)


def corpus_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """A line if the training corpora have other weights, epochs or content, in whatever files they
    are.

    The order is one of all windows, so a corpus that has grown changes all of it.
    """
    samples, saved = trainer.loader.samples, manifest.extra
    given = trainer.config.data.train
    for key in ("weight", "epochs"):
        now = [getattr(corpus, key) for corpus in given]
        before = [corpus.get(key) for corpus in manifest.config["data"]["train"]]
        if now != before:
            return [f"data.train: {key} {now}, was {before}"]
    if samples.windows != saved.get("windows", samples.windows):
        return [f"data.train: windows {samples.windows}, was {saved['windows']}"]
    # Only rank 0 has both, and only it prints.
    if trainer.is_first and samples.fingerprints != (saved.get("contents") or samples.fingerprints):
        return ["data.train: made anew, of other ids"]
    return []
