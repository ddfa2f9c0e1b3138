"""AdamW on shards is torch's AdamW on full parameters, however they are cut."""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.optim.adamw import ShardedAdamW, find_apex
from megafrontier.optim.base import merge_slices

NUMEL, DECAYED = 96, 50
CUTS = [[0, 96], [0, 10, 50, 96], [0, 1, 49, 51, 95, 96]]
STEPS = 6


def values(seed):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def rate(step):
    return 0.1 / (step + 1)


def decay_factor(step):
    return 1 - step / 10


def reference():
    """Weights and moments of plain torch, decayed and other parameters in two groups."""
    start = values(0)
    parameters = [torch.nn.Parameter(p.clone()) for p in (start[:DECAYED], start[DECAYED:])]
    groups = [
        {"params": [parameter], "weight_decay": d}
        for parameter, d in zip(parameters, (0.3, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    for step in range(STEPS):
        gradient = values(step + 1)
        parameters[0].grad, parameters[1].grad = gradient[:DECAYED], gradient[DECAYED:]
        for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):
            group["lr"], group["weight_decay"] = rate(step), decay * decay_factor(step)
        optimizer.step()
    state = [optimizer.state[parameter] for parameter in parameters]
    return (
        torch.cat([p.detach() for p in parameters]),
        {name: torch.cat([s[name] for s in state]) for name in ("exp_avg", "exp_avg_sq")},
    )


def make(cuts, fused, weights=None):
    """Shards of the flat parameter, and the optimizer on them."""
    flat = values(0) if weights is None else weights
    bounds = list(pairwise(cuts))
    masters = [flat[a:b].clone() for a, b in bounds]
    spans = [(0, DECAYED, 0), (DECAYED, NUMEL, 1)]
    groups = []
    for number, decay in enumerate((0.3, 0.0)):
        slices = [
            (i, s) for i, b in enumerate(bounds) for s in merge_slices(spans, *b).get(number, [])
        ]
        options = {"lr_scale": 1.0, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": decay}
        groups.append({"params": slices, **options})
    return masters, ShardedAdamW(masters, groups, fused)


def run(optimizer, cuts, first, last):
    for step in range(first, last):
        optimizer.decay_factor = decay_factor(step)
        step_once(optimizer, cuts, values(step + 1), rate(step), torch.tensor(0.0))


def step_once(optimizer, cuts, gradient, lr, skip):
    """One step with a gradient that the optimizer has to divide by four."""
    shards = [gradient[a:b] * 4 for a, b in pairwise(cuts)]
    optimizer.step(shards, lr, torch.tensor(4.0), skip)


def assert_is_reference(masters, optimizer):
    weights, moments = reference()
    assert torch.allclose(torch.cat(masters), weights, rtol=1e-6, atol=1e-7)
    for name, expected in moments.items():
        assert torch.allclose(torch.cat(optimizer.states[name]), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("fused", ["torch", "none"])
def test_any_cut_gives_the_weights_and_moments_of_full_parameters(cuts, fused):
    masters, optimizer = make(cuts, fused)
    run(optimizer, cuts, 0, STEPS)
    assert_is_reference(masters, optimizer)
    assert optimizer.steps == STEPS


@pytest.mark.parametrize("fused", ["torch", "none"])
def test_the_optimizer_holds_views_and_no_state_of_its_own(fused):
    cuts = [0, 49, 51, 96]
    masters, optimizer = make(cuts, fused)
    run(optimizer, cuts, 0, 2)
    ours = {t.untyped_storage().data_ptr() for shard in optimizer.states.values() for t in shard}
    theirs = [
        state[name]
        for state in optimizer.torch.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    assert {t.untyped_storage().data_ptr() for t in theirs} == ours
    assert sum(t.numel() for t in theirs) == 2 * NUMEL
    for shards in optimizer.states.values():
        assert [s.shape for s in shards] == [m.shape for m in masters]
    assert all(part.grad is None for part in optimizer.torch.state)


@pytest.mark.parametrize("fused", ["torch", "none"])
def test_a_restored_optimizer_continues_the_saved_one(fused):
    cuts = [0, 49, 51, 96]
    masters, saved = make(cuts, fused)
    run(saved, cuts, 0, 3)
    others, again = make(cuts, fused, torch.cat(masters))
    for name, shards in saved.states.items():
        for target, source in zip(again.states[name], shards, strict=True):
            target.copy_(source)
    again.restore(saved.steps)
    run(again, cuts, 3, STEPS)
    assert_is_reference(others, again)


@pytest.mark.parametrize("fused", ["torch", "none"])
def test_a_skipped_step_changes_nothing_and_is_not_counted(fused):
    cuts = [0, 49, 51, 96]
    masters, optimizer = make(cuts, fused)
    run(optimizer, cuts, 0, 3)
    step_once(optimizer, cuts, torch.full((NUMEL,), torch.nan), 0.1, torch.tensor(1.0))
    assert optimizer.steps == 3
    run(optimizer, cuts, 3, STEPS)
    assert_is_reference(masters, optimizer)


def test_apex_without_an_accelerator_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"optimizer\.fused: apex, but no accelerator is here"):
        make([0, 96], "apex")


def test_a_missing_apex_is_reported_without_initializing_the_device(monkeypatch):
    """Ranks that are forked afterwards could no longer use it."""
    monkeypatch.setattr(torch.cuda, "is_available", pytest.fail)
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(UserError, match=r"apex is not installed .* built from source"):
        find_apex()


class FusedAdam(torch.optim.AdamW):
    """Has apex's arguments, and counts steps where apex does."""

    def __init__(self, groups, adam_w_mode):
        assert adam_w_mode
        super().__init__(groups)

    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                self.state[parameter]["step"].fill_(group["step"] - 1)
        super().step()


def test_a_real_apex_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(optimizers=optimizers))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    cuts = [0, 49, 51, 96]
    masters, optimizer = make(cuts, "apex")
    assert isinstance(optimizer.torch, FusedAdam)
    # Its stand-in steps as torch does, which would initialize the accelerator.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run(optimizer, cuts, 0, 3)
    optimizer.restore(3)
    run(optimizer, cuts, 3, STEPS)
    assert_is_reference(masters, optimizer)
