"""The computation and the comm streams never access the same memory at once.

A CPU hides such races, because a task has usually run when the computation goes on. Simulated
streams show them.
"""

import pytest
import torch

from megafrontier.partition import engine as engine_module
from megafrontier.partition.wires.registry import DTYPES
from tests.partition.races import Races
from tests.partition.streams import COMPUTATION, ClockHandle
from tests.partition.tiny import batch, place, preset
from tests.ranks import run_ranks

TOPO = "topo", "low", True, "bf16"
HPZ = "hpz", "zero++", False, "bf16"
ZERO2 = "zero2", "exact", False, "fp32"


def update(engine, optimizer):
    for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
        unit.master.grad = gradient.clone()
    optimizer.step()
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


def train(hierarchy, strategy, name, error_feedback, precision, policy, steps):
    levels = hierarchy.levels
    model, engine = place(
        hierarchy, strategy, dtype=DTYPES[precision], overlap=policy,
        wires=preset(name, strategy, levels, precision), error_feedback=error_feedback,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([unit.master for unit in engine.units], lr=0.02)
    between_steps = lambda: evaluate(model), lambda: restore(engine), lambda: None
    for between in between_steps[:steps]:
        for number in range(2):
            engine.backward(model(batch(number)[:2]), is_last=number == 1)
        update(engine, optimizer)
        between()
    model(batch(3)[:2])  # without a backward
    engine.publish()
    engine.finish_publishing()


def races(case, policy, sizes=(2, 2), steps=3):
    """The races on all ranks, and the number of operators seen on the first one."""

    def body(hierarchy):
        found = Races(policy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "CommStreams", lambda *_: found)
            with found.watching():
                train(hierarchy, *case, policy, steps)
        return found.found, found.operators

    found, operators = zip(*run_ranks(sizes, body), strict=True)
    return set().union(*found), operators[0]


@pytest.mark.parametrize(
    ("case", "policy", "sizes"),
    [
        (TOPO, "safe", (2, 2)),
        (TOPO, "full", (2, 2, 2)),
        (HPZ, "full", (2, 2)),
        (ZERO2, "full", (2, 2)),
    ],
)
def test_no_memory_is_accessed_at_once_while_it_is_written(case, policy, sizes):
    found, operators = races(case, policy, sizes)
    assert found == set()
    assert operators > 500


def test_a_computation_that_does_not_wait_for_a_stream_is_found(monkeypatch):
    monkeypatch.setattr(ClockHandle, "wait", lambda handle: None)
    found, _ = races(TOPO, "full", steps=1)
    assert any(second.endswith("in the computation") for _, second, _ in found)


def test_a_stream_that_does_not_wait_for_the_computation_is_found(monkeypatch):
    learn = Races.learn

    def learn_in_the_computation(self, clock):
        if self._here == COMPUTATION:
            learn(self, clock)

    monkeypatch.setattr(Races, "learn", learn_in_the_computation)
    found, _ = races(TOPO, "full", steps=1)
    assert any("in stream" in second for _, second, _ in found)
