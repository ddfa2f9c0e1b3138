"""`shard` and the steps of its engine, and what users do to a model after it is sharded."""

import math

import pytest
import torch
from torch import nn

from megafrontier.partition import Placement, shard
from tests.partition.tiny import (
    SIDE,
    Stack,
    TinyModel,
    backward,
    batch,
    descend,
    descend_alone,
    sharded_stack,
    stack_input,
)
from tests.ranks import run_ranks

LEVELS = (2, 2)
SHARDED, PERSISTENT = Placement(2, 2, 2, 2), Placement(0, 0, 2, 2)
PLACEMENTS = pytest.mark.parametrize(
    "placement", [SHARDED, PERSISTENT], ids=["sharded", "persistent"]
)


def train(hierarchy, placement, steps, prepare=lambda model: None, **options):
    """Losses of a stack's gradient descent, after `prepare(model)`; the model and its engine."""
    model, engine = sharded_stack(hierarchy, placement, **options)
    prepare(model)
    losses = descend(engine, lambda step: model(stack_input(hierarchy.rank, step)), steps)
    return losses, model, engine


def train_alone(model, steps):
    return descend_alone(model, lambda rank, step: model(stack_input(rank, step)), steps)


@PLACEMENTS
@pytest.mark.parametrize("overlap", ["none", "safe", "full"])
def test_training_is_that_of_one_process_and_reads_in_between_are_of_the_last_step(
    placement, overlap
):
    """A method other than forward gathers nothing of what lies outside the blocks. Persistent
    weights are the published ones; others are NaN, and never those of the step before."""

    def body(hierarchy):
        losses, model, engine = train(hierarchy, placement, 3, overlap=overlap)
        with torch.no_grad():
            early = model.loss(stack_input(hierarchy.rank, 3))
            engine.finish_publishing()
            late = model.loss(stack_input(hierarchy.rank, 3))
        return losses, *(
            hierarchy.world.sum(loss.double().view(1)).item() for loss in (early, late)
        )

    *expected, last = train_alone(Stack(), 4)
    for losses, early, late in run_ranks(LEVELS, body):
        assert losses == pytest.approx(expected, rel=1e-5)
        is_there = placement is PERSISTENT
        assert late == pytest.approx(last if is_there else math.nan, rel=1e-5, nan_ok=True)
        is_there = is_there and overlap == "none"
        assert early == pytest.approx(last if is_there else math.nan, rel=1e-5, nan_ok=True)


def test_one_rank_runs_a_model_without_hooks_on_its_modules():
    """They cost a tenth of a step whose kernels take no longer than their launches."""

    def body(hierarchy):
        model, _ = sharded_stack(hierarchy, Placement(0, 0, 1, 1))
        return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]

    assert run_ranks((1,), body) == [[]]


def test_parameters_that_a_conversion_has_moved_are_still_trained():
    """For example `.to(memory_format=…)`, or cuDNN when it flattens recurrent weights."""

    def move(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    expected = train_alone(Stack(), 3)
    for losses in run_ranks(LEVELS, lambda hierarchy: train(hierarchy, PERSISTENT, 3, move)[0]):
        assert losses == pytest.approx(expected, rel=1e-5)


@PLACEMENTS
def test_a_weight_that_a_users_hook_computes_is_computed_of_todays_parameters(placement):
    def normed():
        return nn.utils.weight_norm(nn.Linear(SIDE, SIDE))

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, placement, normed)
        return descend(engine, lambda step: model(stack_input(hierarchy.rank, step)), 3)

    with pytest.warns(FutureWarning):
        expected = train_alone(Stack(normed), 3)
    for losses in run_ranks(LEVELS, body):
        assert losses == pytest.approx(expected, rel=1e-5)


@PLACEMENTS
def test_a_graph_from_before_the_last_step_is_refused(placement):
    """Plain PyTorch refuses it too, because its activations are of other weights."""

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, placement)
        late = model(stack_input(hierarchy.rank, 9))
        descend(engine, lambda step: model(stack_input(hierarchy.rank, step)), 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(engine, late)
        return True

    assert all(run_ranks(LEVELS, body))


@pytest.mark.parametrize("strategy", ["ddp", "mics", "zero3"])
def test_gradients_are_finished_once_until_they_are_cleared(strategy):
    """Sums of replicas would be summed again."""

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, Placement.named(strategy, hierarchy.levels))
        backward(engine, model(stack_input(hierarchy.rank)))
        once = [g.clone() for g in engine.finish_gradients()]
        with pytest.raises(RuntimeError, match=r"finished twice; need engine\.clear_gradients"):
            engine.finish_gradients()
        with pytest.raises(RuntimeError, match="`clear_gradients` after it"):
            backward(engine, model(stack_input(hierarchy.rank)))
        return all(g.isfinite().all() for g in once)

    assert all(run_ranks((2,), body))


def test_gradients_are_not_cleared_while_they_are_reduced():
    """The sum of a replica would be added to the next step's."""

    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, Placement.named("mics", hierarchy.levels))
        backward(engine, model(stack_input(hierarchy.rank)), is_last=True)
        with pytest.raises(RuntimeError, match=r"need engine\.finish_gradients\(\)"):
            engine.clear_gradients()
        engine.finish_gradients()
        engine.clear_gradients()
        return True

    assert all(run_ranks(LEVELS, body))


def test_the_first_forward_may_be_for_inference_alone():
    def body(hierarchy):
        model, engine = sharded_stack(hierarchy, Placement(1, 1, 1, 1))
        with torch.inference_mode():
            before = model(stack_input(0)).item()
        loss = model(stack_input(0))
        backward(engine, loss)
        return loss.item() == before and all(g.isfinite().all() for g in engine.finish_gradients())

    assert run_ranks((2,), body) == [True] * 2


def test_saved_views_of_weights_see_them_again_in_backward():
    """A linear layer without bias saves a transposed view; other units use the memory between."""

    def gradients(hierarchy, placement):
        block = lambda: nn.Linear(SIDE, SIDE, bias=False)  # noqa: E731
        model, engine = sharded_stack(hierarchy, placement, block)
        backward(engine, model(stack_input(hierarchy.rank)))
        return [g.clone() for g in engine.finish_gradients()]

    def body(hierarchy):
        return gradients(hierarchy, SHARDED), gradients(hierarchy, PERSISTENT)

    for sharded, persistent in run_ranks(LEVELS, body):
        assert all(torch.equal(a, b) for a, b in zip(sharded, persistent, strict=True))


def test_initial_values_come_from_the_model_or_slice_by_slice():
    def body(hierarchy):
        def counting(spec, start, stop):
            return torch.arange(start, stop, dtype=torch.float32)

        model = TinyModel(tied=True)
        expected = model.blocks[0].up.weight.detach().clone()
        shard(model, model.units(), Placement(0, 0, 1, 2), hierarchy)
        own = torch.equal(model.blocks[0].up.weight, expected)
        with torch.device("meta"):
            model = TinyModel(tied=True)
        shard(model, model.units(), PERSISTENT, hierarchy, initial=counting)
        weight = model.blocks[2].up.weight.flatten()
        return own, torch.equal(weight, torch.arange(float(weight.numel())))

    assert run_ranks(LEVELS, body) == [(True, True)] * 4


def test_a_stray_read_of_resharded_weights_shows_as_nan():
    def body(hierarchy):
        model, _ = sharded_stack(hierarchy, Placement(1, 1, 1, 1))
        weight = model.blocks[0].weight
        return tuple(weight.shape), bool(weight.isnan().all())

    assert run_ranks((2,), body) == [((SIDE, SIDE), True)] * 2


def test_evaluation_needs_no_gradient_and_leaves_nothing_unsharded():
    def body(hierarchy):
        model = TinyModel(tied=False)
        engine = shard(model, model.units(), Placement.named("mics", hierarchy.levels), hierarchy)
        with torch.no_grad():
            loss = model(batch(0)[:4])
        return loss.item(), [u.name for u in engine.units if u.phase.name != "RESHARDED"]

    with torch.no_grad():
        alone = TinyModel(False)(batch(0)[:4]).item()
    for loss, left in run_ranks(LEVELS, body):
        assert loss == pytest.approx(alone, rel=1e-6)
        assert left == []
