"""Whether error feedback helps on the border between two stages of a pipeline.

    python -m scripts.benchmarks.wire_quality.feedback RUN [--wires int8,int4] [--batches 16]

Takes the model of a run's newest checkpoint on one process, in fp32, and rounds the hidden states
and their gradients in the middle of its blocks as the wire of a border does. Prints how far the
gradient of all parameters, summed over micro-batches, is from the exact one: without feedback, and
with the rounding error of one micro-batch added to the next one.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from megafrontier.checkpoint.folder import of_newest
from megafrontier.comm.wires.registry import Codec
from megafrontier.comm.wires.wire import make_wire
from megafrontier.commands.checkpoints import load_model, saved_config
from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import Config
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.training.trainer import open_loader

FEEDBACK = {
    "none": (),
    "gradients": ("gradients",),
    "hidden states": ("hidden states",),
    "both": ("hidden states", "gradients"),
}


class Border:
    """Rounds the output of a block and the gradient of this output with a codec."""

    def __init__(self, codec: Codec, feedback: tuple[str, ...]) -> None:
        self._codec = codec
        self._errors: dict[str, Tensor | None] = dict.fromkeys(("hidden states", "gradients"))
        self._feedback = feedback

    def __call__(self, _block: nn.Module, _inputs: object, out: Tensor) -> Tensor:
        received = out + (self._sent("hidden states", out.detach()) - out).detach()
        received.register_hook(partial(self._sent, "gradients"))
        return received

    def _sent(self, what: str, values: Tensor) -> Tensor:
        row = values.reshape(1, -1)
        message = row.new_empty(1, self._codec.message_length(row.numel()), dtype=self._codec.dtype)
        error = self._errors[what]
        if what in self._feedback and error is None:
            error = self._errors[what] = torch.zeros_like(row, dtype=torch.bfloat16)
        self._codec.encode(row, message, error)
        decoded = torch.empty_like(row)
        self._codec.decode(message, decoded)
        return decoded.view_as(values)


def load(run: Path, count: int) -> tuple[GPT, list[Batch]]:
    """The model of the newest checkpoint of a run, and the first micro-batches of its data."""

    def opened(path: Path) -> tuple[GPT, Config]:
        config = saved_config(path)
        return load_model(path, config, torch.device("cpu")), config

    model, config = of_newest(run, opened)
    loader = open_loader(config, "train", 0, 1)
    assert loader is not None
    steps = -(-count // loader.micro_batches)
    batches = [batch for step in range(steps) for batch in loader.step(step)]
    loader.close()
    return model, batches[:count]


def gradient(model: GPT, batches: list[Batch], border: Border | None) -> Tensor:
    """The gradient of all parameters, summed over the micro-batches, in one vector."""
    hooks = []
    if border is not None:
        middle = model.blocks[len(model.blocks) // 2 - 1]
        hooks.append(middle.register_forward_hook(border))
    model.zero_grad()
    for batch in batches:
        model(batch.tokens, batch.targets, batch.documents).backward()
    for hook in hooks:
        hook.remove()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(model: GPT, batches: list[Batch], wires: list[str]) -> Iterator[str]:
    """A row for each wire: the error of the gradient with each feedback, relative to its norm."""
    model.requires_grad_()
    exact = gradient(model, batches, None)
    yield "| wire | " + " | ".join(f"feedback: {name}" for name in FEEDBACK) + " |"
    yield "|---|" + "---:|" * len(FEEDBACK)
    for name in wires:
        codec = make_wire(name).codec
        found = (gradient(model, batches, Border(codec, of)) for of in FEEDBACK.values())
        errors = (float((each - exact).norm() / exact.norm()) for each in found)
        yield f"| {name} | {' | '.join(f'{error:.2%}' for error in errors)} |"


def main() -> None:
    """Read the command and print the table."""
    parser = argparse.ArgumentParser(prog="feedback", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--wires", default="int8,int4", help="comma-separated")
    parser.add_argument("--batches", type=int, default=16)
    given = parser.parse_args()
    with exit_on_fatal_error("feedback"):
        for line in compare(*load(given.run, given.batches), given.wires.split(",")):
            print(line, flush=True)


if __name__ == "__main__":
    main()
