"""`model: from_checkpoint`: the model of the checkpoint that a run begins with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafrontier.common.checkpoints import (
    MANIFEST,
    MANIFEST_LIMIT,
    checkpoints_of,
    list_checkpoints,
    newest,
)
from megafrontier.common.errors import UserError, as_fatal_error
from megafrontier.common.parsing import parse_json, read_text
from megafrontier.config.building import known_values
from megafrontier.config.model.gpt import ModelConfig

FROM_CHECKPOINT = "from_checkpoint"


def read_saved_model(directory: str, resume: str) -> dict[str, Any]:
    """The keys of `model` in the newest checkpoint of the run in `directory`, or else of the path
    in `checkpoint.resume`. Keys that this version does not have are left out.

    Raises UserError if there is no checkpoint, or none that has its model; StorageFailed.
    """
    path = _checkpoint(directory, resume)
    try:
        values = parse_json(read_text(path / MANIFEST, MANIFEST_LIMIT))
    except OSError as error:
        raise as_fatal_error(error, f"{path / MANIFEST}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path / MANIFEST}: not sound: {error}") from error
    config = values.get("config") if isinstance(values, Mapping) else None
    saved = config.get("model") if isinstance(config, Mapping) else None
    if not isinstance(saved, Mapping):
        fits = "which does not say what its model is; need the keys of model"
        raise UserError(f"model: {FROM_CHECKPOINT}, but the checkpoint is {path}, {fits}")
    return known_values(ModelConfig, saved)


def _checkpoint(directory: str, resume: str) -> Path:
    own = list_checkpoints(checkpoints_of(directory))
    if own:
        return own[-1]
    if resume in ("auto", "never"):
        there = f"checkpoint.resume is {resume} and {directory} has no checkpoints"
        fits = "need the path of a checkpoint in checkpoint.resume"
        raise UserError(f"model: {FROM_CHECKPOINT}, but {there}; {fits}")
    try:
        return newest(Path(resume))
    except UserError as error:
        raise UserError(f"checkpoint.resume: {error}") from error
