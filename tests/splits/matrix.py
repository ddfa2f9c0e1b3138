"""Training of a small GPT on any mesh and placement beside one process: losses, norms and every
parameter's gradient, in elements of the whole tensors.

With SGD, because AdamW makes large updates of gradients that are nothing but rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.config import ParallelConfig
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice, initialise
from megafrontier.model.loss import IGNORE_INDEX
from megafrontier.optim.gradients import global_norm
from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import ParamSpec, global_ranges, spec_of
from megafrontier.partition import Engine, Placement
from megafrontier.pipeline.division import Division, block_names, divide_model
from megafrontier.pipeline.runner import Pipeline, Work
from megafrontier.splits.apply import apply_splits
from tests.model.small_models import small_config
from tests.partition.sharding import shard
from tests.ranks import run_mesh

ROWS, LENGTH, CLIP, SEED = 8, 24, 0.3, 3
RATE = 0.1
"""With 0.5, one process in fp32 and in fp64 differ by more than the tolerance after 16 steps."""


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. `changes` are those of `small_config`."""

    changes: dict[str, Any] = field(default_factory=dict)
    masks: str = "none"
    accumulation: int = 1
    steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    """Of `shard`."""
    built: dict[str, Any] = field(default_factory=dict)
    """Options of the split model."""
    documents: bool = False
    z_loss: float = 0.0
    parallel: dict[str, Any] = field(default_factory=dict)
    """Keys of `parallel`, for a pipeline."""
    token_pieces: int = 1
    joined: tuple[int, ...] = ()


def documents(case: Case, step: int, first: int, rows: int) -> torch.Tensor | None:
    """The starts of the documents in some rows, which are of any length, one token too."""
    if not case.documents:
        return None
    starts = [
        (row - first) * LENGTH + start
        for row in range(first, first + rows)
        for start in {0, 1 + (row * 7 + step) % (LENGTH - 1), (row * 11 + 5 * step) % LENGTH}
    ]
    return torch.tensor([*sorted(starts), rows * LENGTH], dtype=torch.int32)


def batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [rows, length] of a step. Masked targets leave some rows without any, or
    the whole batch with one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(small_config().vocab_size, (ROWS, LENGTH + 1), generator=generator)
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if case.masks == "empty rows":
        targets[: ROWS // 2] = IGNORE_INDEX
        targets[:, :5] = IGNORE_INDEX
    elif case.masks == "one token":
        kept = targets[3, 7].clone()
        targets.fill_(IGNORE_INDEX)
        targets[3, 7] = kept
    return tokens, targets


Step = tuple[float, float, dict[str, torch.Tensor]]


def train_alone(case: Case) -> list[Step]:
    """The reference: plain PyTorch on one process."""
    model = GPT(small_config(**case.changes), loss_chunk_tokens=16, z_loss=case.z_loss)
    initialise(model, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    steps = []
    for step in range(case.steps):
        tokens, targets = batch(case, step)
        loss = model(tokens, targets, documents(case, step, 0, ROWS))
        optimizer.zero_grad()
        loss.backward()
        # Divided afterwards, because the losses of routers enter through their gradient alone.
        count = (targets != IGNORE_INDEX).sum()
        for parameter in model.parameters():
            parameter.grad /= count
        gradients = {name: p.grad.flatten().clone() for name, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        steps.append(((loss / count).item(), norm.item(), gradients))
    return steps


def split_model(
    case: Case, strategy: str, mesh: Any, wires: WorkWires = UNCHANGED
) -> tuple[GPT, Engine, dict[str, ParamSpec]]:
    """This rank's part of the model, its engine, and the specs of its parameters. `wires`: of
    activations and tokens."""
    with torch.device("meta"):
        built = {"loss_chunk_tokens": 16, "z_loss": case.z_loss, **case.built}
        model = GPT(small_config(**case.changes), **built)
    division = Division.of(ParallelConfig(**case.parallel), mesh.splits.pipeline, model.config)
    divide_model(model, division, mesh)
    connect = apply_splits(model, mesh, wires, wires, case.token_pieces, case.joined)
    specs = {name: spec_of(name, parameter) for name, parameter in model.named_parameters()}
    engine = shard(
        model,
        model.units(),
        Placement.named(strategy, mesh.hierarchy().levels),
        mesh,
        initial=partial(initial_slice, SEED),
        stages=block_names(model, division, mesh.pipeline_rank),
        **case.options,
    )
    connect(engine)
    return model, engine, specs


def train_split(
    case: Case, strategy: str, mesh: Any, wires: WorkWires = UNCHANGED
) -> list[tuple[float, float, list[Any]]]:
    """Loss, norm and this rank's parts (name, first, values) of each step's gradients."""
    model, engine, specs = split_model(case, strategy, mesh, wires)
    masters = [unit.master for unit in engine.units]
    optimizer = torch.optim.SGD(masters, lr=RATE, momentum=0.9)
    pipeline = connected(case, mesh, model, engine, wires)
    return [
        train_step(case, step, mesh, model, engine, optimizer, specs, pipeline)
        for step in range(case.steps)
    ]


def connected(
    case: Case, mesh: Any, model: GPT, engine: Engine, wires: WorkWires = UNCHANGED
) -> Pipeline | None:
    """The pipeline of a model whose stages this rank has some of. `wires`: of hidden states."""
    if mesh.splits.pipeline == 1:
        return None
    division = Division.of(ParallelConfig(**case.parallel), mesh.splits.pipeline, model.config)
    dtype = case.options.get("dtype", torch.float32)
    return Pipeline(model, engine, mesh, division, dtype, wires)


def train_step(case, step, mesh, model, engine, optimizer, specs, pipeline=None):
    tokens, targets = (part.chunk(mesh.data_size)[mesh.data_rank] for part in batch(case, step))
    count = (batch(case, step)[1] != IGNORE_INDEX).sum()
    total = torch.zeros(1, dtype=torch.float64)
    parts = list(
        zip(tokens.chunk(case.accumulation), targets.chunk(case.accumulation), strict=True)
    )
    batches = []
    for number, (some, goals) in enumerate(parts):
        first = mesh.data_rank * len(tokens) + number * len(some)
        batches.append(Batch(some, goals, documents(case, step, first, len(some)), first))
    if mesh.splits.pipeline > 1:
        total += pipeline.train(Work(batches))[:1] * mesh.counts_loss
    for number, part in enumerate(batches, start=1) if mesh.splits.pipeline == 1 else ():
        loss = model(part.tokens, part.targets, part.documents)
        with engine.no_sync(number < len(parts)):
            loss.backward()
        total += loss.detach() * mesh.counts_loss
    gradients = [gradient.div_(count) for gradient in engine.finish_gradients()]
    norm = global_norm(gradients, [unit.counts for unit in engine.units], mesh.world)
    found = [
        (specs[entry.name].name, start, gradient[at + moved : at + moved + stop - start].clone())
        for unit, gradient in zip(engine.units, gradients, strict=True)
        for entry, first, last, at in unit.layout.within(*unit.range)
        for moved, start, stop in _ranges(specs[entry.name], first, last)
    ]
    for unit, gradient in zip(engine.units, gradients, strict=True):
        unit.master.grad = gradient * min(1.0, CLIP / (norm.item() + 1e-6))
    optimizer.step()
    engine.finish_step(torch.zeros(()))
    return (mesh.world.sum(total) / count).item(), norm.item(), found


def _ranges(spec, first, last):
    """(offset among the elements, start, stop in the whole tensor) of elements of a box."""
    moved = 0
    for start, stop in global_ranges(spec, first, last):
        yield moved, start, stop
        moved += stop - start


def assert_equal(found: list[list[Any]], expected: list[Step]) -> None:
    """`found`: of each rank. Together the ranks must have every element of every gradient."""
    for number, (loss, norm, gradients) in enumerate(expected):
        seen = {name: torch.zeros(len(gradient)) for name, gradient in gradients.items()}
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for rank in found:
            own_loss, own_norm, parts = rank[number]
            assert abs(own_loss - loss) <= 1e-5 * max(1.0, abs(loss)), (number, own_loss, loss)
            assert abs(own_norm - norm) <= 1e-6 * norm, (number, own_norm, norm)
            for name, start, values in parts:
                part = gradients[name][start : start + len(values)]
                torch.testing.assert_close(
                    values,
                    part,
                    rtol=1e-4,
                    atol=1e-5 * largest,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
                seen[name][start : start + len(values)] += 1
        assert all((count > 0).all() for count in seen.values())


MeshCase = tuple[Sequence[int], Splits, str, Case]


def by_mesh(cases: Sequence[MeshCase], more: Sequence[MeshCase] = ()) -> list[Any]:
    """The sizes, the splits, and the strategies and cases of each mesh, whose ranks start once for
    all of them. Those of `more` run with --exhaustive only."""
    found = []
    for some, marks in ((cases, ()), (more, pytest.mark.exhaustive)):
        meshes: dict[tuple[Sequence[int], Splits], list[tuple[str, Case]]] = {}
        for sizes, splits, strategy, case in some:
            meshes.setdefault((sizes, splits), []).append((strategy, case))
        found += [pytest.param(*mesh, of_mesh, marks=marks) for mesh, of_mesh in meshes.items()]
    return found


def assert_cases(sizes: Sequence[int], splits: Splits, cases: Sequence[tuple[str, Case]]) -> None:
    """Compare each case under its strategy with one process. The ranks start once."""

    def body(mesh: Any) -> list[list[Any]]:
        return [train_split(case, strategy, mesh) for strategy, case in cases]

    results = zip(*run_mesh(sizes, body, splits=splits), strict=True)
    expected = {key: train_alone(case) for key, case in {id(c): c for _, c in cases}.items()}
    for (strategy, case), found in zip(cases, results, strict=True):
        try:
            assert_equal(found, expected[id(case)])
        except AssertionError as error:
            raise AssertionError(f"{strategy}, {case}: {error}") from None


SWEPT = ("ddp", "zero1", "zero3", "topo")


def sweep(sizes: Sequence[int], splits: Splits, cases: Sequence[Case]) -> None:
    """Compare each case under each strategy of `SWEPT` with one process. The ranks start once."""
    assert_cases(sizes, splits, [(strategy, case) for case in cases for strategy in SWEPT])


def saved_bytes(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward for its backward, without parameters."""
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*inputs)
    assert loss.requires_grad
    return sum(found.values())
