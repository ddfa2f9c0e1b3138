"""Gradients are those of one process whatever a model does with its blocks."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafrontier.config import WiresConfig
from megafrontier.partition import Placement
from megafrontier.partition.presets import choose_wires
from megafrontier.partition.unit import Phase
from scripts.benchmarks.shared.step_bytes import step_bytes
from tests.partition.sharding import shard
from tests.partition.tiny import (
    SIDE,
    Shared,
    Shortened,
    Stack,
    TinyModel,
    assert_gradients_of_one_process,
    backward,
    batch,
    descend,
    descend_alone,
    engine_step,
    make_optimizer,
    named_gradients,
    place,
    sharded_stack,
    stack_input,
    watch_collectives,
)
from tests.ranks import make_levels, run_ranks

SHARDED, PERSISTENT = Placement(1, 1, 1, 1), Placement(0, 0, 1, 1)
NAMES = [name for name, _ in TinyModel(tied=False).units()]
OVERLAPS = ("none", "safe", "full")


def plain(block, x):
    return block(x)


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


class Detached(nn.Module):
    """Uses a weight without its gradient too, so backward reads it after its gradient has come."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(SIDE, SIDE, bias=False)
        self.own = nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x):
        return torch.tanh(self.own(self.base(x @ self.own.weight.detach() + x))) + x


@pytest.mark.parametrize("call", [plain, checkpointed])
def test_weights_used_without_their_gradient_stay_until_the_backward_is_over(call):
    assert_gradients_of_one_process(lambda: Stack(Detached, call), SHARDED, overlaps=OVERLAPS)


class FrozenThenTrained(Stack):
    """All blocks run twice: without gradients of their parameters, and with."""

    def loss(self, x):
        self.blocks.requires_grad_(False)
        x = self.first(x)
        for is_trained in (False, True):
            self.blocks.requires_grad_(is_trained)
            for block in self.blocks:
                x = self.call(block, x)
        return self.head(x).square().sum()


@pytest.mark.parametrize("placement", [SHARDED, PERSISTENT])
def test_a_block_may_run_frozen_before_it_is_trained_in_one_pass(placement):
    assert_gradients_of_one_process(FrozenThenTrained, placement, overlaps=("none", "full"))


def test_first_blocks_may_have_no_backward():
    """They are frozen on all ranks, and their input needs no gradient."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.blocks = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(4))

        def units(self):
            return [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]

        def forward(self, x):
            self.blocks[:2].requires_grad_(False)
            for block in self.blocks:
                x = block(x).tanh()
            return x.sum()

    assert_gradients_of_one_process(Model, SHARDED, overlaps=OVERLAPS)


class Positions(nn.Module):
    """Returns its parameter itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, SIDE))

    def forward(self):
        return self.table


def added(block, x):
    return torch.tanh(x + block())


@pytest.mark.parametrize("placement", [PERSISTENT, Placement(0, 0, 0, 1)])
def test_a_parameter_that_a_persistent_block_returns_does_not_collect_hooks(placement):
    assert_gradients_of_one_process(lambda: Stack(Positions, added), placement, steps=2)

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, placement, Positions, added)
        descend(engine, lambda step: model(stack_input(hierarchy.rank)), steps=3)
        return [len(block.table._backward_hooks or ()) for block in model.blocks]

    assert run_ranks((2,), body) == [[0] * 4] * 2


def test_compiled_blocks_are_right_in_each_step():
    """The hooks are not traced: what they bring is different each time."""

    def make():
        model = Stack()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    assert_gradients_of_one_process(make, SHARDED, steps=3)


class Experts(nn.Module):
    """A rank may need only one of two experts, and uses none of the other's parameters."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(2))

    def forward(self, x, needs_both):
        x = x + self.experts[0](x)
        return x + self.experts[1](x) if needs_both else x


class Mixture(Stack):
    def __init__(self):
        super().__init__(Experts)

    def loss(self, x, rank):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x, needs_both=(rank + i) % 4 != 0)
        return self.head(x).square().sum()


@pytest.mark.parametrize(
    ("strategy", "overlaps"),
    [("ddp", ["full"]), ("zero2", ["safe"]), ("zero3", ["none", "full"]), ("topo", ["safe"])],
)
def test_parameters_without_a_gradient_on_some_ranks_change_no_order_of_collectives(
    strategy, overlaps
):
    def loss(model, rank):
        return model(stack_input(rank), rank)

    assert_gradients_of_one_process(Mixture, strategy, loss, (2, 2), overlaps=overlaps)


@pytest.mark.parametrize("strategy", ["topo", "ddp"])
def test_blocks_that_all_ranks_leave_out_have_no_gradient_of_the_step_before(strategy):
    def body(hierarchy):
        placement = Placement.named(strategy, hierarchy.levels)
        model, engine = sharded_stack(hierarchy, placement, make=Shortened)
        without = [unit.name in ("blocks.1", "blocks.2") for unit in engine.units]
        sizes = []
        for left_out in ((), (1, 2)):
            backward(engine, model(stack_input(hierarchy.rank), left_out), is_last=True)
            norms = [gradient.norm() for gradient in engine.finish_gradients()]
            sizes.append(hierarchy.world.sum(torch.stack(norms).double())[without].tolist())
            engine.clear_gradients()
        return sizes

    for first, second in run_ranks((2, 2), body):
        assert all(size > 0 for size in first)
        assert second == [0, 0]


def test_blocks_that_one_micro_batch_leaves_out_have_todays_weights_in_the_next():
    """All ranks leave them out. If they were prefetched in that backward, some would be stale."""
    cases = [(overlap, (1, 2)) for overlap in OVERLAPS]
    cases += [("safe", left_out) for left_out in ((0,), (0, 1, 2), (2, 3))]

    def train(hierarchy, overlap, left_out):
        placement = Placement.named("topo", hierarchy.levels)
        model, engine = sharded_stack(
            hierarchy, placement, make=Shortened, overlap=overlap, check_order=True
        )

        def both(step):
            backward(engine, model(stack_input(hierarchy.rank, step), left_out))
            return model(stack_input(hierarchy.rank, step))

        return descend(engine, both, steps=3)

    def train_alone(left_out):
        alone = Shortened()

        def both(rank, step):
            alone(stack_input(rank, step), left_out).backward()
            return alone(stack_input(rank, step))

        return descend_alone(alone, both, steps=3)

    found = run_ranks((2, 2), lambda hierarchy: [train(hierarchy, *case) for case in cases])
    for number, (overlap, left_out) in enumerate(cases):
        for losses in found:
            expected = pytest.approx(train_alone(left_out), rel=1e-5)
            assert losses[number] == expected, (overlap, left_out)


@dataclass(slots=True)
class State:
    x: torch.Tensor
    memory: torch.Tensor | None


class Passing(nn.Module):
    """The first block makes a tensor that all blocks use and pass on, as T5 does with biases."""

    def __init__(self, makes, kind):
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE, bias=False)
        self.memory = nn.Linear(SIDE, SIDE, bias=False) if makes else None
        self.kind = kind

    def forward(self, state):
        x, memory = (state.x, state.memory) if self.kind == "dataclass" else state
        if self.memory is not None:
            memory = self.memory(x).tanh()
        y = self.linear(x + memory).tanh()
        if self.kind == "in place":
            x = x if self.memory is None else x.clone()
            y = x.add_(y)  # the same tensor as the input, but another value
        return State(y, memory) if self.kind == "dataclass" else (y, memory)


class Memory(Stack):
    """Blocks pass on a state of two tensors."""

    def __init__(self, kind):
        super().__init__(count=0)
        self.kind = kind
        self.blocks.extend(Passing(i == 0, kind) for i in range(4))

    def loss(self, x):
        x = self.first(x)
        state = State(x, None) if self.kind == "dataclass" else (x, None)
        for block in self.blocks:
            state = block(state)
        return self.head(state.x if self.kind == "dataclass" else state[0]).square().sum()


@pytest.mark.parametrize("kind", ["tuple", "dataclass", "in place"])
def test_a_block_may_pass_on_what_another_has_made(kind):
    assert_gradients_of_one_process(lambda: Memory(kind), SHARDED, overlaps=("none", "safe"))


class Reused(nn.Module):
    """Blocks with nested containers, a tied weight, a block that runs twice, and parameters that
    are used now and then."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear, self.seldom = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, state):
            x = self.linear(state["x"]).tanh()
            if state["extra"]:
                x = x + self.seldom(x)
            return {"x": x, "extra": state["extra"], "seen": [x.detach()]}

    def __init__(self, width=SIDE):
        super().__init__()
        torch.manual_seed(1)
        shared = nn.Linear(width, width)
        self.first, self.second = self.Block(width), self.Block(width)
        self.first.linear.weight = self.second.linear.weight = shared.weight
        self.register_buffer("offset", torch.arange(float(width)))
        self.outside = nn.Parameter(torch.ones(width))

    def units(self):
        return [("first", self.first), ("second", self.second)]

    def forward(self, x, extra):
        state = {"x": x + self.offset, "extra": extra}
        state = self.first(self.second(self.first(state)))
        return (state["x"] * self.outside).square().sum()


USES = {
    "never": lambda rank: False,
    "always": lambda rank: True,
    "on some ranks": lambda rank: rank % 2 == 0,
}


@pytest.mark.parametrize(
    ("weights", "overlaps", "extra"),
    [
        (0, ["safe"], "on some ranks"),
        (1, ["safe"], "never"),
        (1, ["full"], "on some ranks"),
        (2, ["safe"], "always"),
        (2, ["none", "safe"], "on some ranks"),
    ],
)
def test_shared_reused_and_unused_parameters_get_their_summed_gradients(weights, overlaps, extra):
    """With one unit unsharded at a time, too: the first block gives up its buffer between uses."""

    def loss(model, rank):
        return model(stack_input(rank), USES[extra](rank))

    placement = Placement(weights, weights, 2, 2)
    assert_gradients_of_one_process(Reused, placement, loss, (2, 2), overlaps=overlaps)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_activation_checkpointing_inside_or_around_a_block_changes_nothing(outside, reentrant):
    def wrap(block):
        name = "_call_impl" if outside else "forward"
        inner = getattr(block, name)
        setattr(block, name, lambda *a: checkpoint(inner, *a, use_reentrant=reentrant))

    def run(hierarchy, recomputes):
        model = TinyModel(tied=False)
        for block in model.blocks if recomputes else ():
            wrap(block)
        engine = shard(model, model.units(), Placement(1, 1, 2, 2), hierarchy)
        engine.ledger.take()
        loss = model(batch(hierarchy.rank)[:4])
        backward(engine, loss, is_last=True)
        gradients = [g.clone() for g in engine.finish_gradients()]
        sent, _ = engine.ledger.take()
        return loss.item(), gradients, sent, engine.units[3].layout.numel

    def body(hierarchy):
        return run(hierarchy, False), run(hierarchy, True)

    for plain_run, recomputed in run_ranks((2, 2), body):
        assert plain_run[0] == recomputed[0]
        # Only the block before the head is gathered once more, if its forward without gradients
        # cannot be told from an evaluation.
        pair, node = plain_run[2]
        again = plain_run[3] // 2 * 4 if outside and reentrant else 0
        assert recomputed[2] == [pair + again, node]
        for a, b in zip(plain_run[1], recomputed[1], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("strategy", "preset", "overlap"),
    [("topo", "low", "none"), ("topo", "low", "full"), ("mics", "exact", "full")],
)
def test_units_prefetched_in_vain_are_not_reduced_for_it(strategy, preset, overlap):
    """Blocks are named in another order than they run, and the root is done before the others."""

    def run(hierarchy, order):
        model = TinyModel(tied=False)
        placement = Placement.named(strategy, hierarchy.levels)
        wires = choose_wires(WiresConfig(preset=preset), placement, hierarchy.levels, "fp32")
        engine = shard(
            model, order(model.units()), placement, hierarchy,
            wires=wires, error_feedback=preset == "low", overlap=overlap,
        )  # fmt: skip
        norm = 0.0
        for step in range(2):
            backward(engine, model(batch(step)[hierarchy.rank :: 4]), is_last=True)
            norm += sum(g.double().square().sum().item() for g in engine.finish_gradients())
            engine.clear_gradients()
        return norm

    def body(hierarchy):
        orders = [lambda u: u, lambda u: u[::-1], lambda u: u[1:3], lambda u: u[1:-1]]
        return [run(hierarchy, order) for order in orders]

    totals = [sum(norms) for norms in zip(*run_ranks((2, 2), body), strict=True)]
    assert totals == pytest.approx([totals[0]] * 4, rel=1e-4 if preset == "exact" else 0.05)


def test_a_pending_graph_keeps_no_full_gradients_of_another():
    """For example that of a second micro-batch whose forward has run already."""

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, SHARDED, overlap="none")
        first, second = (model(stack_input(hierarchy.rank)) for _ in range(2))
        backward(engine, first)
        held = engine.pool.gradients.held_bytes
        backward(engine, second, is_last=True)
        engine.finish_gradients()
        return held, max(unit.layout.numel for unit in engine.units)

    for held, largest in run_ranks((2,), body):
        assert held <= 3 * 4 * largest  # those of the root and of two blocks


class Residual(nn.Module):
    """Also returns the residual, whose backward comes after the gradients of all its parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, state):
        hidden, residual = state
        residual = hidden + residual
        return self.linear(residual).tanh(), residual


@pytest.mark.parametrize("overlap", ["none", "safe"])
def test_a_unit_that_is_done_is_not_gathered_again(overlap):
    def body(hierarchy):
        blocks = [(f"{i}", Residual()) for i in range(4)]
        model = nn.Sequential(*(block for _, block in blocks))
        engine = shard(model, blocks, SHARDED, hierarchy, overlap=overlap)
        engine.ledger.take()
        x = torch.randn(2, 16, requires_grad=True)
        hidden, residual = model((x, x))
        backward(engine, (hidden + residual).sum(), is_last=True)
        engine.finish_gradients()
        return engine.ledger.take()[0], step_bytes(engine, 1)

    torch.manual_seed(0)
    for sent, formula in run_ranks((2,), body):
        assert sent == formula


@pytest.mark.parametrize("overlap", ["none", "safe"])
def test_a_backward_of_the_users_own_leaves_the_next_step_right(overlap):
    def run(hierarchy, probes):
        model, engine = sharded_stack(hierarchy, Placement(2, 2, 2, 2), overlap=overlap)
        if probes:
            seen = []
            handle = model.blocks[1].register_forward_hook(lambda *a: seen.append(a[2]))
            torch.autograd.grad(model(stack_input(0)), seen)
            handle.remove()
        backward(engine, model(stack_input(hierarchy.rank)), is_last=True)
        return [g.clone() for g in engine.finish_gradients()]

    def body(hierarchy):
        return run(hierarchy, False), run(hierarchy, True)

    for plain_run, probed in run_ranks((2, 2), body):
        assert all(torch.equal(a, b) for a, b in zip(plain_run, probed, strict=True))


@pytest.mark.parametrize("preset", ["exact", "low"])
def test_frozen_parameters_get_zeros_whatever_rounds_and_rotates_their_neighbours(preset):
    """AdamW turns the smallest gradient into a whole step."""
    placement = Placement(0, 0, 1, 2)
    wires = choose_wires(WiresConfig(preset=preset), placement, make_levels((2, 2)), "fp32")

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, placement, Detached, plain, wires=wires)
        for block in model.blocks:
            block.base.requires_grad_(False)
        backward(engine, model(stack_input(hierarchy.rank)), is_last=True)
        return [(name, part.abs().sum().item()) for name, _, _, part in named_gradients(engine)]

    sums: dict[str, float] = {}
    for found in run_ranks((2, 2), body):
        for name, size in found:
            sums[name] = sums.get(name, 0) + size
    sums = {name: size for name, size in sums.items() if name.startswith("blocks")}
    assert len(sums) == 8
    assert all((size == 0) == (".base." in name) for name, size in sums.items()), sums


def test_the_root_takes_a_gradient_in_parts():
    assert_gradients_of_one_process(Shared, Placement(0, 0, 0, 0))


@pytest.mark.parametrize(
    ("overlap", "prefetch", "most"), [("none", 1, 1), ("safe", 1, 2), ("full", 2, 3)]
)
def test_unsharded_are_the_running_unit_those_ahead_and_those_kept(overlap, prefetch, most):
    """At the end of a forward the last units are kept, because they are the next to run."""

    def body(hierarchy):
        model, engine = place(hierarchy, "topo", overlap=overlap, prefetch=prefetch)
        gathered = []

        def held():
            return {u.name for u in engine.units if u.phase is not Phase.RESHARDED}

        for unit, (_, module) in zip(engine.units, model.units(), strict=True):
            module.register_forward_pre_hook(lambda *_, name=unit.name: note(name))

        def note(name):
            assert name in held()
            gathered.append(len(held()))

        loss = model(batch(0)[:2])
        after_forward = held()
        backward(engine, loss)
        return gathered, after_forward, held()

    for gathered, after_forward, after in run_ranks((2, 2), body):
        assert gathered[0] == most  # with the units ahead of the first one
        assert max(gathered) == most
        assert after_forward == {*NAMES[-most:]}
        assert after == {*NAMES[:most]}


def test_kept_units_are_gathered_once():
    """In a step of four micro-batches: the root, and the units at both ends of a pass."""

    def body(hierarchy):
        model, engine = place(hierarchy, "zero3", tied=True, prefetch=1)
        gathered = Counter()
        watch_collectives(engine, lambda _, label: gathered.update([label]))
        for step in range(2):
            engine_step(engine, model, make_optimizer(engine), step, 4)
        return {label: n for label, n in gathered.items() if label.startswith("gather")}

    # Two levels each, two steps; blocks.1 is at both ends.
    counts = {"root": 1, "blocks.0": 1 + 4, "blocks.1": 1, "blocks.2": 4}
    expected = {f"gather {name}": 4 * count for name, count in counts.items()}
    assert run_ranks((2, 2), body) == [expected] * 4
