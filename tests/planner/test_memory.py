"""The predicted memory and bytes of a step beside those of real ranks, which train on CPUs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from megafrontier.config import Config, MoEConfig, PredictionConfig, TrainConfig
from megafrontier.data.sampling.loader import Loader
from megafrontier.data.sampling.samples import Batch
from megafrontier.model.moe.router import Router
from megafrontier.parallel.mesh import Mesh, Splits
from megafrontier.plan.assemble import build_model
from megafrontier.plan.footprint import GIB
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.simulation import routing
from megafrontier.planner.simulation.dry_run import DryLoader
from megafrontier.planner.simulation.memory import ROUNDING, Memory
from megafrontier.planner.simulation.rank import STEPS
from megafrontier.planner.simulation.routing import RoutingKind, worst_routing
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.splits import token_dispatch
from megafrontier.splits.token_dispatch import PEAK
from megafrontier.training.loop import start_step
from megafrontier.training.trainer import Trainer, make_trainer
from tests.model.small_models import small_config
from tests.ranks import run_mesh

SIZES = 2, 2
WORST = 0.015
DEVICE = {"matrix_tflops": 0.1, "memory_gigabytes_per_second": 10}
MACHINE = {
    "levels": {
        "pair": {"size": 2, "gigabytes_per_second": 10},
        "world": {"size": 2, "gigabytes_per_second": 1},
    },
    "device": DEVICE,
}


def config_of(changes: dict[str, Any]) -> Config:
    """A small run; `changes` by `section.key`."""
    model = small_config(layers=4, hidden=64, heads=4, sequence_length=128)
    config = Config(
        machine=MACHINE, model=model, train=TrainConfig(steps=4, global_batch=16, micro_batch=2)
    )
    for key, value in {"train.precision": "fp32", "partition.overlap": "none", **changes}.items():
        section, name = key.split(".")
        if section == "machine":
            config = replace(config, machine={**MACHINE, "device": {**DEVICE, name: value}})
            continue
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


PREDICTING = {"model.position": "rotary", "model.prediction": PredictionConfig()}


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
            counting.memory.restart()
            result = start_step(trainer)
    sent = [counts["bytes"] for counts in result.read().comm.values()]
    return Measured(max(counting.memory.peaks).bytes / GIB, sent)


def build_trainer(config: Config, mesh: Mesh) -> Trainer:
    plan = resolve_plan(config, mesh.world.size)
    built = build_model(config, plan, mesh)
    built[1].pool.shards.keeps = not plan.machine.device.is_accelerator
    return make_trainer(config, plan, mesh, built, cast(Loader, RealLoader(config, plan, 100)))


GPU = {"machine.name": "GPU", "train.micro_batch": 4}
"""An accelerator frees gradients after the update. One micro-batch of a rank in a step."""
TOPO, BLOCK = {"partition.strategy": "topo"}, {"train.activation_checkpointing": "block"}
CASES: list[tuple[dict[str, int], list[dict[str, Any]]]] = [
    (
        {},
        [
            {**TOPO, "train.micro_batch": 1},
            {"partition.strategy": "zero3", "partition.weights_copy": False, **BLOCK},
            {"partition.strategy": "ddp", "train.activation_checkpointing": "selective", **GPU},
            {"partition.strategy": "zero2", "train.micro_batch": 4, "optimizer.ema": 0.99},
            {**TOPO, "train.activation_checkpointing": ["block", "selective"]},
        ],
    ),
    ({"tensor": 2}, [TOPO, {"partition.strategy": "mics", **BLOCK}]),
    ({"pipeline": 2}, [TOPO, {**TOPO, **PREDICTING}]),
    ({"tensor": 2, "pipeline": 2}, [{**TOPO, "parallel.schedule": "zero_bubble"}]),
]
MORE = [
    {"partition.strategy": strategy, **mode, "train.micro_batch": micro_batch}
    for strategy in ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", "topo")
    for mode, micro_batch in (({}, 4), (BLOCK, 1))
]
"""All placements."""


MOE = {"model.moe": MoEConfig(experts=8, active=2, ffn_hidden=64, shared_experts=1)}
ROUTED: list[Any] = [
    ({"expert": 4}, TOPO, "uniform", PEAK),
    ({"expert": 4}, {**TOPO, **BLOCK}, "one", 2.0),
    ({"expert": 4}, {"partition.strategy": "zero3"}, "full", 2.0),
    pytest.param(
        {}, {"partition.strategy": "zero2"}, "uniform", PEAK, marks=pytest.mark.exhaustive
    ),
]
"""Splits, configuration, routing, and how many times the average a rank may have at once."""


def choose(kind: RoutingKind, peak: float, ranks: int, tokens: int) -> torch.Tensor:
    """The experts of each token."""
    pairs = torch.tensor([*combinations(range(8), 2)])
    chosen = pairs[torch.arange(tokens) % len(pairs)]
    if kind == "uniform":
        return chosen
    chosen = pairs[torch.arange(tokens) % 15 - 15]  # not of the first rank
    chosen[: tokens if kind == "one" else int(min(peak / ranks, 1) * tokens)] = torch.arange(2)
    return chosen


def train_routed(config: Config, mesh: Mesh, decided: Callable[[int], torch.Tensor]) -> Measured:
    """`train` with a router that chooses `decided` experts, by the number of tokens."""

    def decide(self: Router, scores: torch.Tensor) -> torch.Tensor:
        return decided(len(scores))

    with patch.object(Router, "_choose", decide):
        return train(config, mesh)


@pytest.mark.parametrize(("splits", "case", "kind", "peak"), ROUTED)
def test_a_mixture_has_the_predicted_memory_with_balanced_and_with_the_worst_routing(
    splits: dict[str, int],
    case: dict[str, Any],
    kind: RoutingKind,
    peak: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_dispatch, "PEAK", peak)
    monkeypatch.setattr(routing, "PEAK", peak)
    config = config_of({**{f"parallel.{name}": n for name, n in splits.items()}, **MOE, **case})
    config = replace(config, model=replace(config.model, layers=2))
    predicted = simulate(config, resolve_plan(config, 4))
    decided = partial(choose, kind, peak, splits.get("expert", 1))
    ranks = run_mesh(
        SIZES, lambda mesh: train_routed(config, mesh, decided), splits=Splits(**splits)
    )
    real = max(rank.gib for rank in ranks)
    if kind == "uniform":
        assert predicted.gib == pytest.approx(real, rel=WORST)
        assert list(predicted.sent.values()) == pytest.approx(ranks[0].sent, rel=0.01)
    else:
        assert worst_routing(config) == kind
        assert predicted.worst_gib == pytest.approx(real, rel=WORST)
        assert predicted.worst_gib > 1.02 * predicted.gib


def check(splits: dict[str, int], cases: list[dict[str, Any]]) -> None:
    """Compare the prediction of each case with the one of four ranks that needs the most memory."""
    chosen = {f"parallel.{name}": size for name, size in splits.items()}
    configs = [config_of({**chosen, **case}) for case in cases]
    configs = [replace(one, model=replace(one.model, layers=2)) for one in configs]
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
