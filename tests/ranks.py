"""Run a function on several ranks, forked from this process, which has imported torch."""

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.local import fork_ranks
from megafrontier.launch.rendezvous import join
from megafrontier.parallel.env import identify
from megafrontier.parallel.hierarchy import Hierarchy, Levels
from megafrontier.parallel.mesh import Mesh, MeshShape, Splits

NAMES = ("pair", "node", "rack", "site", "world")


def make_levels(sizes: Sequence[int]) -> Levels:
    """Levels of these sizes, named pair, node, …, world."""
    return Levels((*NAMES[: len(sizes) - 1], "world"), tuple(sizes))


def share_devices(rank: int, ranks: int) -> dict[str, str]:
    """The environment of a rank with which ranks can share a device. NCCL and RCCL refuse two ranks
    of one host on one device, so they are told that the hosts differ."""
    if ranks <= torch.cuda.device_count():
        return {}
    return {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}


def run_ranks(
    sizes: Sequence[int], body: Callable[[Hierarchy], Any], on_gpu: bool = False
) -> list[Any]:
    """Run `body` on every rank of a hierarchy of these sizes, as `run_mesh` does."""
    return run_mesh(sizes, lambda mesh: body(mesh.hierarchy()), on_gpu)


def run_mesh(
    sizes: Sequence[int],
    body: Callable[[Mesh], Any],
    on_gpu: bool = False,
    splits: Splits | None = None,
) -> list[Any]:
    """Run `body` on every rank of a mesh whose levels have these sizes. Returns the results in rank
    order.

    Uses gloo, or GPUs with `on_gpu`; this process must not have used a GPU then.
    """
    levels = make_levels(sizes)
    shape = MeshShape(levels, splits or Splits())
    timeouts = replace(Timeouts.of(levels.ranks), collective=300.0)
    with tempfile.TemporaryDirectory() as folder:

        def rank_body() -> int:
            identity = identify(os.environ)
            device = torch.device("cpu")
            if on_gpu:
                os.environ.update(share_devices(identity.rank, levels.ranks))
                device = torch.device("cuda", identity.rank % torch.cuda.device_count())
            with join(identity, shape, device, timeouts) as mesh:
                result = body(mesh)
            Path(folder, str(identity.rank)).write_bytes(pickle.dumps(result))
            return 0

        code = fork_ranks(levels.ranks, rank_body)
        assert code == 0, f"a rank ended with code {code}; its traceback is above"
        return [pickle.loads(Path(folder, str(r)).read_bytes()) for r in range(levels.ranks)]
