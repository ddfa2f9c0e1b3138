"""What the commands on a finished checkpoint share: its config, its model, its tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megafrontier.checkpoint.format import BUFFER, OPTIMIZER, CheckpointCorrupt
from megafrontier.checkpoint.load import (
    Checkpoint,
    attached_problems,
    open_checkpoint,
    read_manifest,
)
from megafrontier.common.errors import UserError
from megafrontier.config import Config, config_from_dict, load_machine
from megafrontier.model.flops import parameter_shapes
from megafrontier.model.gpt import GPT
from megafrontier.partition.layout import Layout


def saved_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config that a checkpoint was trained with.

    It names the checkpoint's own copy of the tokenizer, unless `overrides` name another tokenizer.
    Raises UserError for overrides that do not fit, CheckpointCorrupt for a damaged tokenizer.
    """
    manifest = read_manifest(path)
    config = config_from_dict(dict(manifest.config), str(path), overrides)
    if (path / "tokenizer").is_dir() and not any(o.startswith("tokenizer=") for o in overrides):
        problem = next(attached_problems(path, manifest), None)
        if problem is not None:
            raise CheckpointCorrupt(problem)
        attached = {path / file.path for file in manifest.files}
        for file in sorted((path / "tokenizer").rglob("*")):
            if file not in attached and not file.is_dir():
                raise CheckpointCorrupt(f"{file}: not one of the checkpoint's files")
        config.tokenizer = str(path / "tokenizer")
    return config


def load_model(path: Path, config: Config, device: torch.device, state: str = "weight") -> GPT:
    """The model of a checkpoint on one device: fp32 on a CPU, bf16 on a GPU to save its memory.
    `state`: as for `check_state`.

    Raises UserError if the checkpoint is not whole.
    """
    with torch.device("meta"):
        model = GPT(config.model)
    # Read all parameters in one call, because every file holds a part of each of them.
    shapes = parameter_shapes(config.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout = Layout.build("model", shapes.items(), 1)
    flat = torch.empty(layout.numel, dtype=dtype, device=device)
    checkpoint = open_checkpoint(path)
    check_state(checkpoint, state)
    checkpoint.fill([layout], {state: [flat]}, 0, 1)
    buffers = dict(model.named_buffers())
    names = [name for name in checkpoint.manifest.buffers if not name.startswith(OPTIMIZER)]
    buffers |= checkpoint.tensors(BUFFER, names)
    values = dict(zip(shapes, layout.views(flat), strict=True))
    values |= {name: buffer.to(device) for name, buffer in buffers.items()}
    model.load_state_dict(values, assign=True)
    return model


def device_name(config: Config) -> str:
    """`machine.device.name`, or `any` if the machine file is missing here."""
    try:
        return load_machine(config.machine).device.name
    except UserError:
        return "any"


def check_state(checkpoint: Checkpoint, state: str) -> None:
    """Raise UserError if a checkpoint has no weights of this kind: `weight`, or `ema` for their
    moving average."""
    if state not in checkpoint.manifest.states:
        raise UserError(
            f"--weights: {state}, but {checkpoint.path} has none, need a run with optimizer.{state}"
        )
