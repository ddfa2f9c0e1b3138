"""Everything that one rank trains with, built from a configuration."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megafrontier.checkpoint.save import PendingSave
from megafrontier.checkpoint.states import OptimizerStates
from megafrontier.common.errors import RankError, UserError
from megafrontier.config import Config, corpus_labels
from megafrontier.data.sampling.loader import PARTS, Loader, open_loader, open_named_loaders
from megafrontier.data.sampling.samples import Batch, OpenCorpora
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer
from megafrontier.model.gpt import GPT
from megafrontier.model.moe.balance import Balance
from megafrontier.optim.gradients import LossScale
from megafrontier.optim.spikes import SpikeRule
from megafrontier.optim.unit_optimizers import Elementwise, UnitOptimizers
from megafrontier.parallel.mesh import Mesh
from megafrontier.parallel.world import World
from megafrontier.partition import Engine
from megafrontier.pipeline.work import Runner
from megafrontier.plan.assemble import build_model, make_runner
from megafrontier.plan.resolve import RunPlan, optimizer_groups
from megafrontier.splits.apply import tensor_collectives
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.meters import CorpusMeter, PredictionMeter, StepMeter, ZLossMeter
from megafrontier.training.qk_clip import QKClip
from megafrontier.training.recorder import MetricRecorder
from megafrontier.training.tensor_norms import TensorNorms


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
    meters: list[StepMeter] = field(default_factory=list)
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
    between_seconds: dict[str, float] = field(default_factory=dict)
    """What this rank has done since the newest step while no step was in progress, by kind."""

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
    ids = int(mesh.world.broadcast_from_rank_0(lambda: str(_tokenizer_ids(config))))
    opened: OpenCorpora = {}
    (train, valid), named = mesh.world.run_on_all(
        lambda: (
            [open_loader(config, part, rank, size, device, opened, ids) for part in PARTS],
            open_named_loaders(config, rank, size, device, opened, ids),
        )
    )
    assert train is not None
    trainer = make_trainer(config, plan, mesh, built, train, valid, run_logger)
    trainer.named_loaders = named
    return trainer


def _tokenizer_ids(config: Config) -> int:
    return cached_tokenizer(config.tokenizer).vocab_size


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
        meters=list(_meters(config, mesh, model, engine, optimizer)),
    )


def _meters(
    config: Config, mesh: Mesh, model: GPT, engine: Engine, optimizer: UnitOptimizers
) -> Iterator[StepMeter]:
    """What each step measures."""
    if config.train.z_loss:
        yield ZLossMeter(model, mesh)
    if config.model.prediction is not None:
        yield PredictionMeter(model, mesh)
    labels = corpus_labels(config.data.train)
    if len({*labels}) > 1:
        yield CorpusMeter(model, mesh, labels)
    if config.optimizer.qk_clip:
        yield QKClip(config, model, engine.trained_units, mesh, optimizer)
    if every := config.log.tensor_norms:
        yield TensorNorms(every, config.model, model, engine.trained_units, optimizer)


def read_step(loader: Loader, step: int, rank: int) -> list[Batch]:
    """A rank's micro-batches of a step. Raises RankError for unusable data, which no other rank
    reads."""
    try:
        return loader.step(step)
    except UserError as error:
        raise RankError(f"rank {rank}: {error}") from error
