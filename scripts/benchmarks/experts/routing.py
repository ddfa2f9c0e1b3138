"""Which experts the tokens of all ranks go to: uniform, worst, or as a trained router says."""

from pathlib import Path

import torch
from torch import Tensor

from megafrontier.config import ModelConfig
from megafrontier.config.model.moe import MoEConfig
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.model.moe.layer import MoE
from scripts.benchmarks.shared.measuring import ROOT

EXPERTS, ACTIVE, NODES = 32, 6, 4
STEPS, BATCH, LENGTH = 100, 4, 128


def uniform(tokens: int, groups: int = NODES) -> Tensor:
    """Distinct random experts int64 [tokens, k]; with fewer `groups` than nodes, of so many random
    nodes."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    best = torch.rand(tokens, NODES, generator=generator).topk(groups).indices
    is_open = torch.zeros(tokens, NODES).scatter_(1, best, 1.0)
    scores += is_open.repeat_interleave(EXPERTS // NODES, 1)
    return scores.topk(ACTIVE).indices


def worst(tokens: int) -> Tensor:
    """All tokens go to the same experts."""
    return torch.arange(ACTIVE).expand(tokens, ACTIVE).contiguous()


def natural(tokens: int) -> tuple[Tensor, float]:
    """What the router of the last block chooses after some steps on this repository's text, without
    any balancing, and the model's last loss."""
    config = ModelConfig(
        layers=2,
        hidden=128,
        heads=4,
        sequence_length=LENGTH,
        vocab_size=256,
        position="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        moe=MoEConfig(EXPERTS, ACTIVE, ffn_hidden=64, balance="none"),
    )
    model = GPT(config)
    initialise(model, 0)
    text = _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = _rows(text, BATCH, generator)
        loss = model(rows[:, :-1], rows[:, 1:].contiguous()) / rows[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _chosen(model, _rows(text, -(-tokens // LENGTH), generator))[:tokens], loss.item()


def _chosen(model: GPT, rows: Tensor) -> Tensor:
    found: list[Tensor] = []
    mixture = model.blocks[-1].mlp
    assert isinstance(mixture, MoE)
    mixture.router.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
    with torch.no_grad():
        model(rows[:, :-1])
    return found[0]


def _text() -> Tensor:
    files = [*sorted(ROOT.glob("docs/*.md")), *sorted(Path(ROOT, "megafrontier").rglob("*.py"))]
    raw = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _rows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def imbalance(chosen: Tensor, ranks: int) -> float:
    """Pairs of the fullest rank over those of the average rank."""
    counts = torch.bincount((chosen // (EXPERTS // ranks)).flatten(), minlength=ranks)
    return (counts.max() / counts.float().mean()).item()


def rows_leaving(chosen: Tensor, distinct: bool) -> float:
    """Rows that leave a node for a token, on average over the ranks: for each of its experts on
    another node, or with `distinct` for each other node that has some."""
    nodes = chosen // (EXPERTS // NODES)
    own = (torch.arange(len(chosen)) * NODES // len(chosen))[:, None]
    if not distinct:
        return (nodes != own).sum().item() / len(chosen)
    is_there = torch.zeros(len(chosen), NODES, dtype=torch.bool).scatter_(1, nodes, True)
    return (is_there.sum() - is_there.gather(1, own).sum()).item() / len(chosen)
