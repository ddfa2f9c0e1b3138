"""A rank's model, built from a configuration: GPT, stages, splits, shards."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from megafrontier.comm.wires.registry import DTYPES
from megafrontier.common.signals import block_stop_requests
from megafrontier.config import Config
from megafrontier.model.attention.kinds import kinds_of
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice
from megafrontier.model.kernels.backends import Computed
from megafrontier.model.kernels.float8 import float8_of, missing_float8
from megafrontier.model.linear import use_float8
from megafrontier.model.recompute.compile import missing_compiler, start_workers
from megafrontier.optim.groups import OPTIMIZERS, OptimizerGroups
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.parallel.world import World
from megafrontier.partition import Engine, shard
from megafrontier.partition.rules import Overlap, StateRules
from megafrontier.partition.unit import InitialSlice
from megafrontier.pipeline.division import block_names, divide_model
from megafrontier.pipeline.runner import Pipeline
from megafrontier.pipeline.work import Runner, WholeModel
from megafrontier.plan.resolve import RunPlan, optimizer_groups
from megafrontier.splits.apply import apply_splits


def build_model(
    config: Config, plan: RunPlan, mesh: Mesh, has_values: bool = True
) -> tuple[GPT, Engine]:
    """A GPT sharded over the mesh, with its seeded initial values, or zeros without `has_values`:
    then a checkpoint is loaded, or `Engine.initialise` follows with `initial_values`."""
    compiles = config.train.compile and reason_not_compiled(config, mesh.world) is None
    if compiles:
        # A scheduler sends its signals to all processes of a job. They would end the workers.
        with block_stop_requests():
            start_workers(mesh.device)
    with torch.device("meta"):
        model = GPT(
            config.model,
            loss_chunk_tokens=config.train.loss_chunk_tokens,
            checkpointing=config.checkpointing,
            compile_blocks=compiles,
            cuda_graphs=config.train.cuda_graphs,
            z_loss=config.train.z_loss,
        )
    divide_model(model, plan.division, mesh)
    pieces = config.parallel.token_pieces
    connect = apply_splits(model, mesh, plan.activations, plan.tokens, pieces, plan.joined)
    if config.train.linear_precision is not None and reason_not_float8(mesh.world) is None:
        use_float8(model.trained_blocks(), float8_of(mesh.device))
    groups, partition = optimizer_groups(config), config.partition
    engine = shard(
        model,
        model.units(),
        _PlanRules(plan, groups),
        mesh,
        overlap=Overlap(partition.overlap, partition.prefetch, partition.check_order),
        initial=initial_values(config) if has_values else partial(_zeros, mesh.device),
        groups=groups.of,
        stages=block_names(model, plan.division, mesh.pipeline_rank),
    )
    connect(engine)
    return model, engine


class _PlanRules(NamedTuple):
    """The rules of a plan, as `shard` takes them."""

    plan: RunPlan
    groups: OptimizerGroups

    @property
    def default(self) -> StateRules:
        return self.plan.default

    def of(self, spec: ParamSpec) -> StateRules:
        """Of a parameter whose optimizer may not update late, or not on the host: those with an
        update at once."""
        rules, kind = self.plan.of(spec.axes), OPTIMIZERS[self.groups.of(spec)[0]]
        is_on_host = rules.update == "on_host"
        is_possible = kind.may_be_on_host if is_on_host else kind.may_update_late
        return rules if is_possible else replace(rules, update="at_once")


def make_runner(config: Config, plan: RunPlan, mesh: Mesh, model: GPT, engine: Engine) -> Runner:
    """What runs a model that `build_model` has built. All ranks call it."""
    if plan.division.ranks == 1:
        return WholeModel(model, engine)
    dtype = DTYPES[config.train.precision]
    return Pipeline(model, engine, mesh, plan.division, dtype, plan.activations)


def initial_values(config: Config) -> InitialSlice:
    """The initial values that belong to the run's seed."""
    return partial(initial_slice, config.run.seed)


def _zeros(device: torch.device, _spec: ParamSpec, start: int, stop: int) -> torch.Tensor:
    return torch.zeros(stop - start, device=device)


def reason_not_compiled(config: Config, world: World) -> str | None:
    """What the first rank that cannot compile the blocks lacks, the same on every rank; None if
    all ranks can, or train.compile is off."""
    if not config.train.compile:
        return None
    computed = computed_with(config, world, config.parallel.context != 1)
    reasons = [missing_compiler(world.device)]
    reasons += [k.uncompilable(config.model, computed) for k in kinds_of(config.model).values()]
    return world.first_error(next(filter(None, reasons), None))


def computed_with(config: Config, world: World, is_cut: bool) -> Computed:
    """`is_cut`: whether a rank has parts of sequences."""
    return Computed(world.device, DTYPES[config.train.precision], config.data.document_mask, is_cut)


def reason_not_float8(world: World) -> str | None:
    """What the first rank whose device cannot multiply in float8 lacks, the same on every rank;
    None if all can."""
    return world.first_error(missing_float8(world.device))
