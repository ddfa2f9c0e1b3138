"""Groups of parameters with optimizers of their own train as torch's optimizers on one process."""

import json
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megafrontier.checkpoint.load import open_checkpoint
from megafrontier.common.errors import UserError
from megafrontier.data.sampling.loader import open_loader
from megafrontier.model.flops import parameter_count
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.optim.schedule import learning_rate
from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import spec_of
from megafrontier.partition.placement import STRATEGIES
from megafrontier.plan.footprint import state_gib
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.estimate import state_bytes
from megafrontier.training.callbacks.save import checkpoint_bytes
from megafrontier.training.loop import train_step
from megafrontier.training.resume.compatibility import check_optimizer
from scripts.benchmarks.shared.step_bytes import step_bytes
from tests import runs
from tests.ranks import make_levels, run_mesh
from tests.torch_muon import iterations_in_fp32

STEPS = 20
MUON = "{match: 'matrix:blocks.*', name: muon, lr: 0.02, momentum: 0.9}"
SGD = "{match: embedding, name: sgd, lr: 0.5, momentum: 0.8, weight_decay: 0.01}"
GROUPS = f"optimizer.groups=[{MUON}, {SGD}, {{match: norm, lr: 0.01}}]"
CHOSEN = (
    GROUPS, f"train.steps={STEPS}", "train.clip_grad_norm=0.2", "train.micro_batch=4",
    "schedule.min_lr=1e-4", "optimizer.weight_decay=0.3", "model.bias=true", "model.heads=4",
    "model.kv_heads=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(folder):
    return train_plain(folder)


def train_plain(folder, *chosen, head_rows=0):
    """Losses of plain PyTorch, with Newton–Schulz iterations in fp32 as on our CPU ranks. With
    `head_rows`, Muon's parameters are the heads of `attention.qkv`. Those of experts are one matrix
    each."""
    config = runs.load(folder / "config.yaml", *CHOSEN, *chosen)
    model = GPT(config.model)
    initialise(model, config.run.seed)
    kinds = {"muon": [], "sgd": [], "norm": [], "matrix": [], "bias": [], "router": []}
    parts = {}
    for name, parameter in model.named_parameters():
        kind = spec_of(name, parameter).kind
        if kind == "expert" or (head_rows and name.endswith("qkv.weight")):
            parts[parameter] = [nn.Parameter(part) for part in divide(parameter.data, head_rows)]
            kinds["muon"] += parts[parameter]
            continue
        if kind == "matrix" and name.startswith("blocks."):
            kind = "muon"
        kinds["sgd" if kind == "embedding" else kind].append(parameter)
    adamw = [
        {"params": kinds["matrix"] + kinds["router"], "weight_decay": 0.3},
        {"params": kinds["bias"], "weight_decay": 0.0},
        {"params": kinds["norm"], "weight_decay": 0.0, "scale": 2},
    ]
    optimizers = [
        (torch.optim.AdamW(adamw, betas=(0.9, 0.95)), 1),
        (torch.optim.SGD(kinds["sgd"], momentum=0.8, weight_decay=0.01), 100),
        (torch.optim.Muon(kinds["muon"], momentum=0.9, weight_decay=0.3), 4),
    ]
    samples, losses = open_loader(config, "train", 0, 1).samples, []
    for step in range(STEPS):
        batch = samples.batch(16 * step, 16)
        loss = model(batch.tokens, batch.targets, batch.documents) / (batch.targets >= 0).sum()
        model.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2
        for parameter, own in parts.items():
            for part, gradient in zip(own, divide(parameter.grad, head_rows), strict=True):
                part.grad = gradient
        lr = learning_rate(step, STEPS, config.optimizer, config.schedule)
        for optimizer, scale in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale * group.get("scale", 1)
            with iterations_in_fp32():
                optimizer.step()
        losses.append(loss.item())
    return losses


def divide(parameter, head_rows):
    """The heads of a matrix, or the matrices of experts."""
    return parameter.split(head_rows) if parameter.dim() == 2 else parameter.unbind()


def train_ranks(folder, sizes, *chosen, steps=STEPS, **splits):
    """The losses of each rank of levels of these sizes."""
    return [one for (one,) in train_ranks_each(folder, sizes, [chosen], steps, **splits)]


def train_ranks_each(folder, sizes, chosen, steps=STEPS, **splits):
    """The losses of each rank for each of several lists of overrides."""
    levels = dict(zip(make_levels(sizes).names, ({"size": size} for size in sizes), strict=True))
    ranks = prod(sizes) // prod(size for name, size in splits.items() if name != "expert")
    always = (
        *CHOSEN,
        f"machine={json.dumps({'levels': levels})}",
        f"train.micro_batch={16 // ranks}",
        *(f"parallel.{name}={size}" for name, size in splits.items()),
    )
    configs = [runs.load(folder / "config.yaml", *always, *more) for more in chosen]

    def train(config, mesh):
        with runs.open_trainer(config, mesh) as trainer:
            return [train_step(trainer).loss for _ in range(steps)]

    def body(mesh):
        return [train(config, mesh) for config in configs]

    return run_mesh(sizes, body, splits=Splits(**splits))


def test_steps_on_every_placement_are_those_of_plain_pytorch(folder, plain):
    """20 on one, 3 on the others."""
    for losses in train_ranks(folder, (2, 2, 1), "partition.strategy=topo"):
        assert losses == pytest.approx(plain, rel=1e-5)
    assert plain[-1] < plain[0] - 0.5
    others = [[f"partition.strategy={name}"] for name in STRATEGIES if name != "topo"]
    assert_first_steps(folder, plain, (2, 2, 1), others)


def assert_first_steps(folder, plain, sizes, overrides, **splits):
    """Each of the runs, given by its overrides, begins as plain PyTorch does. Ranks start once."""
    for found in train_ranks_each(folder, sizes, overrides, steps=3, **splits):
        for chosen, losses in zip(overrides, found, strict=True):
            assert losses == pytest.approx(plain[:3], rel=1e-5), chosen


@pytest.mark.parametrize(
    ("sizes", "splits", "overrides"),
    [
        ((2, 2), {"tensor": 2}, [["zero1", "partition.check_order=true"]]),
        ((2, 2), {"tensor": 4}, [["zero3"]]),  # more ranks than heads of keys
        ((2, 2), {"context": 2}, [["zero1"]]),
        pytest.param(
            (2, 2, 2),
            {"tensor": 2, "context": 2},
            [["topo", "partition.overlap=full"]],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_steps_of_matrices_that_ranks_share_are_those_of_plain_pytorch(
    folder, plain, sizes, splits, overrides
):
    chosen = [[f"partition.strategy={strategy}", *more] for strategy, *more in overrides]
    assert_first_steps(folder, plain, sizes, chosen, **splits)


def test_heads_of_attention_may_be_orthogonalized_one_by_one(folder, plain):
    """As Muon of PyTorch with a parameter for each head of queries, keys and values."""
    groups = GROUPS.replace("momentum: 0.9", "momentum: 0.9, split_heads: true")
    expected = train_plain(folder, head_rows=6)[:3]
    assert expected != pytest.approx(plain[:3], rel=1e-5)
    for sizes, splits in (((1,), {}), ((2, 1), {"tensor": 2})):
        for losses in train_ranks(folder, sizes, groups, steps=3, **splits):
            assert losses == pytest.approx(expected, rel=1e-5)


def test_what_is_no_matrix_of_delta_attention_has_adamw_without_decay(folder):
    """A convolution, rates and steps are biases. Its projections are one matrix, as those of a
    parameter of PyTorch, also where ranks have a part of each."""
    delta = (
        "model.attention={pattern: [delta, full], delta: {key_heads: 2, value_heads: 4, "
        "key_size: 4, value_size: 3}}"
    )
    expected = train_plain(folder, delta)[:3]
    for sizes, splits in (((2, 2), {"tensor": 2, "context": 2}), ((2, 1), {})):
        for losses in train_ranks(folder, sizes, delta, steps=3, **splits):
            assert losses == pytest.approx(expected, rel=1e-5)


def test_each_matrix_of_experts_is_orthogonalized_by_itself(folder):
    """As Muon of PyTorch with a parameter for each expert, whether an owner has several or one."""
    experts = GROUPS.replace("[{", "[{match: expert, name: muon, lr: 0.02, momentum: 0.9}, {", 1)
    chosen = ("model.moe={experts: 6, active: 2, ffn_hidden: 16, balance: none}", experts)
    expected = train_plain(folder, *chosen)[:3]
    for sizes, splits in (((2, 2), {"expert": 2}), ((2, 2, 1), {}), ((1,), {})):
        for losses in train_ranks(folder, sizes, *chosen, steps=3, **splits):
            assert losses == pytest.approx(expected, rel=1e-5)


def test_scaled_values_are_those_of_plain_pytorch_on_ranks(folder):
    """CompleteP for twice the base model's width and depth, with a state that is cut anywhere."""
    scaling = "model.scaling={base_hidden: 12, base_layers: 1, output_multiplier: 2}"
    chosen = (
        "train.steps=6",
        "train.micro_batch=4",
        "train.clip_grad_norm=0",
        "optimizer.eps=1e-3",
    )
    config = runs.load(folder / "config.yaml", scaling, *chosen, "optimizer.weight_decay=0.3")
    model = GPT(config.model)
    initialise(model, config.run.seed)
    blocks = {name: p for name, p in model.named_parameters() if name.startswith("blocks.")}
    ends = {name: p for name, p in model.named_parameters() if name not in blocks}
    hidden = [p for p in blocks.values() if p.dim() == 2]
    norms = [p for p in blocks.values() if p.dim() == 1]
    groups = [
        {"params": hidden, "scale": 0.5, "eps": 1e-3 / 4, "weight_decay": 0.6},
        {"params": norms, "scale": 1.0, "eps": 1e-3 / 4, "weight_decay": 0.0},
        {"params": [ends["head.output.weight"]], "scale": 1.0, "weight_decay": 0.3},
        {"params": [ends[name] for name in ("embedding.tokens.weight", "head.norm.weight")],
         "scale": 1.0, "weight_decay": 0.0},
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-3 / 2)
    samples, expected = open_loader(config, "train", 0, 1).samples, []
    for step in range(6):
        batch = samples.batch(16 * step, 16)
        loss = model(batch.tokens, batch.targets, batch.documents) / (batch.targets >= 0).sum()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * learning_rate(step, 6, config.optimizer, config.schedule)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            return [train_step(trainer).loss for _ in range(6)]

    for losses in run_mesh((2, 2, 1), body):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_low_bit_wires_change_muons_loss_by_less_than_a_third_of_a_percent(folder):
    chosen = (f"optimizer.groups=[{MUON}]", "train.steps=24", "train.micro_batch=4")
    always = (*chosen, "train.precision=bf16")

    def final_loss(mesh, wires):
        config = runs.load(folder / "config.yaml", *always, f"partition.wires={wires}")
        with runs.open_trainer(config, mesh) as trainer:
            return sum([train_step(trainer).loss for _ in range(24)][-8:]) / 8

    def body(mesh):
        return final_loss(mesh, "low"), final_loss(mesh, "exact")

    low, exact = run_mesh((2, 2, 1), body)[0]
    assert low == pytest.approx(exact, rel=3e-3)


def test_a_skipped_step_changes_no_state_of_muon(folder):
    config = runs.load(folder / "config.yaml", f"optimizer.groups=[{MUON}]")

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            train_step(trainer)
            engine = trainer.engine
            shards = [s for found in trainer.optimizer.states.values() for s in found]
            tensors = [s for s in shards if s is not None] + [unit.master for unit in engine.units]
            before = [tensor.clone() for tensor in tensors]
            gradients = [torch.full_like(unit.master, torch.nan) for unit in engine.units]
            one = torch.tensor(1.0)
            trainer.optimizer.step(gradients, 0.1, one, one)
            return all(map(torch.equal, before, tensors))

    assert all(run_mesh((2, 2, 1), body))


def owner_bytes(numel, placement, sizes, itemsize):
    """Bytes that one rank sends over each level, in the mean, when the parts of matrices with
    `numel` elements in all go to their owners and back. There are as many matrices of each shape
    and place in a unit as ranks, or a multiple of that."""
    parts = 2 * numel * itemsize // prod(sizes[: placement.optimizer])
    return [
        (size - 1) * parts // size if level < placement.optimizer else 0
        for level, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8,)])
def test_bytes_of_muon_are_those_of_adamw_and_two_shards_to_and_from_the_owners(folder, sizes):
    """In the mean over ranks. With 8 ranks on one level, that is 1/8 more than AdamW sends for the
    same matrices with wires of the same type."""
    chosen = (f"optimizer.groups=[{MUON}]", "partition.strategy=zero1", "model.layers=8")
    levels = make_levels(sizes)
    names = {name: {"size": size} for name, size in zip(levels.names, sizes, strict=True)}
    machine = f"machine={json.dumps({'levels': names})}"
    config = runs.load(folder / "config.yaml", *chosen, machine)

    def body(mesh):
        with runs.open_trainer(config, mesh) as trainer:
            train_step(trainer)
            result, engine = train_step(trainer), trainer.engine
            units = [unit for unit in engine.units if unit.optimizer == "muon"]
            place = engine.placement
            of_matrices = [0] * len(sizes)
            for unit in units:
                sent = state_bytes(unit.layout.numel, place, levels, engine.wires, 1, 1)
                of_matrices = [a + b for a, b in zip(of_matrices, sent, strict=True)]
            numel = sum(entry.numel for unit in units for entry in unit.layout.entries)
            return (
                [level["bytes"] for level in result.comm.values()],
                step_bytes(engine, trainer.loader.micro_batches),
                owner_bytes(numel, place, sizes, 4),
                of_matrices,
            )

    counted, adamw, more, of_matrices = run_mesh(sizes, body)[0]
    assert counted == [a + b for a, b in zip(adamw, more, strict=True)]
    assert more[-1] <= of_matrices[-1] / sizes[-1]


def test_the_start_says_which_parameters_each_optimizer_has(folder):
    directory = folder / "said"
    chosen = (GROUPS, "train.steps=1", f"run.directory={directory}", "evaluate.batches=0")
    runs.run(folder / "config.yaml", 4, *chosen, "schedule.warmup_steps=0")
    lines = [line for line in runs.log(directory).splitlines() if line.startswith("optimizer ")]
    assert [line.partition(":")[0] for line in lines] == [
        "optimizer sgd at 100 times optimizer.lr",
        "optimizer adamw at 2 times optimizer.lr",
        "optimizer muon at 4 times optimizer.lr",
        "optimizer adamw",
    ]
    assert lines[2].endswith(
        " parameters, blocks.*.attention.qkv.weight, blocks.*.attention.out.weight, "
        "blocks.*.mlp.up.weight, blocks.*.mlp.down.weight"
    )
    assert lines[3].endswith(" parameters, head.output.weight")


def test_checkpoints_go_between_placements_with_each_groups_own_states(folder, plain):
    """Saved on 4 ranks, then loaded by one rank, and by 4 that shard otherwise."""

    def train(name, ranks, *chosen):
        directory = f"run.directory={folder}/{name}"
        always = (*CHOSEN, "evaluate.batches=0", "train.stop_at=4", directory)
        return runs.losses(runs.run(folder / "config.yaml", ranks, *always, *chosen))

    train("saved", 4, "train.stop_at=2", "partition.strategy=topo")
    path = folder / "saved/checkpoints/step-00000002"
    resumed = f"checkpoint.resume={path}"
    again = train("again", 4, resumed, "partition.strategy=topo")
    assert again == train("whole", 4, "partition.strategy=topo")[2:]
    assert train("one", 1, resumed, "machine=laptop") == pytest.approx(plain[2:4], rel=1e-5)
    split = train("split", 4, resumed, "partition.strategy=zero3", "parallel.tensor=2")
    assert split == pytest.approx(plain[2:4], rel=1e-5)
    stored = open_checkpoint(path).manifest.tensors
    states = {name: set(boxes[0].unit.states) - {"weight"} for name, boxes in stored.items()}
    assert states["head.output.weight"] == {"exp_avg", "exp_avg_sq"}
    assert states["blocks.1.mlp.up.weight"] == {"momentum_buffer"}


def test_a_checkpoint_of_another_optimizer_or_without_a_state_is_refused(folder, capfd):
    directory = f"run.directory={folder}/muon"
    chosen = ("train.steps=2", "evaluate.batches=0", "machine=laptop")
    runs.run(folder / "config.yaml", 1, *chosen, directory, f"optimizer.groups=[{MUON}]")
    path = folder / "muon/checkpoints/step-00000002"
    resumed = ("train.steps=3", f"checkpoint.resume={path}", f"run.directory={folder}/other")
    config = runs.load(folder / "config.yaml", *chosen, *resumed)
    capfd.readouterr()
    assert runs.train(config, 1) == 2
    name = "blocks.0.attention.qkv.weight"
    advice = "or checkpoint.weights_only=true"
    line = f"adamw for {name}, but {path} has states of muon, need muon, {advice}"
    assert capfd.readouterr().err.splitlines() == [f"megafrontier: optimizer: {line}"]
    runs.run(folder / "config.yaml", 1, *chosen, *resumed, "checkpoint.weights_only=true")
    checkpoint = open_checkpoint(path)
    states = {
        state: kind for state, kind in checkpoint.manifest.states.items() if state != "exp_avg"
    }
    lacking = SimpleNamespace(states=states, config=checkpoint.manifest.config)
    with pytest.raises(UserError, match=r"adamw for .*, but /x has no exp_avg, need it, or check"):
        check_optimizer(
            runs.load(folder / "config.yaml", f"optimizer.groups=[{MUON}]"),
            SimpleNamespace(path="/x", manifest=lacking),
        )


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (
            "optimizer.groups=[{match: 'block.*'}]",
            "optimizer.groups[0].match: block.*, matches no parameter, need one of matrix, norm, "
            "bias, embedding, expert, router, or a pattern of names such as head.output.weight",
        ),
        (
            "optimizer.groups=[{match: matrix}, {match: 'head.*'}]",
            "optimizer.groups[1].match: head.*, need head.output.weight in one group, it is in "
            "optimizer.groups[0] too",
        ),
        (
            "optimizer.groups=[{match: 'blocks.*', name: muon}]",
            "optimizer.groups[0]: muon, but blocks.0.norm1.weight has shape 24, need a matrix, or "
            "adamw or sgd for it",
        ),
        (
            "optimizer.name=muon",
            "optimizer.name: muon, but blocks.0.norm1.weight has shape 24, need a matrix, or adamw "
            "or sgd for it",
        ),
        (
            "optimizer.groups=[{match: 'blocks.*.mlp.*.weight', name: muon, split_heads: true}]",
            "optimizer.groups[0].split_heads: true, need name: muon, and a matrix of attention "
            "heads (attention.qkv) in the group",
        ),
        (
            "optimizer.split_heads=true",
            "optimizer.split_heads: true, need name: muon, and a matrix of attention heads "
            "(attention.qkv) in the group",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused_in_one_line(folder, chosen, line):
    with pytest.raises(UserError) as caught:
        runs.check(folder / "config.yaml", 4, chosen)
    assert str(caught.value) == line


def test_memory_by_formula_counts_each_optimizers_states(folder):
    """AdamW keeps 12 bytes for an element, Muon and SGD 8."""
    plain = runs.load(folder / "config.yaml", "partition.strategy=zero1", "train.precision=bf16")
    sgd = replace(plain, optimizer=replace(plain.optimizer, name="sgd"))
    plan = resolve_plan(plain, 4)
    saved = (state_gib(plain, plan) - state_gib(sgd, plan)) * 2**30
    assert saved == pytest.approx(4 * parameter_count(plain.model) / 4)
    assert checkpoint_bytes(sgd, plan) == 8 * parameter_count(plain.model)
