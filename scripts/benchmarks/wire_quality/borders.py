"""How far low-bit borders between the stages of a pipeline move a gradient.

    python -m scripts.benchmarks.wire_quality.borders RUN [--stages 4] [--steps 2]

Takes the model of a run's newest checkpoint on one process, in fp32, and rounds hidden states and
their gradients between its stages as the wire of a border does. Prints for each format the bits of
an element, and the error of the gradient of all parameters relative to its norm: with both rounded,
and with one of them. The gradient is that of `--steps` global batches of the validation part.
"""

import argparse
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from megafrontier.comm.rows import decode_rows, encode_rows
from megafrontier.comm.wires.block import INT4, INT8, BlockCodec
from megafrontier.commands.checkpoints import load_model, saved_config
from megafrontier.common.checkpoints import of_newest
from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import Config
from megafrontier.data.sampling.loader import open_loader
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from scripts.benchmarks.shared.tables import markdown


class _Int3(BlockCodec):
    """Rounds to 3 bits. Its messages have 4, because only the rounding is of interest."""

    largest = 3


FORMATS = {
    "int8": (INT8, 8),
    "int4": (INT4, 4),
    "int4, rotated": (INT4.with_rotation(), 4),
    "int3, rotated": (_Int3(4, INT4.block, rotates=True), 3),
}
"""By name the codec, and the bits of a code."""
HIDDEN, GRADIENTS = "hidden states", "gradients"


def sent(codec: BlockCodec, values: Tensor) -> Tensor:
    """The values [b, s, h] that arrive from a micro-batch's message."""
    row = values.reshape(1, -1)
    decoded = torch.empty_like(row)
    decode_rows(codec, encode_rows(codec, row), decoded)
    return decoded.view_as(values)


class Border:
    """A forward hook that rounds the output of a block, its gradient, or both."""

    def __init__(self, codec: BlockCodec, rounded: Collection[str]) -> None:
        self._codec, self._rounded = codec, rounded

    def __call__(self, _block: nn.Module, _inputs: object, out: Tensor) -> Tensor:
        received = out
        if HIDDEN in self._rounded:
            received = out + (sent(self._codec, out.detach()) - out).detach()
        if GRADIENTS in self._rounded:
            received = received.clone() if received is out else received
            received.register_hook(partial(sent, self._codec))
        return received


def load(run: Path, steps: int) -> tuple[GPT, list[Batch]]:
    """The model of a run's newest checkpoint, and micro-batches of its validation part."""

    def opened(path: Path) -> tuple[GPT, Config]:
        config = saved_config(path)
        return load_model(path, config, torch.device("cpu")), config

    model, config = of_newest(run, opened)
    loader = open_loader(config, "valid", 0, 1)
    assert loader is not None
    batches = [batch for step in range(steps) for batch in loader.step(step)]
    loader.close()
    return model.requires_grad_(), batches


def gradient(model: GPT, batches: list[Batch], stages: int, border: Border | None) -> Tensor:
    """The gradient of all parameters, summed over the micro-batches, in one vector."""
    blocks = [model.blocks[len(model.blocks) * i // stages - 1] for i in range(1, stages)]
    hooks = [block.register_forward_hook(border) for block in blocks if border is not None]
    model.zero_grad()
    for batch in batches:
        model(batch.tokens, batch.targets, batch.documents).backward()
    for hook in hooks:
        hook.remove()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(model: GPT, batches: list[Batch], stages: int) -> Iterator[list[str]]:
    """A row for each format."""
    exact = gradient(model, batches, stages, None)
    for name, (codec, bits) in FORMATS.items():
        row = [name, f"{bits + 16 / codec.block:.3f}"]
        for rounded in ((HIDDEN, GRADIENTS), (HIDDEN,), (GRADIENTS,)):
            found = gradient(model, batches, stages, Border(codec, rounded))
            row.append(f"{float((found - exact).norm() / exact.norm()):.2%}")
        yield row


def main() -> None:
    """Read the command and print the table."""
    parser = argparse.ArgumentParser(prog="borders", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    with exit_on_fatal_error("borders"):
        rows = list(compare(*load(given.run, given.steps), given.stages))
        print(markdown(["format", "bits", "both", HIDDEN, GRADIENTS], rows))


if __name__ == "__main__":
    main()
