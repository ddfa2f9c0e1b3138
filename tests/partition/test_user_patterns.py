"""What users do to a model of their own after it is sharded works, or is refused; never in silence
computed with other weights than it should."""

import copy
import math

import pytest
import torch
from torch import nn

from megafrontier.common.errors import UserError
from megafrontier.partition import Placement, shard
from tests.ranks import run_ranks

LEVELS = (2, 2)
SHARDED, WHOLE = Placement(2, 2, 2, 2), Placement(0, 0, 2, 2)
PLACEMENTS = pytest.mark.parametrize("placement", [SHARDED, WHOLE], ids=["sharded", "whole"])


class Net(nn.Module):
    """Blocks with a bias on inputs of three dimensions, whose outputs are views."""

    def __init__(self, block=lambda: nn.Linear(6, 6), count=3):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def units(self):
        return [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]

    def loss(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh() + x
        return x.square().sum()

    def forward(self, x):
        return self.loss(x)


def inputs(rank, step=0):
    return torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def descend(engine, model, steps, rate=0.02):
    """Losses of plain gradient descent."""
    losses = []
    for step in range(steps):
        loss = model(inputs(engine.hierarchy.rank, step))
        losses.append(engine.hierarchy.world.sum(loss.detach().double().view(1)).item())
        engine.backward(loss, is_last=True)
        for unit, gradient in zip(engine.units, engine.finish_gradients(), strict=True):
            unit.master.sub_(gradient, alpha=rate)
        engine.publish()
        engine.clear_gradients()
    return losses


def descend_alone(model, steps, rate=0.02):
    losses = []
    for step in range(steps):
        model.zero_grad()
        total = sum(model(inputs(rank, step)) for rank in range(4))
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=rate)
        losses.append(total.item())
    return losses


@PLACEMENTS
@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
def test_training_is_that_of_one_process_and_reads_in_between_are_of_the_last_step(
    placement, overlap
):
    """A method of the model gathers nothing of what lies outside the blocks. Where weights are
    whole it sees the published ones; else NaN, and never those of the step before."""

    def body(hierarchy):
        model = Net()
        engine = shard(model, model.units(), placement, hierarchy, overlap=overlap)
        losses = descend(engine, model, 3)
        with torch.no_grad():
            early = model.loss(inputs(hierarchy.rank, 3))
            engine.finish_publishing()
            late = model.loss(inputs(hierarchy.rank, 3))
        ours = [hierarchy.world.sum(x.double().view(1)).item() for x in (early, late)]
        return losses, *ours

    *expected, last = descend_alone(Net(), 4)
    for losses, early, late in run_ranks(LEVELS, body):
        assert losses == pytest.approx(expected, rel=1e-5)
        is_there = placement is WHOLE
        assert late == pytest.approx(last if is_there else math.nan, rel=1e-5, nan_ok=True)
        is_there = is_there and overlap == "none"
        assert early == pytest.approx(last if is_there else math.nan, rel=1e-5, nan_ok=True)


def test_one_rank_runs_a_model_without_hooks_on_its_modules():
    """They cost a tenth of a step whose kernels take no longer than their launches."""

    def body(hierarchy):
        model = Net()
        shard(model, model.units(), Placement(0, 0, 1, 1), hierarchy)
        return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]

    assert run_ranks((1,), body) == [[]]


def test_parameters_that_a_conversion_has_moved_are_trained_all_the_same():
    """As `.to(memory_format=…)` or cuDNN's flattening move them."""

    def body(hierarchy):
        model = Net()
        engine = shard(model, model.units(), WHOLE, hierarchy)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return descend(engine, model, 3)

    expected = descend_alone(Net(), 3)
    for losses in run_ranks(LEVELS, body):
        assert losses == pytest.approx(expected, rel=1e-5)


class Listed(nn.Module):
    """Uses its weight by a list of its own, too, in which `shard` puts nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weights = [self.linear.weight]

    def forward(self, x):
        return self.linear(x) + x @ self.weights[0]


@pytest.mark.parametrize("ranks", [(1,), (2,)])
def test_a_parameter_from_before_that_a_module_still_uses_is_named_and_not_left_untrained(ranks):
    def body(hierarchy):
        model = Net(Listed)
        engine = shard(model, model.units(), Placement(0, 0, 1, 1), hierarchy)
        with pytest.raises(RuntimeError) as error:
            engine.backward(model(inputs(hierarchy.rank)))
        return str(error.value)

    for message in run_ranks(ranks, body):
        assert message.startswith(
            "parameter blocks.2.linear.weight: a gradient for the one from before `shard`"
        )


@PLACEMENTS
def test_a_weight_that_a_users_hook_computes_of_others_is_computed_of_todays(placement):
    def normed():
        return nn.utils.weight_norm(nn.Linear(6, 6))

    def body(hierarchy):
        model = Net(normed)
        return descend(shard(model, model.units(), placement, hierarchy), model, 3)

    with pytest.warns(FutureWarning):
        expected = descend_alone(Net(normed), 3)
    for losses in run_ranks(LEVELS, body):
        assert losses == pytest.approx(expected, rel=1e-5)


@PLACEMENTS
def test_a_graph_from_before_the_last_step_is_refused(placement):
    """As plain PyTorch refuses it: its activations are of other weights."""

    def body(hierarchy):
        model = Net()
        engine = shard(model, model.units(), placement, hierarchy)
        late = model(inputs(hierarchy.rank, 9))
        descend(engine, model, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(late)
        return True

    assert all(run_ranks(LEVELS, body))


class InPlace(nn.Module):
    """A block on whose output the model works in place: it is a view, of which autograd then knows
    nothing any more."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x)


@PLACEMENTS
@pytest.mark.parametrize("prefetch", [0, 1])
def test_outputs_may_be_changed_in_place(placement, prefetch):
    class Model(Net):
        def loss(self, x):
            x = self.first(x)
            for block in self.blocks:
                y = block(x)
                y += x
                x = nn.functional.relu_(y)
            return x.square().sum()

    def body(hierarchy):
        model = Model(InPlace)
        engine = shard(model, model.units(), placement, hierarchy, prefetch=prefetch)
        return descend(engine, model, 3, rate=0.002)

    expected = descend_alone(Model(InPlace), 3, rate=0.002)
    for losses in run_ranks(LEVELS, body):
        assert losses == pytest.approx(expected, rel=1e-5)


@PLACEMENTS
def test_a_block_that_one_rank_drops_may_be_followed_by_work_in_place(placement):
    """That rank hands on what it was given; its turn among the others' reductions comes even so."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.is_dropped = nn.Linear(6, 6), False

        def forward(self, x):
            return x if self.is_dropped else x + self.linear(x)

    class Model(Net):
        def loss(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                x += 1
            return x.square().sum()

    def body(hierarchy):
        model = Model(Drops)
        engine = shard(model, model.units(), placement, hierarchy, check_order=True)
        model.blocks[1].is_dropped = hierarchy.rank == 2
        return descend(engine, model, 2, rate=0.002)

    first, *others = run_ranks(LEVELS, body)
    assert others == [first] * 3
    assert all(math.isfinite(loss) for loss in first)


@pytest.mark.parametrize("strategy", ["ddp", "mics", "zero3"])
def test_gradients_are_finished_once_until_they_are_cleared(strategy):
    """Replicas would be summed to sums, in some placements and not in others."""

    def body(hierarchy):
        model = Net()
        placement = Placement.named(strategy, hierarchy.levels)
        engine = shard(model, model.units(), placement, hierarchy)
        engine.backward(model(inputs(hierarchy.rank)))
        once = [g.clone() for g in engine.finish_gradients()]
        with pytest.raises(RuntimeError, match=r"finished twice; need engine\.clear_gradients"):
            engine.finish_gradients()
        with pytest.raises(RuntimeError, match="after which comes `clear_gradients`"):
            engine.backward(model(inputs(hierarchy.rank)))
        return all(g.isfinite().all() for g in once)

    assert all(run_ranks((2,), body))


def test_gradients_are_not_cleared_while_their_sums_are_under_way():
    """What a replica's sum brings back would come into the next step's."""

    def body(hierarchy):
        model = Net()
        placement = Placement.named("mics", hierarchy.levels)
        engine = shard(model, model.units(), placement, hierarchy)
        engine.backward(model(inputs(hierarchy.rank)), is_last=True)
        with pytest.raises(RuntimeError, match=r"need engine\.finish_gradients\(\) before"):
            engine.clear_gradients()
        engine.finish_gradients()
        engine.clear_gradients()
        return True

    assert all(run_ranks(LEVELS, body))


def shards_of(*models, placement=SHARDED):
    """What `shard` says to each."""

    def body(hierarchy):
        said = []
        for model, units in (m() for m in models):
            with pytest.raises(UserError) as error:
                shard(model, units, placement, hierarchy)
            said.append(str(error.value))
        return said

    return run_ranks(LEVELS, body)[0]


def test_what_cannot_be_a_unit_is_refused_by_name():
    def complex_one():
        model = Net()
        model.spectrum = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
        return model, model.units()

    def nested():
        model = Net(lambda: nn.Sequential(nn.Linear(6, 6)))
        return model, [*model.units(), ("inner", model.blocks[1][0])]

    def namesakes():
        model = Net()
        return model, [("linear", block) for block in model.blocks]

    def twice():
        model = Net()
        return model, [*model.units(), ("again", model.blocks[0])]

    spectrum, inner, same, again = shards_of(complex_one, nested, namesakes, twice)
    assert spectrum == "parameter spectrum: complex, need its torch.view_as_real"
    assert inner == "block 'inner': lies in block 'blocks.1', need one of them"
    assert same.startswith("block 'linear': given twice")
    assert "given twice" in again


@PLACEMENTS
def test_a_model_that_is_sharded_already_its_parts_and_copies_are_refused(placement):
    """They have the first engine's hooks, and where weights are away no values."""

    def body(hierarchy):
        model = Net()
        shard(model, model.units(), placement, hierarchy)
        with pytest.raises(UserError, match="model: sharded already"):
            shard(model, model.units(), placement, hierarchy)
        part = model.blocks[0]
        with pytest.raises(UserError, match="model: sharded already"):
            shard(nn.Sequential(part), [("0", part)], placement, hierarchy)
        for whole in (model, part):
            with pytest.raises(RuntimeError, match="deepcopy of a sharded model"):
                copy.deepcopy(whole)
        return True

    assert all(run_ranks((2, 2), body))


@pytest.mark.parametrize(
    ("placement", "dtype", "is_right"),
    [
        (SHARDED, torch.float32, False),
        (WHOLE, torch.float32, False),
        (Placement(0, 0, 0, 0), torch.bfloat16, False),
        (Placement(0, 0, 0, 0), torch.float32, True),
    ],
)
def test_a_state_dict_is_refused_where_it_would_be_of_other_weights(placement, dtype, is_right):
    """And where every rank's parameters are the masters it is what it should be."""

    def body(hierarchy):
        model = Net()
        values = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model, model.units(), placement, hierarchy, dtype=dtype)
        if is_right:
            model.load_state_dict({name: value + 1 for name, value in values.items()})
            found = copy.deepcopy(model).state_dict()
            return all(torch.equal(found[name], value + 1) for name, value in values.items())
        for act in (model.state_dict, lambda: model.load_state_dict(values)):
            with pytest.raises(RuntimeError, match="state dict of a sharded Net"):
                act()
        with pytest.raises(RuntimeError, match="deepcopy of a sharded model"):
            copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="state dict of a sharded Linear"):
            model.blocks[1].state_dict()
        return True

    assert all(run_ranks((2, 2), body))


def test_buffers_that_differ_between_ranks_are_refused_by_name():
    """Each rank would compute another function, for good."""

    def body(hierarchy):
        model = Net()
        model.register_buffer("features", torch.ones(3) + (hierarchy.rank == 3))
        with pytest.raises(UserError, match="buffer features: ranks bring other values"):
            shard(model, model.units(), SHARDED, hierarchy)
        return True

    assert all(run_ranks(LEVELS, body))
