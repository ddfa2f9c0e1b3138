"""Ranks that are threads, on nodes that are folders, and the snapshots that they take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.local.snapshot import Snapshot
from megafrontier.checkpoint.local.store import SnapshotStore
from megafrontier.checkpoint.save import OwnShard
from megafrontier.config import SnapshotConfig
from megafrontier.parallel.env import Identity
from tests.checkpoint.helpers import (
    BY_BLOCK,
    STATES,
    Tensors,
    Threads,
    make_layouts,
    make_shards,
    make_tensors,
    own_shard,
    run_threads,
)

FIXED = {"config": {}, "rng": {"seed": 3}, "extra": {"windows": [9]}}


@dataclass
class Nodes:
    """Runs on `hosts`, one for each rank, whose memory lies in `root`."""

    root: Path
    hosts: Sequence[str] = ("a", "b")
    groups: Sequence[tuple[str, list[str]]] = field(default_factory=lambda: BY_BLOCK)
    copies: int = 1
    folder: str = ""
    directory: str = "run"
    is_new: bool = False
    log: list[str] = field(default_factory=list)

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    def start(self, body: Callable[["Rank"], Any]) -> list[Any]:
        """What `body` returns on each rank of a start. The first exception of a rank is raised."""
        (self.root / self.directory).mkdir(exist_ok=True)
        self.memory.mkdir(exist_ok=True)

        def rank_body(world: Threads) -> Any:
            rank = Rank(self, world)
            try:
                return body(rank)
            finally:
                rank.store.close(is_over=False)

        results = run_threads(len(self.hosts), rank_body)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def take(self, *steps: int, change: Callable[[int, dict], None] = lambda *_: None) -> list[Any]:
        """Take whole snapshots in one start. `change`: of a rank's shards before each."""
        return self.start(lambda rank: [rank.take(step, change) for step in steps])

    def load(self, stored_step: int = 0) -> tuple[int | None, Tensors | None, list[Snapshot]]:
        """Another start: the step that it goes on from, the tensors it has, and what it read."""
        found = self.start(lambda rank: rank.load(stored_step))
        snapshots = [snapshot for snapshot, _ in found]
        if snapshots[0] is None:
            assert snapshots == [None] * len(snapshots)
            return None, None, []
        (step,) = {snapshot.manifest.step for snapshot in snapshots}
        return step, _join(self, [shards for _, shards in found]), snapshots

    def files(self, pattern: str = "*", host: str = "*") -> list[Path]:
        return sorted(self.memory.glob(f"*/*/{host}/{pattern}"))


class Rank:
    """One rank of a start."""

    def __init__(self, nodes: Nodes, world: Threads) -> None:
        self.world, self.size = world, len(nodes.hosts)
        self.layouts = make_layouts(nodes.groups, self.size)
        folder = nodes.folder or str(nodes.memory)
        self.store = SnapshotStore(
            SnapshotConfig(1, folder, nodes.copies),
            nodes.root / nodes.directory,
            world,
            Identity(world.rank, self.size, 0, "slurm", host=nodes.hosts[world.rank]),
            self.own(make_shards(self.layouts, make_tensors(0), world.rank, self.size)),
            FIXED,
            lambda: nodes.is_new,
            nodes.log.append if world.rank == 0 else lambda line: None,
        )

    def own(self, shards: dict[str, list]) -> list[OwnShard]:
        return [own_shard(self.layouts, shards, self.world.rank, self.size)]

    def take(
        self, step: int, change: Callable[[int, dict], None] = lambda *_: None
    ) -> tuple[str | None, str | None]:
        """What was wrong with the snapshot, and with its copy."""
        shards = make_shards(self.layouts, make_tensors(step), self.world.rank, self.size)
        change(self.world.rank, shards)
        early = ["exp_avg"]
        extra = {"data": [step, 0]}
        pending = self.store.start(step, 1000 * step, extra, self.own(shards), early)
        extra["data"].append(7)
        pending.wait_copied()
        for tensors in shards.values():
            for tensor in tensors:
                tensor.fill_(7.0)  # behind the snapshot
        pending.wait(20)
        if self.world.all_true(pending.problem is None):
            self.store.commit(pending)
        else:
            self.store.drop(pending)
        self.world.barrier()
        return pending.problem, pending.copy_problem

    def load(self, stored_step: int) -> tuple[Snapshot | None, dict[str, list]]:
        shards = {
            state: [torch.zeros(unit.numel // self.size, dtype=dtype) for unit in self.layouts]
            for state, dtype in STATES.items()
        }
        rank = self.world.rank
        snapshot = self.store.open_newest(
            lambda found: found.fill(self.layouts, shards, rank, self.size), stored_step
        )
        self.store.keep(snapshot)
        self.world.barrier()
        return snapshot, shards


def _join(nodes: Nodes, shards: Sequence[dict[str, list]]) -> Tensors:
    layouts = make_layouts(nodes.groups, len(nodes.hosts))
    found: Tensors = {state: {} for state in STATES}
    for state in STATES:
        for number, unit in enumerate(layouts):
            flat = torch.cat([own[state][number] for own in shards])
            for e in unit.entries:
                found[state][e.name] = flat[e.offset : e.offset + e.numel].view(e.shape)
    return found
