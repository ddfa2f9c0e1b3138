"""Tokens cross each level as often as they must, and no rank holds too many at a time."""

import torch
from torch import nn

from megafrontier.comm.wires.wire import WorkWires, make_wire
from megafrontier.config.model.moe import MoEConfig
from megafrontier.model.moe.dispatch import local_dispatch
from megafrontier.model.moe.experts import Experts
from megafrontier.parallel.mesh import Splits
from megafrontier.partition import Engine, Placement
from megafrontier.partition.rules import Overlap, StateRules
from megafrontier.splits import experts as experts_module
from megafrontier.splits.experts import ExpertGroup
from megafrontier.splits.token_dispatch import PEAK, TokenExchange
from tests.model.small_models import small_config
from tests.ranks import run_mesh

WIDTH, ACTIVE, TOKENS = 32, 3, 20
MOE = MoEConfig(experts=16, active=ACTIVE, ffn_hidden=8)


def make_engine(mesh):
    levels = mesh.hierarchy().levels
    rules = StateRules.plain(Placement.named("ddp", levels), levels)
    return Engine(rules, mesh.hierarchy(), Overlap("safe", 0))


def routing(kind, ranks):
    """hidden [ranks, n, h], chosen [ranks, n, k] and weights [ranks, n, k] of all ranks."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ranks, TOKENS, WIDTH, generator=generator)
    weights = torch.rand(ranks, TOKENS, ACTIVE, generator=generator)
    scores = torch.rand(ranks, TOKENS, MOE.experts, generator=generator)
    if kind == "one rank":  # all tokens go to the experts of the last one
        scores[..., -ACTIVE:] += 1
    if kind == "changing":  # on each rank the first half goes to one rank, the rest to another
        scores[:, : TOKENS // 2, :ACTIVE] += 1
        scores[:, TOKENS // 2 :, -ACTIVE:] += 1
    if kind == "few":  # most experts have no token
        scores[..., 5:8] += torch.tensor([1.0, 2.0, 3.0])
        scores[..., 0] += 1
    return hidden, scores.topk(ACTIVE).indices, weights


def make_experts(rank=0, ranks=1):
    torch.manual_seed(2)
    experts = Experts(small_config(activation="swiglu"), MOE)
    for name, parameter in list(experts.named_parameters()):
        values = nn.init.normal_(parameter, 0, 0.2).detach().chunk(ranks)[rank]
        experts.register_parameter(name, nn.Parameter(values.clone()))
    return experts


def outcome(dispatch, experts, hidden, chosen, weights):
    """The result, and the gradients of tokens, weights and experts."""
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weights)]
    out = dispatch(inputs[0], chosen, inputs[1], experts)()
    (out * torch.arange(1.0, WIDTH + 1)).square().sum().backward()
    return [out.detach(), *(t.grad for t in inputs), *(p.grad for p in experts.parameters())]


def test_experts_on_other_ranks_give_the_outputs_and_gradients_of_experts_on_one():
    kinds = ("few", "one rank", "changing")

    def body(mesh):
        group = ExpertGroup()
        group.connect(make_engine(mesh), mesh.hierarchy(("expert",)))
        own = [[part[mesh.rank] for part in routing(kind, 8)] for kind in kinds]
        return [outcome(group.dispatch, make_experts(mesh.rank, 8), *parts) for parts in own]

    ranks = run_mesh((2, 2, 2), body, splits=Splits(expert=8))
    for kind, found in zip(kinds, zip(*ranks, strict=True), strict=True):
        whole = [part.flatten(0, 1) for part in routing(kind, 8)]
        expected = outcome(local_dispatch, make_experts(), *whole)
        for parts, value in zip(zip(*found, strict=True), expected, strict=True):
            largest = value.abs().max().item()
            torch.testing.assert_close(torch.cat(parts), value, rtol=1e-5, atol=1e-5 * largest)


def test_experts_process_one_piece_of_the_tokens_while_the_next_is_on_its_way(monkeypatch):
    """Also in backward, and the results of all pieces go back before a rank waits for the first."""
    events = []

    def note(owner, name):
        function = getattr(owner, name)
        noted = lambda *args: events.append(name) or function(*args)  # noqa: E731
        monkeypatch.setattr(owner, name, noted)

    for name in ("start_dispatch", "finish_dispatch", "start_collect", "start_spread"):
        note(TokenExchange, name)
    note(experts_module, "run_experts")

    def body(mesh):
        group = ExpertGroup(pieces=2)
        group.connect(make_engine(mesh), mesh.hierarchy(("expert",)))
        parts = [part[mesh.rank] for part in routing("even", 2)]
        return outcome(group.dispatch, make_experts(mesh.rank, 2), *parts), list(events)

    forward = ["finish_dispatch", "run_experts", "start_collect"]
    backward = [*["start_spread"] * 2, *["start_collect"] * 2]
    for _, found in run_mesh((2,), body, splits=Splits(expert=2)):
        assert found == [*["start_dispatch"] * 2, *forward * 2, *backward]


def test_no_rank_gets_more_rows_at_a_time_than_a_few_times_the_average():
    def body(mesh):
        wires = WorkWires((None, make_wire("int8").codec))  # some ranks get nothing
        exchange = TokenExchange(make_engine(mesh), mesh.hierarchy(("expert",)), wires)
        found = []
        for kind in ("even", "one rank", "changing"):
            hidden, chosen, weights = (part[mesh.rank] for part in routing(kind, 8))
            tokens, rows = [], []
            chunks = exchange.chunks(chosen // 2)
            for some, counts in chunks:
                parts = hidden[some], chosen[some], weights[some]
                move, routes = exchange.start_dispatch(*parts, counts, 2)
                exchange.finish_dispatch(move, routes, 2)
                tokens += some.tolist()
                rows += [step.rows_after for step in routes.steps]
            found.append((len(chunks), sorted(tokens), max(rows)))
        return found

    for found in run_mesh((2, 4), body, splits=Splits(expert=8)):
        assert found[0][0] == 1
        assert found[1][0] > 1
        for _, tokens, rows in found:
            assert tokens == [*range(TOKENS)]
            assert rows <= PEAK * TOKENS * ACTIVE


def test_each_level_carries_a_token_once_for_each_distinct_group_beyond_it():
    """In the width of its wire. Beside it go its experts and weights, or their gradients."""
    int8 = make_wire("int8")

    def body(mesh):
        hidden, chosen, weights = (part[mesh.rank] for part in routing("even", 8))
        engine = make_engine(mesh)
        exchange = TokenExchange(
            engine, mesh.hierarchy(("expert",)), WorkWires((None, None, int8.codec))
        )
        ((_, counts),) = exchange.chunks(chosen // 2)
        engine.ledger.take()
        move, routes = exchange.start_dispatch(hidden, chosen, weights, counts, 2)
        rows = exchange.finish_dispatch(move, routes, 2)
        beside = routes.weights
        found = [engine.ledger.take_kinds()]
        for start, *moved in (
            (exchange.start_collect, rows, routes),
            (exchange.start_spread, hidden, routes),
            (exchange.start_collect, rows, routes, beside),
        ):
            exchange.wait(start(*moved))
            found.append(engine.ledger.take_kinds())
        return [[level["tokens"].bytes for level in levels] for levels in found]

    found = run_mesh((2, 2, 2), body, splits=Splits(expert=8))
    _, chosen, _ = routing("even", 8)
    width = [WIDTH * 4, WIDTH * 4, int8.codec.message_bytes(WIDTH)]
    for level, stride in enumerate((1, 2, 4)):
        sent = sum(
            len({owner // stride for owner in owners if owner // stride % 2 != rank // stride % 2})
            for rank, rows in enumerate((chosen // 2).tolist())
            for owners in rows
        )
        for way, beside in enumerate((8 * ACTIVE, 0, 0, 4 * ACTIVE)):
            total = sum(ways[way][level] for ways in found)
            assert total == sent * (width[level] + beside), (level, way)
