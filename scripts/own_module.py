"""Train an nn.Module of your own, sharded: clipped, saved, and resumed on any number of ranks.

    python scripts/own_module.py OUT                                  # one rank
    torchrun --nproc-per-node=8 scripts/own_module.py OUT nvlink8     # or srun, one task a device

Started again, it goes on from the newest checkpoint in OUT.
"""

import argparse

import torch
from torch import nn

import megafrontier

STEPS, SAVE_EVERY, GLOBAL_BATCH, WIDTH = 60, 20, 64, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for block in self.blocks:
            out = out + block(out).relu()
        return nn.functional.mse_loss(self.head(out), x.sin().sum(1, keepdim=True))


def batch(step: int, part: int = 0, parts: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=generator).chunk(parts)[part]


def main(out: str, machine: str) -> None:
    mesh = megafrontier.init_mesh(machine, exit_on_error=True)
    torch.manual_seed(0)  # the same first values on every rank
    model = megafrontier.shard(Net(), mesh, blocks="blocks.*")
    optimizer = megafrontier.AdamW(model, lr=3e-3)
    for step in range(megafrontier.load(model, optimizer, out), STEPS):
        loss = model(batch(step, mesh.data_rank, mesh.data_size).to(mesh.device))
        loss.backward()
        megafrontier.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = mesh.world.sum(loss.detach().double().view(1)).item() / mesh.world.size
        if mesh.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{STEPS}  loss {mean:.6f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0:
            megafrontier.save(model, optimizer, out, step + 1, keep=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="folder of the checkpoints")
    parser.add_argument("machine", nargs="?", default="laptop", help="a machine's name or file")
    main(**vars(parser.parse_args()))
