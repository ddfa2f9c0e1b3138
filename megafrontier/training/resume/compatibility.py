"""Whether a checkpoint fits the configured model, and what else in the config has changed since.

All keys of `model` are compared, except those listed here; so a key that is new is compared.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.common.errors import UserError
from megafrontier.config import Config, ModelConfig, OptimizerConfig, config_to_dict
from megafrontier.config.building import build
from megafrontier.model.flops import parameter_specs
from megafrontier.optim.groups import STATES, OptimizerGroups
from megafrontier.training.resume.upcycle import Upcycled
from megafrontier.training.trainer import Trainer

ROTARY_KEYS = ("rotary_base", "rotary_scaling")
"""Keys of `model` whose change is a warning: longer sequences need other frequencies."""
MODEL_KEYS_NOT_REFUSED = {
    *ROTARY_KEYS,
    "dropout",  # reported
    "init",  # no effect on loaded weights
    "init_std",
    "vocab_multiple",  # the padded size is a shape, which is compared
}
MOE_KEYS_NOT_REFUSED = ("balance", "bias_rate", "loss_coefficient", "z_loss")
"""Keys of `model.moe` that change how experts are trained, not what they compute."""
ORDER_KEYS = (
    "run.seed",
    "model.sequence_length",
    "tokenizer",
    "data.split",
    "data.document_mask",
    "data.packing",
)
"""Keys whose change is a warning: sample numbers then stand for other tokens."""
CURRICULUM_KEYS = ("train.global_batch", "train.batch_warmup")
"""The same, if weights of corpora change at some steps."""
REPORTED_KEYS = (
    "train.steps",  # the schedule ends there
    "train.global_batch",
    "train.batch_warmup",
    "train.z_loss",
    "train.precision",
    "train.clip_grad_norm",
    "train.spike_loss",
    "train.spike_grad_norm",
    "train.spike_window",
    "model.dropout",
    *(f"model.moe.{key}" for key in MOE_KEYS_NOT_REFUSED),
)
REPORTED_SECTIONS = ("optimizer.", "schedule.")
"""Keys whose change is reported, because training goes on differently."""


def check_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise UserError if the checkpoint is of a model that computes something else, even if its
    weights have the same shapes."""
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
    before, now = _resolved(saved), _resolved(model)
    for key in now:
        if key not in MODEL_KEYS_NOT_REFUSED and now[key] != before.get(key):
            raise UserError(
                f"model.{key}: {now[key]}, but {checkpoint.path} was trained with {before[key]}"
            )


def check_optimizer(config: Config, checkpoint: Checkpoint) -> None:
    """Raise UserError if the checkpoint has the state of another optimizer than the parameter's, or
    lacks a state. One of weights only, such as an imported one, fits."""
    manifest = checkpoint.manifest
    saved = manifest.config.get("optimizer")
    if saved is None or not any(manifest.states.keys() & set(names) for names in STATES.values()):
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
        for state in STATES[optimizer]:
            if state not in manifest.states:
                raise UserError(f"{here}, but {checkpoint.path} has no {state}, need it, {advice}")


def _resolved(model: ModelConfig) -> dict[str, Any]:
    """The keys of `model`, with defaults that depend on other keys filled in."""
    is_learned = model.position == "learned"
    experts = {} if model.moe is None else asdict(model.moe)
    kept = {f"moe.{key}": experts[key] for key in experts if key not in MOE_KEYS_NOT_REFUSED}
    plain = asdict(model)
    attention, _ = plain.pop("attention"), plain.pop("mlp")
    return {
        **plain,
        **{f"attention.{key}": value for key, value in attention.items()},
        "attention.scale": model.attention.scale or model.head_dim**-0.5,
        "attention.out_bias": model.has_out_bias,
        "mlp.bias": model.has_mlp_bias,
        **kept,
        **({"moe.ffn_hidden": model.moe.ffn_hidden or model.mlp_hidden} if model.moe else {}),
        "moe": None if model.moe is None else "given",
        "kv_heads": model.num_kv_heads,
        "head_size": model.head_dim,
        "ffn_hidden": model.mlp_hidden,
        "qkv_bias": model.has_qkv_bias,
        "rotary_fraction": model.rotary_dims / model.head_dim,
        "sequence_length": model.sequence_length if is_learned else None,
    }


def saved_model(manifest: Manifest) -> ModelConfig | None:
    """The model that a checkpoint was trained with, if it has it. Keys that an older version lacked
    have their defaults; keys that only it had are left out."""
    saved = manifest.config.get("model")
    if not isinstance(saved, Mapping):
        return None
    known = {field.name for field in fields(ModelConfig)}
    values = {key: value for key, value in saved.items() if key in known}
    found: ModelConfig = build(ModelConfig, values, "model")
    return found


def changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """Lines on what has changed since the checkpoint and may be intended."""
    lines = rotary_changes(trainer.config, manifest)
    if not manifest.step:
        return lines
    changed = _changed_keys(trainer.config, manifest)
    keys: tuple[str, ...] = ORDER_KEYS
    if any(isinstance(corpus.weight, list) for corpus in trainer.config.data.train):
        keys += CURRICULUM_KEYS
    order = [changed[key] for key in keys if key in changed]
    different = order or corpus_changes(trainer, manifest)
    lines += [f"warning: {line}; samples are others from here on" for line in different]
    return lines + [
        line
        for key, line in changed.items()
        if key in REPORTED_KEYS or key.startswith(REPORTED_SECTIONS)
    ]


def rotary_changes(config: Config, manifest: Manifest) -> list[str]:
    """Warnings if rotary frequencies are not those of the checkpoint."""
    changed = _changed_keys(config, manifest)
    return [
        f"warning: {changed[f'model.{key}']}" for key in ROTARY_KEYS if f"model.{key}" in changed
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


def corpus_changes(trainer: Trainer, manifest: Manifest) -> list[str]:
    """A line if the training corpora have other weights or content, in whatever files they are.

    The order is one of all windows, so a corpus that has grown changes all of it.
    """
    samples, saved = trainer.loader.samples, manifest.extra
    weights = [corpus.weight for corpus in trainer.config.data.train]
    before = [corpus["weight"] for corpus in manifest.config["data"]["train"]]
    if weights != before:
        return [f"data.train: weights {weights}, was {before}"]
    if samples.windows != saved.get("windows", samples.windows):
        return [f"data.train: windows {samples.windows}, was {saved['windows']}"]
    # Only rank 0 has both, and only it prints.
    if trainer.is_first and samples.fingerprints != (saved.get("contents") or samples.fingerprints):
        return ["data.train: made anew, of other ids"]
    return []
