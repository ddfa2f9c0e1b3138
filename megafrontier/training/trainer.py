"""Everything that one rank trains with, built from a configuration."""

import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from megafrontier.checkpoint.save import PendingSave
from megafrontier.checkpoint.states import OptimizerStates
from megafrontier.comm.wires.registry import DTYPES
from megafrontier.common.errors import RankError, UserError
from megafrontier.common.signals import block_stop_requests
from megafrontier.config import Config
from megafrontier.data.sampling.batches import BatchSizes, SiteShare
from megafrontier.data.sampling.loader import Loader
from megafrontier.data.sampling.samples import Batch, open_samples
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice
from megafrontier.model.kernels.float8 import float8_of, use_float8
from megafrontier.model.moe.balance import Balance
from megafrontier.model.recompute.compile import start_workers
from megafrontier.optim.gradients import LossScale
from megafrontier.optim.groups import OPTIMIZERS, OptimizerGroups
from megafrontier.optim.spikes import SpikeRule
from megafrontier.optim.unit_optimizers import Elementwise, UnitOptimizers
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.param_spec import ParamSpec
from megafrontier.parallel.world import World
from megafrontier.partition import Engine, shard
from megafrontier.partition.rules import UnitRules, Update
from megafrontier.partition.unit import InitialSlice
from megafrontier.pipeline.division import block_names, divide_model
from megafrontier.pipeline.runner import Pipeline
from megafrontier.pipeline.work import Runner, WholeModel
from megafrontier.splits.apply import apply_splits, tensor_collectives
from megafrontier.training.device import reason_not_compiled, reason_not_float8
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.plan import RunPlan, optimizer_groups
from megafrontier.training.recorder import MetricRecorder

CorpusPart = Literal["train", "valid"]
PARTS: tuple[CorpusPart, ...] = ("train", "valid")


@dataclass
class Trainer:
    """One rank's model, data and state.

    `step` counts the steps that the device has been given, `tokens` those of the steps whose
    results the host has read. `stateful` has, by name, what checkpoints keep besides the state of
    model and optimizer: of callbacks, for example.
    """

    config: Config
    plan: RunPlan
    mesh: Mesh
    model: GPT
    engine: Engine
    runner: Runner
    optimizer: UnitOptimizers
    loader: Loader
    valid_loader: Loader | None
    loss_scale: LossScale
    spikes: SpikeRule
    metrics: MetricRecorder
    run_logger: RunLogger
    balance: Balance | None = None
    """Of the routers, in a mixture of experts."""
    stateful: dict[str, Any] = field(default_factory=dict)
    kept_states: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """States that checkpoints keep beside those of the optimizer: by name, this rank's 1-D shard of
    each trained unit."""
    step: int = 0
    tokens: int = 0
    named_loaders: dict[str, Loader] = field(default_factory=dict)
    """Of the corpora of `data.valid` with a name."""
    pending_save: PendingSave | None = None
    """A checkpoint that is being written behind the steps."""

    @property
    def last_step(self) -> int:
        """The step after which this process stops."""
        return self.config.train.stop_at or self.config.train.steps

    @property
    def unit_states(self) -> OptimizerStates:
        """This rank's shards of the trained units, by state: the optimizer's and `kept_states`."""
        return {**self.optimizer.states, **self.kept_states}

    @property
    def world(self) -> World:
        """All ranks of the run."""
        return self.mesh.world

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what one rank writes for all: logs, metrics, manifests."""
        return self.world.rank == 0

    def close(self) -> None:
        """Stop reading ahead."""
        for loader in (self.loader, self.valid_loader, *self.named_loaders.values()):
            if loader is not None:
                loader.close()


def build_trainer(
    config: Config,
    plan: RunPlan,
    mesh: Mesh,
    run_logger: RunLogger | None = None,
    has_values: bool = True,
) -> Trainer:
    """Build model, optimizer and data at step 0, sharded. No rank ever holds the whole model.
    `has_values`: as in `build_model`."""
    if config.train.deterministic:
        # Without this variable of cuBLAS, torch refuses every matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Otherwise torch fills all new memory, pinned memory on the CPU. None of it is read before
        # it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    built = build_model(config, plan, mesh, has_values)
    # All ranks agree, because the others would wait for a rank whose storage fails.
    rank, size, device = mesh.data_rank, mesh.data_size, mesh.device
    (train, valid), named = mesh.world.run_on_all(
        lambda: (
            [open_loader(config, part, rank, size, device) for part in PARTS],
            open_named_loaders(config, rank, size, device),
        )
    )
    assert train is not None
    trainer = make_trainer(config, plan, mesh, built, train, valid, run_logger)
    trainer.named_loaders = named
    return trainer


def make_trainer(
    config: Config,
    plan: RunPlan,
    mesh: Mesh,
    built: tuple[GPT, Engine],
    train: Loader,
    valid: Loader | None = None,
    run_logger: RunLogger | None = None,
    elementwise: Elementwise | None = None,
) -> Trainer:
    """A trainer at step 0 of what `build_model` has built. `elementwise`: as in
    `UnitOptimizers`."""
    (model, engine), device, moe = built, mesh.device, config.model.moe
    optimizer = UnitOptimizers(
        engine.trained_units,
        optimizer_groups(config),
        tensor_collectives(engine, mesh),
        elementwise,
    )
    return Trainer(
        config,
        plan,
        mesh,
        model,
        engine,
        make_runner(config, plan, mesh, model, engine),
        optimizer,
        train,
        valid,
        LossScale(config.train.precision, config.train.loss_scale, device),
        SpikeRule(config.train, device),
        MetricRecorder(device),
        run_logger or RunLogger(None),
        None
        if moe is None
        else Balance(model, moe, config.model.trained_layers, mesh.splits.expert),
    )


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
    connect = apply_splits(model, mesh, plan.activations, plan.tokens, pieces)
    if config.train.linear_precision is not None and reason_not_float8(mesh.world) is None:
        use_float8(model.trained_blocks(), float8_of(mesh.device))
    groups = optimizer_groups(config)
    engine = shard(
        model,
        model.units(),
        plan.placement,
        mesh,
        dtype=DTYPES[config.train.precision],
        wires=plan.wires,
        error_feedback=plan.error_feedback,
        rules=partial(_unit_rules, config, plan, mesh, groups),
        overlap=config.partition.overlap,
        prefetch=config.partition.prefetch,
        check_order=config.partition.check_order,
        initial=initial_values(config) if has_values else partial(_zeros, mesh.device),
        groups=groups.of,
        stages=block_names(model, plan.division, mesh.pipeline_rank),
        update=_update(config, plan),
    )
    connect(engine)
    return model, engine


def _update(config: Config, plan: RunPlan) -> Update:
    if plan.is_offloaded:
        return "on_host"
    return "overlapped" if config.partition.overlap_update else "at_once"


def _unit_rules(
    config: Config, plan: RunPlan, mesh: Mesh, groups: OptimizerGroups, spec: ParamSpec
) -> UnitRules:
    state = plan.of(spec.axes)
    over, wires = mesh.hierarchy(spec.axes), state.wires
    wires = wires if over.crossed is None else wires.extended(over.crossed)
    may_be_late = OPTIMIZERS[groups.of(spec)[0]].may_update_late
    update = _update(config, plan) if may_be_late else "at_once"
    dtype = DTYPES[config.train.precision]
    return UnitRules(
        over,
        state.placement,
        wires,
        dtype,
        state.error_feedback,
        update,
        measures_norms=True,
    )


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


def open_loader(
    config: Config,
    part: CorpusPart,
    data_rank: int,
    data_size: int,
    device: torch.device | str = "cpu",
) -> Loader | None:
    """One rank's micro-batches of a part; None if nothing is held out for validation.

    data_rank, data_size: which of how many equal parts of a batch (`Mesh.data_rank`).

    Raises UserError for a corpus that cannot be read, and if the batch does not divide.
    """
    # A special token that was added to the tokenizer alone has no row in the model.
    ids = min(cached_tokenizer(config.tokenizer).vocab_size, config.model.vocab_size)
    length, seed = config.model.sequence_length, config.run.seed
    sizes = BatchSizes.of(config.train)
    samples = open_samples(config.data, length, seed, ids, part, sizes.before)
    if samples is None:
        return None
    skip, share = config.data.skip, None
    if part == "valid":
        sizes, skip = BatchSizes(sizes.full), []
    elif config.sites is not None:
        batches, number = config.sites.batches(sizes.full), config.sites.number
        share = SiteShare(sum(batches[:number]), sum(batches))
    micro_batch = config.train.micro_batch
    return Loader(samples, sizes, micro_batch, data_rank, data_size, skip, device, share)


def open_named_loaders(
    config: Config, data_rank: int, data_size: int, device: torch.device | str = "cpu"
) -> dict[str, Loader]:
    """A loader for each name in `data.valid`, of its corpora. Raises as `open_loader` does."""
    found = {}
    for name in dict.fromkeys(corpus.name for corpus in config.data.valid if corpus.name):
        corpora = [corpus for corpus in config.data.valid if corpus.name == name]
        only = replace(config, data=replace(config.data, valid=corpora))
        loader = open_loader(only, "valid", data_rank, data_size, device)
        assert loader is not None
        found[name] = loader
    return found


def read_step(loader: Loader, step: int, rank: int) -> list[Batch]:
    """A rank's micro-batches of a step. Raises RankError for unusable data, which no other rank
    reads."""
    try:
        return loader.step(step)
    except UserError as error:
        raise RankError(f"rank {rank}: {error}") from error
