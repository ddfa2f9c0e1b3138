"""An nn.Module of one's own under the engine: trained, clipped, saved, and resumed on any ranks.

    python scripts/own_module.py OUT                                  # one rank
    torchrun --nproc-per-node=8 scripts/own_module.py OUT nvlink8     # or srun, one task a device

Learns a function of 16 numbers; started again it goes on from the newest whole checkpoint in OUT.
The second argument is a machine file's name or path (default: laptop).
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

from megafrontier.checkpoint.folder import delete, prune
from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import open_newest
from megafrontier.checkpoint.save import save
from megafrontier.common.errors import UserError, exit_on_fatal_error
from megafrontier.config import OptimizerConfig, load_machine
from megafrontier.launch.device import choose_device
from megafrontier.launch.rendezvous import join
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.gradients import clip_factor, global_norm
from megafrontier.parallel.env import identify
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.parallel.mesh import MeshShape
from megafrontier.partition import Engine, Placement, shard

STEPS, SAVE_EVERY, GLOBAL_BATCH, WIDTH = 60, 20, 64, 16


class Block(nn.Module):
    """What is gathered at a time: its parameters are used within its own forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 64),
            nn.Linear(64, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, and a head outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, hierarchy: Hierarchy) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step's samples, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
    mine = x.tensor_split(hierarchy.size)[hierarchy.rank].to(hierarchy.device)
    return mine, mine.sin().sum(1, keepdim=True)


def states(engine: Engine, optimizer: ShardedAdamW) -> dict[str, list[torch.Tensor]]:
    """This rank's shards: what a checkpoint holds."""
    return {"weight": [unit.master for unit in engine.units], **optimizer.states}


def resume(root: Path, engine: Engine, optimizer: ShardedAdamW) -> int:
    """Take up the newest whole checkpoint. Returns the steps done."""
    layouts = [unit.layout for unit in engine.units]
    index = engine.hierarchy.shard_index(engine.placement.optimizer)
    found = open_newest(
        root,
        lambda checkpoint: checkpoint.fill(layouts, states(engine, optimizer), *index),
        engine.hierarchy.world,
        print,
    )
    if found is None:
        return 0
    engine.restore(has_published=False)
    optimizer.restore(found.manifest.step)
    return found.manifest.step


def checkpoint(root: Path, step: int, engine: Engine, optimizer: ShardedAdamW) -> None:
    """Write one; the three newest are kept."""
    hierarchy, depth = engine.hierarchy, engine.placement.optimizer
    index, num_shards = hierarchy.shard_index(depth)
    held = states(engine, optimizer)
    types = {state: tensors[0].dtype for state, tensors in held.items()}
    layouts = [unit.layout for unit in engine.units]
    manifest = Manifest(step, step * GLOBAL_BATCH, layouts, num_shards, types)
    save(root, manifest, held, index, hierarchy.is_first_replica(depth), hierarchy.world)
    if hierarchy.rank == 0:
        delete(prune(root, keep=3, keep_every=0))


def train_step(step: int, model: nn.Module, engine: Engine, optimizer: ShardedAdamW) -> float:
    """One micro-batch and an update. Returns the mean loss."""
    hierarchy = engine.hierarchy
    x, y = batch(step, hierarchy)
    loss = (model(x.to(torch.bfloat16)).float() - y).square().sum()  # a sum over samples
    loss.backward()
    gradients = engine.finish_gradients()  # summed over all ranks, one fp32 shard for each unit
    counted = [unit.counts for unit in engine.units]
    norm = global_norm(gradients, counted, hierarchy.world) / GLOBAL_BATCH
    divisor = GLOBAL_BATCH / clip_factor(norm, max_norm=1.0)
    skip = (~norm.isfinite()).float()
    optimizer.step(gradients, lr=3e-3, divisor=divisor, skip=skip)
    engine.finish_step(skip)  # new weights to every rank, gradients to zero
    return hierarchy.world.sum(loss.detach().double().view(1)).item() / GLOBAL_BATCH


def main(root: Path, machine: str) -> None:
    """Train to the last step."""
    identity, described = identify(os.environ), load_machine(machine)
    levels = Levels.resolve(described.levels, identity.world_size)
    device = choose_device(identity, described.device.name)
    with join(identity, MeshShape(levels), device) as mesh:
        hierarchy = mesh.hierarchy()
        torch.manual_seed(0)  # the same first values on every rank
        model = Net()
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        placement = Placement.named("topo", levels)
        engine = shard(model, blocks, placement, hierarchy, dtype=torch.bfloat16)
        masters = [unit.master for unit in engine.units]
        decays = [unit.decay_stop for unit in engine.units]
        optimizer = ShardedAdamW(masters, decays, OptimizerConfig(weight_decay=0.01))
        step = resume(root, engine, optimizer)
        while step < STEPS:
            loss = train_step(step, model, engine, optimizer)
            step += 1
            if hierarchy.rank == 0 and step % 10 == 0:
                print(f"step {step}/{STEPS}  loss {loss:.4f}", flush=True)
            if step % SAVE_EVERY == 0:
                checkpoint(root, step, engine, optimizer)


if __name__ == "__main__":
    with exit_on_fatal_error("own_module.py"):
        if not 2 <= len(sys.argv) <= 3:
            raise UserError(f"{len(sys.argv) - 1} arguments, need OUT or OUT MACHINE")
        main(Path(sys.argv[1]), *(sys.argv[2:] or ["laptop"]))
