"""Everything one rank trains with, put together from a configuration."""

import os
from dataclasses import dataclass
from functools import partial

import torch

from megafrontier.common.signals import stops_held_back
from megafrontier.config import Config
from megafrontier.data.sampling.loader import Loader
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initial_slice, parameter_kind
from megafrontier.model.recompute.compile import start_workers
from megafrontier.optim.adamw import ShardedAdamW
from megafrontier.optim.loss_scale import LossScale
from megafrontier.optim.spikes import SpikeRule
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.partition import Engine, shard
from megafrontier.partition.wires.wire import DTYPES
from megafrontier.training.batches import PARTS, Part, make_loader, open_part
from megafrontier.training.kernels import uncompiled_because
from megafrontier.training.plan import RunPlan


@dataclass
class Trainer:
    """One rank's model, data and state. `step` counts what the device has been given to do,
    `tokens` what the host knows of."""

    config: Config
    plan: RunPlan
    hierarchy: Hierarchy
    model: GPT
    engine: Engine
    optimizer: ShardedAdamW
    loader: Loader
    valid_loader: Loader | None
    loss_scale: LossScale
    spikes: SpikeRule
    step: int = 0
    tokens: int = 0

    @property
    def last_step(self) -> int:
        """The step after which this process stops."""
        return self.config.train.stop_at or self.config.train.steps

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: logs, metrics, manifests."""
        return self.hierarchy.rank == 0

    def close(self) -> None:
        """Stop reading ahead."""
        for loader in (self.loader, self.valid_loader):
            if loader is not None:
                loader.close()


def build_trainer(config: Config, plan: RunPlan, hierarchy: Hierarchy) -> Trainer:
    """Model, optimizer and data at step 0, sharded; no rank ever holds the whole model."""
    if config.train.deterministic:
        # cuBLAS's own condition, without which torch refuses every matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Or all new memory is filled, pinned memory by the CPU. None is read before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    model, engine = build_model(config, plan, hierarchy)
    masters = [unit.master for unit in engine.units]
    optimizer = ShardedAdamW(masters, [u.decay_stop for u in engine.units], config.optimizer)
    # Together: a rank whose storage fails would leave the others waiting for it.
    loaders = hierarchy.run_on_all(lambda: {p: open_loader(config, p, hierarchy) for p in PARTS})
    assert loaders["train"] is not None
    return Trainer(
        config,
        plan,
        hierarchy,
        model,
        engine,
        optimizer,
        loaders["train"],
        loaders["valid"],
        LossScale(config.train.precision, config.train.loss_scale, hierarchy.device),
        SpikeRule(config.train, hierarchy.device),
    )


def build_model(
    config: Config,
    plan: RunPlan,
    hierarchy: Hierarchy,
) -> tuple[GPT, Engine]:
    """A GPT sharded over the hierarchy, with its seeded first values."""
    compiles = config.train.compile and uncompiled_because(config, hierarchy) is None
    if compiles:
        with stops_held_back():  # sent to all of a job's processes, they would break the compiler
            start_workers(hierarchy.device)
    with torch.device("meta"):
        model = GPT(
            config.model,
            loss_chunk_tokens=config.train.loss_chunk_tokens,
            checkpointing=config.train.activation_checkpointing,
            compile_blocks=compiles,
        )
    engine = shard(
        model,
        model.units(),
        plan.placement,
        hierarchy,
        dtype=DTYPES[config.train.precision],
        wires=plan.wires,
        error_feedback=plan.error_feedback,
        overlap=config.partition.overlap,
        prefetch=config.partition.prefetch,
        check_order=config.partition.check_order,
        initial=partial(initial_slice, config.model, config.run.seed),
        decay=lambda name: parameter_kind(name) not in config.optimizer.no_decay,
    )
    return model, engine


def open_loader(config: Config, part: Part, hierarchy: Hierarchy) -> Loader | None:
    """This rank's loader of a part, None where nothing is kept for validation."""
    samples = open_part(config, part)
    if samples is None:
        return None
    return make_loader(config, samples, part, hierarchy.rank, hierarchy.size, hierarchy.device)
