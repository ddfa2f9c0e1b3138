"""Masters that are updated under the next forward, on the device or the host: the same numbers."""

import threading
from dataclasses import replace

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.parallel.mesh import Splits
from megafrontier.plan.footprint import host_gib, state_gib
from megafrontier.plan.refuse import check_host_memory
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.callbacks.save import start_saving
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.loop import start_step, train_step
from megafrontier.training.resume.resume import resume
from tests import runs
from tests.ranks import run_mesh

OFFLOAD = "partition.offload.optimizer=cpu"
OVERLAP = "partition.overlap_update=true"
SMALL = ("train.global_batch=8", "train.micro_batch=1", "train.loss_scale=8")
MUON = "optimizer.groups=[{match: 'matrix:blocks.*', name: muon}]"
NONE = "partition.overlap=none"
PLAIN = [
    ("train.precision=bf16", "partition.wires=low", "partition.overlap=full", MUON),
    ("train.precision=fp32", "partition.strategy=ddp", "optimizer.ema=0.9"),
    ("train.precision=fp16", "partition.strategy=zero3", "optimizer.name=sgd", NONE),
]
SPLIT = [("parallel.pipeline=2", "optimizer.fused=none", "machine=laptop")]
ALONE = [("train.precision=bf16", "machine=laptop")]


class Halve(Callback):
    """Changes gradients in place, as a callback may."""

    def before_optimizer(self, trainer, gradients):
        for gradient in gradients:
            gradient.mul_(0.5)


class HeldBytes(Callback):
    """Bytes of gradient shards on the device when the gradients are complete."""

    def __init__(self, pool):
        self.pool, self.most = pool, 0

    def before_optimizer(self, trainer, gradients):
        self.most = self.pool.held_bytes


class MoveMasters(Callback):
    def after_optimizer(self, trainer, stats):
        trainer.engine.units[0].master.zero_()


def steps(trainer, count=3):
    """Losses and norms of some steps, the last but one of which is skipped."""
    found = []
    for step in range(count):
        is_spike = float(step == count - 2)
        trainer.spikes.detect = lambda *_, is_spike=is_spike: torch.tensor(
            is_spike, dtype=torch.float64
        )
        result = start_step(trainer, [Halve()] if step == 0 else []).read()
        found.append((result.loss, result.grad_norm))
    return found


def states(trainer):
    trainer.engine.finish_publishing()
    kept = trainer.optimizer.states.values()
    shards = [shard for of_units in kept for shard in of_units if shard is not None]
    tensors = [*(unit.master for unit in trainer.engine.units), *shards]
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize(
    ("sizes", "splits", "cases"),
    [
        ((2, 2, 1), Splits(), PLAIN),
        ((2,), Splits(pipeline=2), SPLIT),
        ((1,), Splits(), ALONE),
    ],
)
def test_losses_norms_and_states_are_those_of_updates_at_once_to_the_bit(
    folder, sizes, splits, cases
):
    def train(mesh, *chosen):
        with runs.open_trainer(runs.load(folder / "config.yaml", *SMALL, *chosen), mesh) as trainer:
            # Gradients leave early, as on an accelerator.
            trainer.engine.pool.shards.keeps = not {OFFLOAD, OVERLAP} & set(chosen)
            return steps(trainer), trainer.optimizer.steps, states(trainer)

    def body(mesh):
        differing = []
        for chosen in cases:
            *numbers, tensors = train(mesh, *chosen)
            for late in (OFFLOAD,) if NONE in chosen else (OFFLOAD, OVERLAP):
                *others, found = train(mesh, *chosen, late)
                if numbers != others or not all(map(torch.equal, tensors, found)):
                    differing.append((chosen, late, numbers, others))
        return differing

    assert not any(run_mesh(sizes, body, splits=splits))


def test_a_checkpoint_of_either_kind_goes_on_as_the_other_to_the_bit(folder):
    always = (*SMALL, "machine=laptop", "train.precision=bf16")

    def body(mesh, first, second):
        name = f"run.directory={folder}/{first}"
        config = runs.load(folder / "config.yaml", *always, name, *first)
        with runs.open_trainer(config, mesh) as trainer:
            train_step(trainer)
            start_saving(trainer).finish()
            expected = [train_step(trainer).loss for _ in range(2)]
        config = runs.load(folder / "config.yaml", *always, name, *second)
        with runs.open_trainer(config, mesh) as trainer:
            resume(trainer, RunLogger(None))
            return expected, [train_step(trainer).loss for _ in range(2)]

    for first, second in (((OFFLOAD,), ()), ((), (OVERLAP,)), ((OVERLAP,), (OFFLOAD,))):
        for expected, found in run_mesh((2,), lambda mesh, a=first, b=second: body(mesh, a, b)):
            assert found == expected


@pytest.mark.parametrize("late", [OFFLOAD, OVERLAP])
def test_a_forward_waits_for_updates_of_the_next_units_alone_and_gradients_leave_early(
    folder, late
):
    def body(mesh):
        chosen = (late, "machine=laptop", "train.micro_batch=16")
        config = runs.load(folder / "config.yaml", *chosen)
        with runs.open_trainer(config, mesh) as trainer:
            begun, update = threading.Event(), trainer.optimizer._update_late
            waited = []

            def slow(optimizer, index, *rest):
                if index == len(trainer.engine.units) - 1:
                    waited.append(begun.wait(20))
                update(optimizer, index, *rest)

            trainer.optimizer._update_late = slow
            pool = trainer.engine.pool.shards
            pool.keeps = False  # as on an accelerator
            held = HeldBytes(pool)
            start_step(trainer, [held]).read()
            handle = trainer.model.embedding.register_forward_hook(lambda *_: begun.set())
            train_step(trainer)
            handle.remove()
            trainer.engine.finish_publishing()
            sizes = [unit.layout.numel * 4 for unit in trainer.engine.units]
            most = sum(sizes[:2] if late == OFFLOAD else sizes)  # the last two, or all
            return waited, held.most == most, pool.held_bytes

    assert run_mesh((1,), body) == [([True, True], True, 0)]


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ("optimizer.fused=apex", "optimizer.fused: apex, need torch or none"),
        ("log.callbacks=[tests.training.test_late_updates.MoveMasters]", "may change masters"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_in_one_line(folder, chosen, line):
    with pytest.raises(UserError, match=line):
        runs.check(folder / "config.yaml", 4, OFFLOAD, chosen)


def test_a_plan_counts_the_optimizers_state_on_the_host_alone(folder):
    machine = "machine={levels: {world: {}}, device: {name: any GPU, host_memory_gib: 1}}"

    def of(offload):
        config = runs.load(folder / "config.yaml", machine, "train.precision=bf16", offload)
        return config, resolve_plan(config, 2)

    (config, plan), (other, plain) = of(OFFLOAD), of("partition.offload.optimizer=none")
    state = state_gib(other, plain) - state_gib(config, plan)
    assert host_gib(config, plan) == pytest.approx(state * 16 / 12)
    assert host_gib(other, plain) == 0
    step, usual = simulate(config, plan, UNKNOWN), simulate(other, plain, UNKNOWN)
    assert step.memory["optimizer"] == 0
    assert step.gib == pytest.approx(usual.gib - usual.memory["optimizer"], rel=0.01)
    check_host_memory(config, plan, 1)
    less = replace(plan.machine.device, host_memory_gib=host_gib(config, plan) * 0.9)
    too_small = replace(plan, machine=replace(plan.machine, device=less))
    with pytest.raises(UserError, match=r"host_memory_gib: .* for each rank, need"):
        check_host_memory(config, too_small, 1)


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (NONE, "partition.overlap: none, need safe or full with partition.overlap_update"),
        (OFFLOAD, "offload.optimizer: cpu, need none with partition.overlap_update, which it"),
        (
            "log.callbacks=[tests.training.test_late_updates.MoveMasters]",
            "need partition.overlap_update",
        ),
    ],
)
def test_what_cannot_overlap_updates_is_refused_in_one_line(folder, chosen, line):
    with pytest.raises(UserError, match=line):
        runs.check(folder / "config.yaml", 4, OVERLAP, chosen)
