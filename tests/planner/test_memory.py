"""The predicted memory and bytes of a step beside those of real ranks, which train on CPUs."""

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.config import Config, TrainConfig
from megafrontier.data.sampling.loader import Loader
from megafrontier.data.sampling.samples import Batch
from megafrontier.parallel.mesh import Mesh, Splits
from megafrontier.planner.simulation.dry_run import DryLoader
from megafrontier.planner.simulation.meter import ROUNDING, Memory
from megafrontier.planner.simulation.rank import STEPS
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.training.loop import start_step
from megafrontier.training.plan import GIB, resolve_plan
from megafrontier.training.trainer import Trainer, build_model, make_trainer
from tests.model.small_models import small_config
from tests.ranks import run_mesh

SIZES = 2, 2
WORST = 0.015
MACHINE = {
    "levels": {
        "pair": {"size": 2, "gigabytes_per_second": 10},
        "world": {"size": 2, "gigabytes_per_second": 1},
    },
    "device": {"matrix_tflops": 0.1, "memory_gigabytes_per_second": 10},
}


def config_of(changes: dict[str, Any]) -> Config:
    """A small run; `changes` by `section.key`."""
    model = small_config(layers=4, hidden=64, heads=4, sequence_length=128)
    config = Config(
        machine=MACHINE, model=model, train=TrainConfig(steps=4, global_batch=16, micro_batch=2)
    )
    for key, value in {"train.precision": "fp32", "partition.overlap": "none", **changes}.items():
        section, name = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


class CountTensors(TorchDispatchMode):
    """Counts the tensors that this process makes in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(ROUNDING[False])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPDEFS.get(func._schema.name)
        if own is not None:  # whose parts would not be seen
            with self:
                return own._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, list | tuple) else [out]
        self.memory.add(t for t in found if isinstance(t, torch.Tensor))
        return out


class RealLoader(DryLoader):
    """Micro-batches with values."""

    def step(self, step: int) -> list[Batch]:
        tokens = torch.randint(50, self._shape)
        return [Batch(tokens, tokens, None, 0) for _ in range(self.micro_batches)]


@dataclass
class Measured:
    gib: float
    sent: list[float]


def train(config: Config, mesh: Mesh) -> Measured:
    """Train as `simulate` does, but really. Bytes of the last step, memory at its peak."""
    with CountTensors() as counting:
        trainer = build_trainer(config, mesh)
        for _ in range(STEPS):
            counting.memory.peak = counting.memory.now
            result = start_step(trainer)
    sent = [counts["bytes"] for counts in result.read().comm.values()]
    return Measured(counting.memory.peak / GIB, sent)


def build_trainer(config: Config, mesh: Mesh) -> Trainer:
    plan = resolve_plan(config, mesh.world.size)
    built = build_model(config, plan, mesh)
    return make_trainer(config, plan, mesh, built, cast(Loader, RealLoader(config, plan, 100)))


TOPO, BLOCK = {"partition.strategy": "topo"}, {"train.activation_checkpointing": "block"}
CASES: list[tuple[dict[str, int], list[dict[str, Any]]]] = [
    (
        {},
        [
            {**TOPO, "train.micro_batch": 1},
            {"partition.strategy": "zero3", **BLOCK},
            {"partition.strategy": "ddp", "train.activation_checkpointing": "selective"},
            {"partition.strategy": "zero2", "train.micro_batch": 4, "optimizer.ema": 0.99},
        ],
    ),
    ({"tensor": 2}, [TOPO, {"partition.strategy": "mics", **BLOCK}]),
    ({"pipeline": 2}, [TOPO]),
    ({"tensor": 2, "pipeline": 2}, [{**TOPO, "parallel.schedule": "zero_bubble"}]),
]
MORE = [
    {"partition.strategy": strategy, **mode, "train.micro_batch": micro_batch}
    for strategy in ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", "topo")
    for mode, micro_batch in (({}, 4), (BLOCK, 1))
]
"""All placements."""


def check(splits: dict[str, int], cases: list[dict[str, Any]]) -> None:
    """Compare the prediction of each case with the one of four ranks that needs the most memory."""
    chosen = {f"parallel.{name}": size for name, size in splits.items()}
    configs = [config_of({**chosen, **case}) for case in cases]
    ranks = run_mesh(
        SIZES, lambda mesh: [train(config, mesh) for config in configs], splits=Splits(**splits)
    )
    errors = []
    for config, measured in zip(configs, zip(*ranks, strict=True), strict=True):
        predicted = simulate(config, resolve_plan(config, 4))
        real = max(measured, key=lambda rank: rank.gib)
        if "pipeline" not in splits:  # whose ranks differ, and the metrics have their mean
            assert list(predicted.sent.values()) == real.sent
        errors.append(predicted.gib / real.gib - 1)
    assert max(map(abs, errors)) < WORST, errors


@pytest.mark.parametrize(("splits", "cases"), CASES)
def test_predicted_memory_and_bytes_are_those_of_real_ranks(
    splits: dict[str, int], cases: list[dict[str, Any]]
) -> None:
    check(splits, cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("splits", [splits for splits, _ in CASES])
def test_every_placement_has_the_predicted_memory_and_bytes(splits: dict[str, int]) -> None:
    """42 configurations."""
    check(splits, MORE)
