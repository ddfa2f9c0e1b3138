"""The state of a small model, sharded as a run would shard it, and ranks that are threads."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.load import Checkpoint
from megafrontier.checkpoint.save import Attach, OwnShard, save
from megafrontier.checkpoint.sets import ShardSet, StoredUnit
from megafrontier.parallel.world import World
from megafrontier.partition.layout import Layout

Tensors = dict[str, dict[str, torch.Tensor]]
STATES = {"weight": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
SHAPES = {
    "embedding.weight": (37, 13),
    "blocks.0.attention.weight": (13, 39),
    "blocks.0.norm.weight": (13,),
    "blocks.0.mlp.weight": (3, 5, 67),
    "blocks.1.attention.weight": (13, 39),
    "blocks.1.norm.weight": (1,),
    "head.weight": (37, 13),
}
BY_BLOCK = [
    ("embedding", ["embedding.weight"]),
    ("block 0", [name for name in SHAPES if name.startswith("blocks.0")]),
    ("block 1", [name for name in SHAPES if name.startswith("blocks.1")]),
    ("head", ["head.weight"]),
]
ALL_IN_ONE = [("all", [*reversed(SHAPES)])]
EACH_ALONE = [(name, [name]) for name in SHAPES]


class Threads(World):
    """One rank of a world of threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list) -> None:
        super().__init__(rank, size, torch.device("cpu"))
        self._barrier, self._slots = barrier, slots

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._all(values).sum(0)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return self._all(values).amax(0)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return self._all(values)

    def _all(self, values: torch.Tensor) -> torch.Tensor:
        self._slots[self.rank] = values
        self._barrier.wait(20)
        found = torch.stack(self._slots)
        self._barrier.wait(20)
        return found


def run_threads(size: int, body: Callable[[Threads], Any]) -> list[Any]:
    """What `body` returns or raises on each of `size` ranks."""
    barrier, slots = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def rank_body(rank: int) -> None:
        try:
            results[rank] = body(Threads(rank, size, barrier, slots))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def make_tensors(seed: int = 0, states: dict[str, torch.dtype] = STATES) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        state: {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
        for state, dtype in states.items()
    }


def make_layouts(groups: Sequence[tuple[str, list[str]]], num_shards: int) -> list[Layout]:
    return [
        Layout.build(unit, [(n, SHAPES[n]) for n in names], num_shards) for unit, names in groups
    ]


def make_shards(
    layouts: Sequence[Layout], tensors: Tensors, index: int, num_shards: int
) -> dict[str, list]:
    """A rank's shards of every state and unit."""
    shards: dict[str, list] = {}
    for state, values in tensors.items():
        for unit in layouts:
            flat = torch.zeros(unit.numel, dtype=values[unit.entries[0].name].dtype)
            for entry in unit.entries:
                stop = entry.offset + entry.numel
                flat[entry.offset : stop] = values[entry.name].flatten()
            shards.setdefault(state, []).append(flat.chunk(num_shards)[index].clone())
    return shards


def make_manifest(step: int, **more: Any) -> Manifest:
    return Manifest(step=step, **({"tokens": step * 1000, "slice_elements": 100} | more))


def own_shard(
    layouts: Sequence[Layout],
    shards: Mapping[str, Sequence[torch.Tensor]],
    index: int = 0,
    num_shards: int = 1,
    is_writer: bool = True,
) -> OwnShard:
    """A rank's shards of the only set of a checkpoint, whose units all have the states of
    `shards`: `shards[state][u]` is shard number `index` of the flat buffer with layout
    `layouts[u]`."""
    states = {state: tensors[0].dtype for state, tensors in shards.items()}
    units = [StoredUnit.of(layout, states) for layout in layouts]
    return OwnShard(ShardSet("", num_shards, units), index, is_writer, shards)


def save_all(
    root: Path,
    step: int = 100,
    num_shards: int = 8,
    groups: Sequence[tuple[str, list[str]]] = BY_BLOCK,
    tensors: Tensors | None = None,
    attach: Attach | None = None,
    **more: Any,
) -> Path:
    """Save from one rank for each shard. Every rank must return the same folder."""
    layouts = make_layouts(groups, num_shards)
    tensors = make_tensors(step) if tensors is None else tensors
    manifest = make_manifest(step, **more)

    def body(world: Threads) -> Path:
        shards = make_shards(layouts, tensors, world.rank, num_shards)
        own = [own_shard(layouts, shards, world.rank, num_shards)]
        return save(root, manifest, own, world, attach)

    results = run_threads(num_shards, body)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert len(set(results)) == 1
    return results[0]


def load_all(
    checkpoint: Checkpoint,
    num_shards: int,
    groups: Sequence[tuple[str, list[str]]],
    states: dict[str, torch.dtype] = STATES,
) -> Tensors:
    """Fill all shards and put the tensors together again. Checks the padding."""
    layouts = make_layouts(groups, num_shards)
    loaded: Tensors = {state: {} for state in states}
    shards = [
        {
            s: [torch.zeros(u.numel // num_shards, dtype=d) for u in layouts]
            for s, d in states.items()
        }
        for _ in range(num_shards)
    ]
    for index in range(num_shards):
        checkpoint.fill(layouts, shards[index], index, num_shards)
    for state in states:
        for u, unit in enumerate(layouts):
            flat = torch.cat([shards[index][state][u] for index in range(num_shards)])
            for e in unit.entries:
                loaded[state][e.name] = flat[e.offset : e.offset + e.numel].view(e.shape).clone()
                flat[e.offset : e.offset + e.numel] = 0
            assert not flat.any(), "padding must stay as it was"
    return loaded


def assert_same(found: Tensors, need: Tensors) -> None:
    for state, values in need.items():
        for name, tensor in values.items():
            assert torch.equal(found[state][name], tensor), f"{state}/{name}"


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def contents(root: Path) -> dict[str, bytes]:
    """Every file under a folder, by relative path."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
