"""The computation and the comm streams never use the same memory at once.

A CPU hides such races, because a task has usually run when the computation goes on. Simulated
streams show them.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.config import OptimizerConfig
from megafrontier.optim import unit_optimizers
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.unit_optimizers import UnitOptimizers
from megafrontier.partition import Placement, shard
from megafrontier.partition import engine as engine_module
from megafrontier.partition.rules import Overlap, StateRules
from tests.partition.races import COMPUTATION, ClockHandle, Races
from tests.partition.tiny import TinyModel, backward, batch, preset
from tests.ranks import run_ranks

TOPO = "topo", "low", True, "bf16"
HPZ = "hpz", "zero++", False, "bf16"
ZERO2 = "zero2", "exact", False, "fp32"
ZERO3 = "zero3", "exact", False, "fp32"
DDP = "ddp", "exact", False, "fp32"


class UpdateStream:
    """The stream of overlapped updates, beside those of `races`."""

    def __init__(self, races):
        self.run = partial(races.run, 7)


def adamw(_, masters):
    whole = [(index, slice(None)) for index in range(len(masters))]
    return ShardedAdamW(masters, [{"params": whole, "lr_scale": 1.0}], "torch")


def end_step(engine, optimizer):
    divisor, skip = torch.ones(2, dtype=torch.float64)
    optimizer.step(engine.finish_gradients(), 0.02, divisor.clone(), skip - 1)
    engine.publish()
    engine.clear_gradients()
    engine.scale_errors(torch.ones(()))


def evaluate(model):
    with torch.no_grad():
        model(batch(9)[:2])


def restore(engine):
    """As saving and loading a checkpoint do."""
    engine.finish_publishing()
    engine.fold_errors()
    for unit in engine.units:
        unit.master.mul_(1.01)
    engine.restore(has_published=False)


def train(
    hierarchy, strategy, name, error_feedback, precision, policy, steps, order=1, update="at_once"
):
    model, levels = TinyModel(tied=False), hierarchy.levels
    placement = replace(Placement.named(strategy, levels), has_copy=strategy != "zero3")
    rules = StateRules(
        placement, preset(name, strategy, levels, precision), DTYPES[precision],
        error_feedback, update, measures_norms=True,
    )  # fmt: skip
    engine = shard(
        model, model.units()[::order], rules, hierarchy, overlap=Overlap(policy),
        groups=lambda spec: ("adamw", 0),
    )  # fmt: skip
    engine.pool.shards.keeps = False  # as on an accelerator
    groups = SimpleNamespace(config=OptimizerConfig())
    optimizer = UnitOptimizers(engine.units, groups, elementwise=adamw)
    between_steps = lambda: evaluate(model), lambda: restore(engine), lambda: None
    for step, between in enumerate(between_steps[:steps]):
        micro_batches = 2 if step == 0 else 1
        for number in range(1, micro_batches + 1):
            backward(engine, model(batch(number)[:2]), is_last=number == micro_batches)
        end_step(engine, optimizer)
        between()
    model(batch(3)[:2])  # without a backward
    engine.publish()
    engine.finish_publishing()


def watch(case, policy, sizes=(2, 2), steps=2, order=1, update="at_once"):
    """The races and the memory freed too early on all ranks, and the number of operators seen on
    the first rank."""

    def body(hierarchy):
        races = Races(policy)
        with pytest.MonkeyPatch.context() as patch, races.watching(patch):
            patch.setattr(engine_module, "CommStreams", lambda *_: races)
            if update == "overlapped":
                patch.setattr(unit_optimizers, "make_stream", lambda *_, **__: UpdateStream(races))
            train(hierarchy, *case, policy, steps, order, update)
        return races.found, races.freed, races.operators

    found, freed, operators = zip(*run_ranks(sizes, body), strict=True)
    return set().union(*found), set().union(*freed), operators[0]


@pytest.mark.parametrize(
    ("case", "policy", "sizes", "order"),
    [
        pytest.param(TOPO, "safe", (2, 2), 1, marks=pytest.mark.exhaustive),
        (TOPO, "full", (2, 2, 2), 1),
        (HPZ, "full", (2, 2), 1),
        pytest.param(ZERO2, "full", (2, 2), 1, marks=pytest.mark.exhaustive),
        (ZERO3, "full", (2, 2), -1),  # units are gathered ahead in vain
    ],
)
def test_no_memory_is_accessed_or_freed_while_it_is_in_use(case, policy, sizes, order):
    found, freed, operators = watch(case, policy, sizes, steps=3, order=order)
    assert found == set()
    assert freed == set()
    assert operators > 500


@pytest.mark.parametrize(("case", "policy"), [(TOPO, "full"), (ZERO2, "safe")])
def test_copies_to_and_from_the_host_use_no_memory_that_is_in_use(case, policy):
    found, freed, operators = watch(case, policy, update="on_host")
    assert found == set()
    assert freed == set()
    assert operators > 500


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        (TOPO, "full"),
        pytest.param(ZERO2, "safe", marks=pytest.mark.exhaustive),
        (ZERO3, "full"),
        (DDP, "safe"),
    ],
)
def test_updates_under_the_forward_use_no_memory_that_is_in_use(case, policy):
    found, freed, operators = watch(case, policy, update="overlapped")
    assert found == set()
    assert freed == set()
    assert operators > 500


def test_a_computation_that_does_not_wait_for_a_stream_is_found(monkeypatch):
    monkeypatch.setattr(ClockHandle, "wait", lambda handle: None)
    found, freed, _ = watch(TOPO, "full", steps=1)
    assert any(second.endswith("in the computation") for _, second, _ in found)
    assert any("buffer during" in memory for memory in freed)


def test_a_stream_that_does_not_wait_for_the_computation_is_found(monkeypatch):
    learn = Races.learn

    def learn_in_the_computation(self, clock):
        if self._here == COMPUTATION:
            learn(self, clock)

    monkeypatch.setattr(Races, "learn", learn_in_the_computation)
    found, _, _ = watch(TOPO, "full", steps=1)
    assert any("in stream" in second for _, second, _ in found)
