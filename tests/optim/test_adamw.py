"""AdamW on shards is torch's AdamW on full parameters, however they are cut."""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megafrontier.common.errors import UserError
from megafrontier.config import OptimizerConfig
from megafrontier.optim.adamw import ShardedAdamW, find_apex

NUMEL, DECAYED = 96, 50
CUTS = [[0, 96], [0, 10, 50, 96], [0, 1, 49, 51, 95, 96]]
STEPS = 6


def values(seed):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def rate(step):
    return 0.1 / (step + 1)


def config(fused="torch", decay=0.3):
    return OptimizerConfig(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay, fused=fused)


def reference(decay=0.3):
    """Weights and moments of plain torch, decayed and other parameters in two groups."""
    start = values(0)
    parameters = [torch.nn.Parameter(p.clone()) for p in (start[:DECAYED], start[DECAYED:])]
    groups = [
        {"params": [parameter], "weight_decay": d}
        for parameter, d in zip(parameters, (decay, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    for step in range(STEPS):
        gradient = values(step + 1)
        parameters[0].grad, parameters[1].grad = gradient[:DECAYED], gradient[DECAYED:]
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    state = [optimizer.state[parameter] for parameter in parameters]
    return (
        torch.cat([p.detach() for p in parameters]),
        {name: torch.cat([s[name] for s in state]) for name in ("exp_avg", "exp_avg_sq")},
    )


def make(cuts, chosen, weights=None):
    """Shards of the flat parameter, and the optimizer on them."""
    flat = values(0) if weights is None else weights
    bounds = list(pairwise(cuts))
    masters = [flat[a:b].clone() for a, b in bounds]
    stops = [max(0, min(DECAYED, b) - a) for a, b in bounds]
    return masters, ShardedAdamW(masters, stops, chosen)


def run(optimizer, cuts, first, last):
    for step in range(first, last):
        gradient = values(step + 1)
        step_once(optimizer, cuts, gradient, rate(step), torch.tensor(0.0))


def step_once(optimizer, cuts, gradient, lr, skip):
    """One step with a gradient that the optimizer has to divide by four."""
    shards = [gradient[a:b] * 4 for a, b in pairwise(cuts)]
    optimizer.step(shards, lr, torch.tensor(4.0), skip)


def assert_is_reference(masters, optimizer):
    weights, moments = reference()
    assert torch.allclose(torch.cat(masters), weights, rtol=1e-6, atol=1e-7)
    for name, expected in moments.items():
        assert torch.allclose(torch.cat(optimizer.moments[name]), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("fused", ["torch", "none"])
def test_any_cut_gives_the_weights_and_moments_of_full_parameters(cuts, fused):
    masters, optimizer = make(cuts, config(fused))
    run(optimizer, cuts, 0, STEPS)
    assert_is_reference(masters, optimizer)
    assert optimizer.steps == STEPS


@pytest.mark.parametrize("fused", ["torch", "none"])
def test_the_optimizer_holds_views_and_no_state_of_its_own(fused):
    cuts = [0, 49, 51, 96]
    masters, optimizer = make(cuts, config(fused))
    run(optimizer, cuts, 0, 2)
    ours = {t.untyped_storage().data_ptr() for shard in optimizer.moments.values() for t in shard}
    theirs = [
        state[name]
        for state in optimizer._optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    assert {t.untyped_storage().data_ptr() for t in theirs} == ours
    assert sum(t.numel() for t in theirs) == 2 * NUMEL
    for shards in optimizer.moments.values():
        assert [s.shape for s in shards] == [m.shape for m in masters]
        assert all(s.is_contiguous() for s in shards)


@pytest.mark.parametrize("fused", ["torch", "none"])
def test_a_restored_optimizer_continues_the_saved_one(fused):
    cuts = [0, 49, 51, 96]
    masters, saved = make(cuts, config(fused))
    run(saved, cuts, 0, 3)
    others, again = make(cuts, config(fused), torch.cat(masters))
    for name, shards in saved.moments.items():
        for target, source in zip(again.moments[name], shards, strict=True):
            target.copy_(source)
    again.restore(saved.steps)
    run(again, cuts, 3, STEPS)
    assert_is_reference(others, again)


@pytest.mark.parametrize("fused", ["torch", "none"])
def test_a_skipped_step_changes_nothing_and_is_not_counted(fused):
    cuts = [0, 49, 51, 96]
    masters, optimizer = make(cuts, config(fused))
    run(optimizer, cuts, 0, 3)
    step_once(optimizer, cuts, torch.full((NUMEL,), torch.nan), 0.1, torch.tensor(1.0))
    assert optimizer.steps == 3
    run(optimizer, cuts, 3, STEPS)
    assert_is_reference(masters, optimizer)


def test_gradients_are_released_after_the_step():
    _, optimizer = make([0, 96], config())
    run(optimizer, [0, 96], 0, 1)
    assert all(part.grad is None for part in optimizer._optimizer.state)


@pytest.fixture
def accelerator(monkeypatch):
    """Let apex be searched for, and found only where the test puts it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("apex", "apex.optimizers"):
        monkeypatch.setitem(sys.modules, name, None)  # restored after the test
        del sys.modules[name]


def test_apex_without_an_accelerator_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"optimizer\.fused: apex, but no accelerator is here"):
        make([0, 96], config(fused="apex"))


def test_apex_is_found_without_initializing_the_device(monkeypatch):
    """Ranks that are forked afterwards could no longer use it."""
    monkeypatch.setattr(torch.cuda, "is_available", pytest.fail)
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(UserError, match="apex is not installed"):
        find_apex()


def test_a_missing_apex_is_reported(accelerator, monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(UserError, match=r"apex is not installed .* from source, not from PyPI"):
        find_apex()


@pytest.mark.parametrize(
    "source", ["name = 'apex'", "import velruse.not_installed"], ids=["imports", "does not import"]
)
def test_the_unrelated_apex_of_pypi_is_recognised(accelerator, monkeypatch, tmp_path, source):
    """It needs packages of its own, so that it may not even import."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="PyPI's apex is an unrelated web-authentication") as error:
        find_apex()
    assert "\n" not in str(error.value)


def test_a_real_apex_that_does_not_import_gives_its_reason(accelerator, monkeypatch, tmp_path):
    (tmp_path / "apex" / "optimizers").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex" / "optimizers" / "__init__.py").write_text("import amp_C_not_built\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="it does not import: No module named 'amp_C_not_built'"):
        find_apex()


class FusedAdam(torch.optim.AdamW):
    """Has apex's arguments, and counts steps where apex does."""

    def __init__(self, groups, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(groups, lr=lr, betas=betas, eps=eps)

    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                self.state[parameter]["step"].fill_(group["step"] - 1)
        super().step()


def test_a_real_apex_is_used(accelerator, monkeypatch):
    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(optimizers=optimizers))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    cuts = [0, 49, 51, 96]
    masters, optimizer = make(cuts, config("apex"))
    assert isinstance(optimizer._optimizer, FusedAdam)
    # Its stand-in steps as torch does, which would initialize the accelerator.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run(optimizer, cuts, 0, 3)
    optimizer.restore(3)
    run(optimizer, cuts, 3, STEPS)
    assert_is_reference(masters, optimizer)
