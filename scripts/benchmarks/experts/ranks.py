"""What one rank does: forward and backward of a layer of experts, again and again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafrontier.comm.wires.registry import Codec
from megafrontier.comm.wires.wire import WorkWires, make_wire
from megafrontier.config import ModelConfig, load_config
from megafrontier.config.model.moe import MoEConfig
from megafrontier.launch.context import join_machine
from megafrontier.model.moe.dispatch import sort_by_expert
from megafrontier.model.moe.experts import Experts
from megafrontier.parallel.groups import all_to_all
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition import Engine
from megafrontier.partition.rules import Overlap
from megafrontier.splits.experts import ExpertGroup
from scripts.benchmarks.experts.routing import ACTIVE, EXPERTS
from scripts.benchmarks.shared.job import Job
from scripts.benchmarks.shared.links import sent

FFN_HIDDEN = 8
"""Computing is waited for instead: the cores are there for what sends."""


@dataclass(frozen=True)
class Answer:
    """Seconds of each step, and what left the NIC of this rank's node in all of them."""

    seconds: list[float]
    nic_bytes: int


def run(job: Job) -> Answer:
    """The body of one rank."""
    torch.set_num_threads(1)
    options = job.options
    config = load_config(job.config, job.overrides)
    with join_machine(config) as (plan, mesh):
        chosen = torch.load(options["routing"]).chunk(mesh.world.size)[mesh.rank]
        layer = Layer(mesh, chosen, int(options["hidden"]), float(options["compute"]))
        if options["method"] == "flat":
            dispatch = flat_dispatch
        else:
            engine = Engine(plan.default, mesh, Overlap("safe", 0))
            codec = None if options["method"] == "bf16" else make_wire(options["method"]).codec
            dispatch = by_level(mesh, engine, codec, plan.joined)
        for _ in range(job.warmup):
            layer.step(dispatch)
        mesh.world.all_true(True)
        before, seconds = sent()[0], []
        for _ in range(job.steps):
            begin = time.perf_counter()
            layer.step(dispatch)
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        mesh.world.all_true(True)
        return Answer(seconds, sent()[0] - before)


def by_level(
    mesh: Mesh, engine: Engine, codec: Codec | None, joined: Sequence[int]
) -> Callable[..., Any]:
    """The project's dispatch, with `codec` between nodes and bf16 inside."""
    group, inner = ExpertGroup(), [None] * (len(mesh.levels.sizes) - 1)
    group.connect(engine, mesh.joined(("expert",), joined), WorkWires((*inner, codec)))
    return group.dispatch


class Layer:
    """A layer of experts and the other computing of its block, which is waited for."""

    def __init__(self, mesh: Mesh, chosen: Tensor, hidden: int, compute: float) -> None:
        self._chosen, self._compute = chosen, compute
        moe = MoEConfig(EXPERTS // mesh.world.size, ACTIVE, ffn_hidden=FFN_HIDDEN)
        self._experts = Experts(ModelConfig(hidden=hidden), moe).bfloat16()
        for parameter in self._experts.parameters():
            torch.nn.init.normal_(parameter, 0, 0.02)
        self._hidden = torch.randn(len(chosen), hidden, dtype=torch.bfloat16)

    def step(self, dispatch: Callable[..., Any]) -> None:
        """Forward and backward."""
        hidden = self._hidden.clone().requires_grad_()
        weights = torch.full(self._chosen.shape, 1 / ACTIVE, requires_grad=True)
        time.sleep(self._compute / 3)
        out = dispatch(hidden, self._chosen, weights, self._experts)()
        time.sleep(self._compute * 2 / 3)
        out.backward(torch.ones_like(out))


def flat_dispatch(
    hidden: Tensor, chosen: Tensor, weights: Tensor, experts: Experts
) -> Callable[[], Tensor]:
    """As `model.moe.dispatch.Dispatch`, by one all-to-all over all ranks: each token is sent once
    for each of its experts."""
    return partial(_process, hidden, chosen, weights, experts)


def _process(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    ranks = dist.get_world_size()
    order, counts = sort_by_expert(chosen, experts.count * ranks)
    arriving = torch.empty_like(counts)
    all_to_all(arriving, counts, dist.group.WORLD)
    sizes = [part.sum(1).tolist() for part in (counts.view(ranks, -1), arriving.view(ranks, -1))]
    rows = _AllToAll.apply(hidden[order // ACTIVE], *sizes)
    ids = torch.arange(experts.count).repeat(ranks).repeat_interleave(arriving)
    by_expert = ids.argsort(stable=True)
    outputs = experts(rows[by_expert], torch.bincount(ids, minlength=experts.count))
    back = _AllToAll.apply(outputs[by_expert.argsort()], *sizes[::-1])
    weighted = back * weights.flatten()[order][:, None]
    return torch.zeros(hidden.shape).index_add(0, order // ACTIVE, weighted).to(hidden.dtype)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sizes, received
        return _exchanged(rows, sizes, received)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        sizes, received = ctx.sizes
        return _exchanged(grad_outputs[0], received, sizes), None, None


def _exchanged(rows: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    all_to_all(out, rows.contiguous(), dist.group.WORLD, list(received), list(sizes))
    return out
