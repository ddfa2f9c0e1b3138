"""A sharded module, trained with plain PyTorch's loop, has plain PyTorch's losses and weights."""

import pytest
import torch
from torch import nn

import megafrontier
from tests.api.modules import STEPS, Regression, batch, micro_batches, run_script

# Without a large eps, Adam turns rounding errors of tiny gradients into whole steps.
ADAM = {"lr": 0.05, "eps": 1e-3}


def param_groups(model):
    """Three groups that interleave in every block, with other learning rates and decays."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if p.ndim > 1 and "blocks" in n], "weight_decay": 0.3},
        {"params": [p for n, p in named if p.ndim == 1], "lr": 0.02, "weight_decay": 0.0},
        {"params": [p for n, p in named if p.ndim > 1 and "blocks" not in n]},
    ]


def train(model, optimizer, rank=0, size=1, first=0, is_sharded=False):
    """Losses of this rank of training and of evaluation in between."""
    clip = megafrontier.clip_grad_norm_ if is_sharded else clip_plain
    # After a checkpoint, or a first call, the schedule goes on.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s), first - 1)
    losses = []
    for step in range(first, first + STEPS):
        total = 0.0
        for part, context in micro_batches(batch(step, rank, size), 2, model, is_sharded):
            loss = model(part) / 2
            with context:
                loss.backward()
            total += loss.item()
        norm = clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            losses.append((total, model(batch(100)).item(), float(norm)))
    return losses


def clip_plain(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def prepare(model):
    """A gradient hook, set before the model is sharded."""
    model.head.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def plain():
    model = prepare(Regression())
    losses = train(model, torch.optim.AdamW(param_groups(model), **ADAM))
    return torch.tensor(losses), model.state_dict()


def sharded(mesh, **options):
    model = prepare(Regression())
    assert megafrontier.shard(model, mesh, **options) is model
    optimizer = megafrontier.AdamW(model, param_groups(model), **ADAM)
    assert isinstance(optimizer, torch.optim.Optimizer)
    model.first.weight.register_hook(lambda gradient: gradient)
    losses = train(model, optimizer, mesh.data_rank, mesh.data_size, is_sharded=True)
    return losses, model.state_dict()


def assert_same(results, expected):
    """The mean loss over the ranks, the other numbers of each rank, and the weights."""
    losses, weights = expected
    found = torch.tensor([rank_losses for rank_losses, _ in results])
    assert torch.allclose(found[:, :, 0].mean(0), losses[:, 0], rtol=1e-5)
    for rank in range(len(results)):
        assert torch.allclose(found[rank, :, 1:], losses[:, 1:], rtol=1e-5)
        for name, value in results[rank][1].items():
            if "calls" not in name:
                assert torch.allclose(value, weights[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 2), {"blocks": "blocks.*"}),
        ((2, 2), {"blocks": ["blocks.*", "blocks.*.mlp", "head"], "placement": "zero3"}),
        ((2,), {"blocks": "blocks.*", "placement": "ddp", "overlap": "none"}),
        ((3,), {"placement": {"weights": "none", "gradients": "none", "optimizer": "world"}}),
        ((1,), {"blocks": "blocks.*"}),
        ((2,), {"blocks": "blocks.*", "offload": True}),
        ((1,), {"blocks": "blocks.*", "offload": True, "overlap": "none"}),
        ((2,), {"blocks": "blocks.*", "placement": "zero3", "weights_copy": False}),
    ],
)
def test_training_is_that_of_plain_pytorch(sizes, options):
    results = run_script(sizes, lambda mesh: sharded(mesh, **options))
    assert_same(results, plain())


OTHERS = {
    torch.optim.SGD: {"momentum": 0.9, "nesterov": True, "dampening": 0.0},
    torch.optim.RMSprop: {"momentum": 0.5},
    torch.optim.NAdam: {},
    torch.optim.Adagrad: {},
}


def test_other_optimizers_go_on_from_a_checkpoint_of_other_ranks(tmp_path):
    def begin(mesh):
        for make, options in OTHERS.items():
            model = megafrontier.shard(Regression(), mesh, blocks="blocks.*", placement="zero1")
            optimizer = megafrontier.Optimizer(model, make, param_groups(model), lr=0.01, **options)
            train(model, optimizer, mesh.data_rank, mesh.data_size, is_sharded=True)
            megafrontier.save(model, optimizer, tmp_path / make.__name__, STEPS)

    def go_on(mesh):
        found = []
        for make, options in OTHERS.items():
            torch.manual_seed(9)
            model = nn.Sequential(Regression())[0]
            for parameter in model.parameters():
                nn.init.normal_(parameter)
            offload = make is torch.optim.NAdam
            megafrontier.shard(model, mesh, blocks="blocks.*", placement="zero3", offload=offload)
            optimizer = megafrontier.Optimizer(model, make, param_groups(model), lr=1.0, **options)
            first = megafrontier.load(model, optimizer, tmp_path / make.__name__)
            assert first == STEPS
            losses = train(model, optimizer, mesh.data_rank, mesh.data_size, first, is_sharded=True)
            found.append((losses, model.state_dict()))
        return found

    run_script((2,), begin)
    results = run_script((3,), go_on)
    for number, (make, options) in enumerate(OTHERS.items()):
        model = Regression()
        optimizer = make(param_groups(model), lr=0.01, **options)
        train(model, optimizer)
        losses = torch.tensor(train(model, optimizer, first=STEPS))
        assert_same([rank[number] for rank in results], (losses, model.state_dict()))


def test_low_bit_wires_go_on_from_a_checkpoint_to_the_bit(tmp_path):
    """With bf16 weights, published deltas and error feedback."""

    def begin(mesh):
        options = {"blocks": "blocks.*", "wires": "low", "dtype": torch.bfloat16}
        model = megafrontier.shard(Regression(), mesh, **options)
        return model, megafrontier.AdamW(model, lr=0.02)

    def train_low(model, optimizer, mesh, first, last):
        for step in range(first, last):
            x = batch(step, mesh.data_rank, mesh.data_size)
            with torch.autocast("cpu", torch.bfloat16):
                model(x).backward()
            optimizer.step()
        return model.state_dict()

    def body(mesh):
        model, optimizer = begin(mesh)
        train_low(model, optimizer, mesh, 0, 5)
        megafrontier.save(model, optimizer, tmp_path, 5)
        weights = train_low(model, optimizer, mesh, 5, 8)
        again, other = begin(mesh)
        assert megafrontier.load(again, other, tmp_path) == 5
        found = train_low(again, other, mesh, 5, 8)
        return all(torch.equal(found[name], value) for name, value in weights.items()), weights

    results = run_script((2, 2), body)
    assert all(is_same for is_same, _ in results)
    model = Regression()
    before = model(batch(100)).item()
    model.load_state_dict(results[0][1])
    assert model(batch(100)).item() < 0.9 * before
