"""The examples in CONTRIBUTING.md run."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Literal, get_args

import pytest
import torch
from torch import nn

from megafrontier.comm.wires import registry
from megafrontier.comm.wires.wire import Wire, WorkWires, make_wire
from megafrontier.common.buffers import Workspace
from megafrontier.common.errors import UserError
from megafrontier.config import (
    ModelConfig,
    OptimizerConfig,
    OptimizerGroupConfig,
    ScalingConfig,
    SitesConfig,
    WireFormat,
    validation,
)
from megafrontier.config.model import blocks
from megafrontier.config.optimizer import OptimizerName
from megafrontier.data.sampling.loader import open_loader
from megafrontier.families import family_for
from megafrontier.launch.main import train
from megafrontier.model.attention.base import Attention
from megafrontier.model.attention.kinds import KINDS, KVCache
from megafrontier.model.flops import parameter_count
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice, initialise
from megafrontier.optim.gradients import global_norm
from megafrontier.optim.groups import OPTIMIZERS
from megafrontier.optim.schedule import learning_rate
from megafrontier.parallel.mesh import Splits
from megafrontier.parallel.param_spec import spec_of
from megafrontier.partition import Engine, Placement, Wires, shard
from megafrontier.partition.rules import Overlap, StateRules
from megafrontier.pipeline import schedule
from megafrontier.pipeline.messages import Messenger
from megafrontier.pipeline.simulate import peak_in_flight
from megafrontier.pipeline.table import Transfer, TransferKind
from megafrontier.plan.footprint import GIB, state_gib
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.sites import outer
from megafrontier.splits.apply import apply_splits
from megafrontier.splits.context import ContextSplit, check_context_split
from megafrontier.splits.token_dispatch import TokenExchange
from megafrontier.splits.tokens import TokenGroup
from megafrontier.training.callbacks.base import Callback
from scripts.benchmarks.shared.step_bytes import step_bytes
from tests import runs
from tests.model.small_models import SHAPES, small_config
from tests.partition.tiny import build, engine_step, finished_gradients
from tests.ranks import run_mesh, run_ranks

TEXT = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def example(word, **names):
    exec(next(block for block in BLOCKS if word in block), names)
    return names


def test_the_example_of_a_family_undoes_itself():
    names = example("def export", size=2, config=SimpleNamespace(heads=3))
    ours = torch.randn(18, 4)
    (theirs,) = names["export"](ours)
    assert not torch.equal(theirs, ours)
    assert torch.equal(names["load"]([theirs]), ours)


def test_the_example_of_a_wire_sums_over_ranks(monkeypatch):
    monkeypatch.setattr(registry, "FORMATS", dict(registry.FORMATS))
    codec = example("class Float8")["Float8"]()
    assert registry.FORMATS["e5m2"][0].name == codec.name

    def body(hierarchy):
        values = torch.arange(1.0, 9.0) * (hierarchy.rank + 1)
        out, sent = Wire(codec).reduce(values, hierarchy.groups[0], Workspace(values.device))
        return out.tolist(), sent

    found = run_ranks((2,), body)
    assert [sent for _, sent in found] == [4, 4]
    total = torch.tensor([value for part, _ in found for value in part])
    assert torch.allclose(total, torch.arange(1.0, 9.0) * 3, rtol=0.125)


def test_the_key_that_chooses_the_example_of_a_wire_trains(tmp_path, monkeypatch):
    """With its name among `WireFormat`, as the text says."""
    (chosen,) = re.findall(r"`(partition\.wires\.\S+=e5m2)`", TEXT)
    path = runs.make_config_file(tmp_path)
    exact = runs.losses(
        runs.run(path, 2, *runs.ONE, "train.steps=4", f"run.directory={tmp_path}/exact")
    )
    monkeypatch.setitem(registry.FORMATS, "e5m2", None)  # is taken out again after the test
    monkeypatch.setattr(validation, "WireFormat", Literal[*get_args(WireFormat), "e5m2"])
    example("class Float8")
    losses = runs.losses(runs.run(path, 2, *runs.ONE, "train.steps=4", chosen))
    assert "; gradients world e5m2; " in runs.log(tmp_path / "run")
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.01)


class Halves(registry.Codec):
    """Messages of the values' own type that are not the values."""

    dtype, name = torch.float32, "halves"

    def message_bytes(self, count):
        return 4 * count

    def encode(self, values, messages, errors=None):
        messages.copy_(values / 2)

    def decode(self, messages, out, accumulate=False):
        registry.store(messages * 2, out, accumulate)

    def decode_sum(self, messages, out, accumulate=False):
        registry.store(messages.sum(0) * 2, out, accumulate)


class Fixed32(Halves):
    """Integers of four bytes."""

    dtype, name, is_quantized = torch.int32, "fixed32", True

    def encode(self, values, messages, errors=None):
        messages.copy_(values.mul(256).round())

    def decode(self, messages, out, accumulate=False):
        registry.store(messages.float() / 256, out, accumulate)

    def decode_sum(self, messages, out, accumulate=False):
        registry.store(messages.sum(0) / 256, out, accumulate)


def move_tokens(mesh, engine, wires, rows):
    """Each token goes to both ranks and comes back."""
    exchange = TokenExchange(engine, mesh.hierarchy(("pipeline",)), wires)
    chosen = torch.tensor([[0, 1]]).expand(len(rows), 2)
    ((_, counts),) = exchange.chunks(chosen)
    move, routes = exchange.start_dispatch(rows, chosen, torch.ones(chosen.shape), counts, 1)
    exchange.finish_dispatch(move, routes, 1)
    engine.ledger.take()  # leave out the exact numbers that go with the tokens
    spread = exchange.wait(exchange.start_spread(rows, routes))[0]
    return spread, exchange.wait(exchange.start_collect(spread, routes))[0]


def move_activations(mesh, engine, wires, rows):
    """Tensor parallelism's."""
    group = TokenGroup(mesh.rank, 2)
    group.connect(engine, mesh.hierarchy(("pipeline",)), wires)
    return group.gather(rows), group.reduce(rows)


def move_keys(mesh, engine, wires, rows):
    """Context parallelism's keys and their gradients."""
    group = TokenGroup(mesh.rank, 2)
    group.connect(engine, mesh.hierarchy(("pipeline",)), wires)
    split, documents = ContextSplit(group), torch.tensor([0, 2 * len(rows)])
    past = split.begin_gather(rows.unflatten(1, (2, -1)), documents)()
    return past, split.begin_reduce(past, documents, rows.dtype)()


def move_hidden_states(mesh, engine, wires, rows):
    """A pipeline's."""
    kind = (TransferKind.SEND_ACTIVATION, TransferKind.RECEIVE_ACTIVATION)[mesh.rank]
    messenger = Messenger(engine, mesh, wires)
    (message,) = messenger.start([(Transfer(kind, mesh.rank, 0, 1 - mesh.rank), rows.clone())])
    messenger.wait(message)
    mesh.drain_and_barrier()
    return (message.tensor,)


MOVES = (move_tokens, move_activations, move_keys, move_hidden_states)


def moved(mesh, move, wires):
    """The result, and the bytes in the ledger."""
    hierarchy = mesh.hierarchy()
    rules = StateRules.plain(Placement.named("ddp", hierarchy.levels), hierarchy.levels)
    engine = Engine(rules, hierarchy, Overlap("safe", 0))
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(mesh.rank))
    result = torch.cat([t.flatten() for t in move(mesh, engine, wires, rows)])
    return result, engine.ledger.take(wait=True)[0][0]


@pytest.fixture(params=["e5m2", Halves, Fixed32])
def codec(request, monkeypatch):
    """The example, whose messages are bytes, and codecs with messages of the values' type and of
    integers of four bytes."""
    monkeypatch.setattr(registry, "FORMATS", dict(registry.FORMATS))
    return example("class Float8")["Float8"]() if request.param == "e5m2" else request.param()


def test_any_codec_carries_tokens_and_activations(codec):

    def body(mesh):
        formats = WorkWires((None,)), WorkWires((codec,))
        return [[moved(mesh, move, wires) for wires in formats] for move in MOVES]

    for rank in run_mesh((2,), body, splits=Splits(pipeline=2)):
        for move, ((exact, plain), (result, sent)) in zip(MOVES, rank, strict=True):
            assert (result - exact).norm() < 0.1 * exact.norm(), move.__name__
            assert sent == plain * codec.message_bytes(8) / 32, move.__name__


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_any_codec_carries_weights_and_gradients(codec, strategy):
    def body(hierarchy):
        results = []
        for wire in (make_wire("fp32"), Wire(codec)):
            wires = Wires((wire,), (wire,))
            model, engine, optimizer = build(hierarchy, wires, strategy)
            losses = [engine_step(engine, model, optimizer, step, 1) for step in range(3)]
            engine.finish_publishing()
            sent = engine.ledger.take()[0]
            assert sent == [3 * count for count in step_bytes(engine, 1)]
            results.append((losses, sent, torch.cat(finished_gradients(engine, hierarchy.rank))))
        return results

    for (exact, plain, target), (losses, sent, gradients) in run_ranks((2,), body):
        assert losses == pytest.approx(exact, rel=0.1)
        assert (gradients - target).norm() < 0.1 * target.norm()
        assert sent[0] == plain[0] * codec.message_bytes(8) / 32


def test_any_codec_carries_the_changes_of_sites(codec, monkeypatch):
    monkeypatch.setattr(outer, "codec_of", lambda _wire: codec)
    unit = SimpleNamespace(master=torch.randn(outer.ROW + 8))
    site = outer.Outer([unit], SitesConfig())
    change = site.weights[0] - unit.master.mul_(0.5)
    (message,) = site.encode(0)
    assert message.nbytes == codec.message_bytes(outer.ROW + 8)
    decoded = site.decode(message, len(change), change.device)
    assert (decoded - change).norm() < 0.1 * change.norm()


def test_the_example_of_a_module_is_divided_and_trains_as_on_one_process():
    adapter, (tokens, targets) = example("class Adapter")["Adapter"], torch.arange(64).view(2, 4, 8)
    config = small_config(layers=2, sequence_length=8)

    def body(mesh):
        with torch.device("meta"):
            model = GPT(config)
            for block in model.blocks:
                block.mlp = nn.Sequential(block.mlp, adapter(config.hidden, 8, 0.1))
        connect, levels = apply_splits(model, mesh), mesh.hierarchy().levels
        rules = StateRules.plain(Placement.named("zero3", levels), levels)
        initial = partial(initial_slice, 7)
        engine = shard(model, model.units(), rules, mesh, initial=initial)
        connect(engine)
        widths = [tuple(spec.shape) for unit in engine.units for spec in unit.specs.values()]
        assert (8, config.hidden) in widths
        loss = model(tokens % config.vocab_size, targets % config.vocab_size)
        loss.backward()
        gradients = engine.finish_gradients()
        counts = [unit.counts for unit in engine.trained_units]
        norm = global_norm(gradients, counts, mesh.world)
        return loss.item(), norm.item()

    (one,) = run_mesh((1,), body)
    for rank in run_mesh((2,), body, splits=Splits(tensor=2)):
        assert rank == pytest.approx(one, rel=1e-5)


def test_the_example_of_a_schedule_trains_as_one_process_and_holds_every_micro_batch(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(schedule, "SCHEDULES", dict(schedule.SCHEDULES))
    example("def gpipe")
    table = schedule.make_table("gpipe", 2, 1, 4)
    assert peak_in_flight(table) == (4, 4)
    path = runs.make_config_file(tmp_path)
    chosen = (*runs.ONE, "train.steps=3", "train.micro_batch=4")
    alone = runs.losses(runs.run(path, 1, *chosen, f"run.directory={tmp_path}/alone"))
    config = runs.load(path, *chosen, "parallel.pipeline=2")
    config = replace(config, parallel=replace(config.parallel, schedule="gpipe"))
    assert train(config, 2) == 0
    assert runs.losses(runs.metrics(tmp_path / "run")) == pytest.approx(alone, rel=1e-5)


def test_the_example_of_a_callback_is_one():
    assert issubclass(example("class GradientShare")["GradientShare"], Callback)


LION = ("machine={levels: {world: {}}}", "partition.strategy=zero1", "optimizer.name=lion")
LION += ("optimizer.lr=1e-3", "optimizer.weight_decay=0.3", "train.clip_grad_norm=0.2")
LION += ("train.steps=4", "train.micro_batch=4", "evaluate.batches=0")


@pytest.fixture
def lion(monkeypatch):
    """The example of an optimizer, added as it says."""
    kind = example("class ShardedLion")["ShardedLion"]
    monkeypatch.setitem(OPTIMIZERS, kind.name, kind)
    names = Literal[(*get_args(OptimizerName), kind.name)]
    for config, choice in ((OptimizerConfig, names), (OptimizerGroupConfig, names | None)):
        monkeypatch.setattr(config.__dataclass_fields__["name"], "type", choice)


def losses_on_one_process(config):
    """Losses of plain PyTorch with the formulas of the paper."""
    model, losses = GPT(config.model), []
    initialise(model, config.run.seed)
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    samples = open_loader(config, "train", 0, 1).samples
    first, second = config.optimizer.betas
    for step in range(config.train.steps):
        batch = samples.batch(16 * step, 16)
        model.zero_grad()
        loss = model(batch.tokens, batch.targets).sum() / (batch.targets >= 0).sum()
        loss.backward()
        losses.append(loss.item())
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2
        lr = learning_rate(step, config.train.steps, config.optimizer, config.schedule)
        for name, parameter in model.named_parameters():
            gradient, momentum = parameter.grad, momenta[name]
            decay = config.optimizer.weight_decay * (spec_of(name, parameter).kind == "matrix")
            update = torch.sign(first * momentum + (1 - first) * gradient)
            momenta[name] = second * momentum + (1 - second) * gradient
            parameter.data -= lr * (update + decay * parameter.data)
    return losses


def test_the_example_of_an_optimizer_trains_as_one_process_and_resumes(lion, config_file):
    expected = losses_on_one_process(runs.load(config_file, *LION))
    runs.run(config_file, 2, *LION, "train.stop_at=2")
    offload = "partition.offload.optimizer=cpu"
    resumed = runs.losses(runs.run(config_file, 4, *LION, offload))
    assert resumed == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.05


def test_the_memory_of_the_example_of_an_optimizer_is_counted(lion, config_file):
    """A master and one state: 8 bytes an element, where AdamW keeps 12."""
    config = runs.load(config_file, *LION, "train.precision=bf16")
    adamw = replace(config, optimizer=replace(config.optimizer, name="adamw"))
    plan, numel = resolve_plan(config, 2), parameter_count(config.model)
    saved = (state_gib(adamw, plan) - state_gib(config, plan)) * GIB
    assert saved == pytest.approx(4 * numel / 2)
    held, of_adamw = (simulate(c, plan, UNKNOWN).memory["optimizer"] for c in (config, adamw))
    assert held == pytest.approx(of_adamw * 8 / 12)


def test_the_config_names_the_optimizers_that_there_are():
    assert set(get_args(OptimizerName)) == OPTIMIZERS.keys()


@pytest.fixture
def linear_attention(monkeypatch):
    """The example of an attention kind, added as it says. Returns the class of its options."""
    kind = example("class LinearAttention")["LinearAttention"]
    monkeypatch.setitem(KINDS, "linear", kind)
    options = indent(next(block for block in BLOCKS if "linear_every:" in block), "    ")
    names = dict(vars(blocks))
    exec(f"@dataclass\nclass Extended(AttentionConfig):\n{options}", names)
    monkeypatch.setattr(ModelConfig.__dataclass_fields__["attention"], "type", names["Extended"])
    return names["Extended"]


LINEAR = ("machine=laptop", "model.heads=4", "model.kv_heads=2", "model.sequence_length=96")
LINEAR += ("model.attention={linear_every: 2}", "data.document_mask=true")
LINEAR += ("train.steps=2", "train.micro_batch=4", "evaluate.batches=0", "log.every=1")


def test_the_example_of_an_attention_kind_trains_as_one_process(
    linear_attention, config_file, tmp_path
):
    expected = runs.losses(runs.run(config_file, 1, *LINEAR))
    for split in ("tensor", "pipeline"):
        chosen = f"parallel.{split}=2", f"run.directory={tmp_path / split}"
        found = runs.losses(runs.run(config_file, 2, *LINEAR, *chosen))
        assert found == pytest.approx(expected, rel=1e-5)
    config = runs.load(config_file, *LINEAR, "parallel.tensor=2")
    softmax = runs.load(
        config_file, *LINEAR, "parallel.tensor=2", "model.attention.linear_every=null"
    )
    flops = [simulate(c, resolve_plan(c, 2), UNKNOWN).flops for c in (config, softmax)]
    # In the simulation, chunks of 64 of 96 tokens and a state; in `flops` the state alone.
    assert 0 < flops[0] != flops[1]


def linear_model(options, **changes):
    """A model of one block with softmax attention and one with linear attention, or of the latter
    alone."""
    shape = SHAPES["llama grouped, tied, longer texts"] | {"sequence_length": 150}
    config = small_config(**shape, attention=options(**changes))
    model = GPT(config).eval()
    initialise(model, 0)
    return model


def test_the_example_of_an_attention_kind_keeps_documents_apart(linear_attention):
    model = linear_model(linear_attention, linear_every=1)
    tokens = torch.randint(50, (2, 150), generator=torch.Generator().manual_seed(0))
    bounds = [0, 1, 70, 150, 280, 300]
    packed = model(tokens, tokens, torch.tensor(bounds, dtype=torch.int32))
    documents = [tokens.flatten()[None, start:stop] for start, stop in pairwise(bounds)]
    apart = sum(model(document, document) for document in documents)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)
    assert abs(packed - model(tokens, tokens)) > 1e-3


def test_the_example_of_an_attention_kind_generates_as_without_its_cache(linear_attention):
    model = linear_model(linear_attention, linear_every=2)
    tokens = torch.randint(50, (2, 150), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config, batch=2)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split([100, 1, 1, 48], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-5, atol=1e-5)
    _, state = cache.layers
    assert state.state.shape == (2, 4, 8, 9)


def test_the_example_of_an_attention_kind_refuses_what_it_does_not_support(linear_attention):
    config = linear_model(linear_attention, linear_every=2).config
    with pytest.raises(UserError, match=r"parallel.context: 3, need 1 with linear attention"):
        check_context_split(config, 3)
    with pytest.raises(UserError, match=r"model.attention.linear_every: 2 cannot be exported"):
        family_for(config)
    with pytest.raises(UserError, match=r"model.dropout: 0.1, need 0 with linear attention"):
        GPT(replace(config, dropout=0.1))
    with pytest.raises(UserError, match=r"model.scaling: given, need null with linear attention"):
        GPT(replace(config, scaling=ScalingConfig()))


def test_kinds_of_attention_have_the_features_that_they_name():
    """Each method that a feature stands for is the kind's."""
    methods = {"context": "split_sequences", "cache": "make_cache"}
    for kind in KINDS.values():
        for feature, method in methods.items():
            assert (feature in kind.supports) == (
                getattr(kind, method) != getattr(Attention, method)
            )
