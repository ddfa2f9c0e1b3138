"""A plain loop of PyTorch that goes on from its own checkpoint. torchrun starts its ranks again.

Appends the time at which each start has finished its first step to the file that the first argument
names, and keeps its checkpoint beside it.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 2


def main(times: Path, steps: int) -> None:
    """Train as one of torchrun's ranks."""
    torch.manual_seed(0)
    # torchrun's store keeps the addresses of the ranks that have ended, and torch 2.13 would
    # connect to these.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], dist.TCPStore(*address))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    layer = nn.TransformerEncoderLayer(24, 2, 40, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(nn.TransformerEncoder(layer, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, first = times.with_suffix(".pt"), 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first + 1, steps + 1):
        model(torch.randn(2, 16, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if dist.get_rank() == 0 and step == first + 1:
            with times.open("a") as file:
                file.write(f"{time.time()}\n")
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step}, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
