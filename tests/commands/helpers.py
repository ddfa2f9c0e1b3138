"""What tests of the commands share: their output, and the loss of a run by another road."""

import re
import shlex
from pathlib import Path

import torch

from megafrontier.cli import main
from megafrontier.commands.checkpoints import saved_config
from megafrontier.common.checkpoints import newest
from megafrontier.data.sampling.loader import open_loader

GENERATE = "megafrontier.commands.generate."
CONVERT, EVALUATE = "megafrontier.commands.convert.", "megafrontier.commands.evaluate."
CHECKPOINTS = "megafrontier.commands.checkpoints."


DOCS = Path(__file__).parents[2] / "docs"


def commands_of(page, heading):
    """The words of the commands in the first block of them below a heading of a page of docs."""
    text = (DOCS / page).read_text().partition(f"# {heading}\n")[2]
    block = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert {program for program, *_ in lines} == {"megafrontier"}
    return [words for _, *words in lines]


def way_to_fine_tune():
    """The commands of the page about fine-tuning, with fewer steps. Beside my-hf in the current
    folder, the page's chats are written."""
    chat = re.findall(r"```json\n(.*\n)```", (DOCS / "fine-tuning.md").read_text())[0]
    Path("chats.jsonl").write_text(chat * 40)
    made = commands_of("fine-tuning.md", "In three commands")
    assert [words[0] for words in made] == ["import", "prepare", "train"]
    smaller = ("--nproc", "1", "train.steps=3", "train.global_batch=8", "optimizer.lr=1e-2")
    return [*made[:2], [*made[2], *smaller]]


def run_command(capfd, *words):
    assert main([str(word) for word in words]) == 0
    return capfd.readouterr().out


def numbers(line):
    """(loss, perplexity, bits per byte, tokens, bytes) of a line of `evaluate`."""
    found = re.search(
        r"loss ([\d.]+)  perplexity ([\d.]+)  bits per byte ([\d.]+)  \((\d+) tokens, (\d+) bytes",
        line,
    )
    assert found, line
    return [float(number) for number in found.groups()]


@torch.no_grad()
def whole_model_loss(life, model_loss):
    """Nats, tokens and text of the same validation samples, by another road."""
    config = saved_config(newest(life / "run"))
    samples = open_loader(config, "valid", 0, 1).samples
    batch = samples.batch(0, 2 * config.train.global_batch)
    return model_loss(batch).item(), batch, config
