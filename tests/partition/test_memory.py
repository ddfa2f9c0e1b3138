"""Memory besides the state is the same in every step."""

import pytest
import torch

from megafrontier.comm import collectives as collectives_module
from megafrontier.comm.wires import wire as wires_module
from megafrontier.comm.wires.wire import Wire
from tests.partition.tiny import (
    LEVELS,
    engine_step,
    make_optimizer,
    place,
    preset,
)
from tests.ranks import run_ranks


@pytest.fixture
def some(pytestconfig):
    """Every other strategy, in turn the one half and the other from case to case; all of them with
    --exhaustive."""
    if pytestconfig.getoption("--exhaustive"):
        return lambda strategies, case: strategies
    return lambda strategies, case: list(strategies)[case % 2 :: 2]


def numbered(cases):
    return [(number, *case) for number, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("case", "name", "overlap"),
    numbered(
        [
            ("exact", "safe"),
            ("zero++", "none"),
            ("low", "none"),
            ("low", "safe"),
            ("low", "full"),
            ("int4 in the pair", "full"),
        ]
    ),
)
def test_messages_lie_in_the_same_memory_step_after_step(case, name, overlap, some, monkeypatch):
    """The second step uses the storages of the first. All are held, so that no new storage can have
    the address of a freed one."""

    def body(hierarchy):
        used = {}

        def note(*tensors):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                used[storage.data_ptr()] = storage

        def all_gather(out, shard, group):
            note(out, shard)
            gather(out, shard, group)

        def all_to_all(out, parts, group, sizes=None):
            note(out, parts)
            exchange(out, parts, group, sizes)

        def reduce(wire, *given):
            found = add(wire, *given)
            note(found[0])
            return found

        gather, exchange = wires_module.all_gather, wires_module.all_to_all
        for module in (collectives_module, wires_module):
            monkeypatch.setattr(module, "all_gather", all_gather)
        monkeypatch.setattr(wires_module, "all_to_all", all_to_all)
        add = Wire.reduce
        monkeypatch.setattr(Wire, "reduce", reduce)
        inside = {"reduce": {"pair": "int4"}} if name == "int4 in the pair" else {}
        found = []
        for strategy in some(("zero1", "mics", "zero3", "topo"), case):
            wires = preset("low" if inside else name, strategy, LEVELS, "bf16", **inside)
            chosen = {"wires": wires, "overlap": overlap, "error_feedback": True}
            model, engine = place(hierarchy, strategy, torch.bfloat16, **chosen)
            optimizer = make_optimizer(engine)
            held = []
            used.clear()
            for step, accumulation in enumerate((2, 1)):
                engine_step(engine, model, optimizer, step, accumulation)
                engine.finish_publishing()
                held.append((engine.buffer_bytes, len(used)))
            found.append((strategy, held))
        return found

    for rank in run_ranks((2, 2, 2), body):
        for strategy, held in rank:
            assert held[0][1] > 1, strategy
            assert held == held[:1] * 2, strategy


@pytest.mark.parametrize(("overlap", "prefetch"), [("none", 1), ("safe", 1), ("full", 2)])
def test_units_take_turns_in_the_same_few_buffers_step_after_step(overlap, prefetch, monkeypatch):
    """As many for weights as units are unsharded at a time; for gradients one more."""

    def body(hierarchy):
        taken = []
        model, engine = place(hierarchy, "zero3", overlap=overlap, prefetch=prefetch)
        take = engine.pool.gradients.acquire

        def noted(numel, dtype):
            buffer = take(numel, dtype)
            taken.append((numel, buffer.data_ptr()))
            return buffer

        monkeypatch.setattr(engine.pool.gradients, "acquire", noted)
        optimizer = make_optimizer(engine)
        found = []
        for step in range(3):
            engine_step(engine, model, optimizer, step, 2)
            blocks = {u.layout.numel for u in engine.units if u.name.startswith("blocks")}
            found.append(
                (
                    {u.full.data_ptr() for u in engine.units},
                    {place for numel, place in taken if numel in blocks},
                )
            )
            taken.clear()
        return found

    ahead = 0 if overlap == "none" else prefetch
    for steps in run_ranks((2, 2), body):
        weights, gradients = steps[0]
        assert len(weights) == ahead + 1
        assert 1 <= len(gradients) <= ahead + 2 - (overlap == "none")
        assert all(step[0] == weights and step[1] <= gradients for step in steps)
