"""A configuration small enough for a few CPU ranks, with the structure of a large one."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megafrontier.certify.segments import SmallMesh, segments_of, small_meshes
from megafrontier.certify.shrink import LENGTH, SmallSplits, shrink_model, small_stages
from megafrontier.common.errors import UserError
from megafrontier.config import (
    BatchWarmupConfig,
    CheckpointConfig,
    Config,
    CorpusConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ParallelConfig,
    PartitionConfig,
    PreflightConfig,
    WiresConfig,
    load_machine,
)
from megafrontier.config.validation import check
from megafrontier.plan.refuse import check_layout
from megafrontier.plan.resolve import RunPlan

T = TypeVar("T")

STEPS = 5
SAVED = 2
"""The step of the checkpoint that runs resume from."""
BAD = 4
"""The step whose gradient is made not finite, so that it must be skipped. It drops the errors of
error feedback, so a step that uses those of the checkpoint comes before it."""
RECORDER = "megafrontier.certify.recorder.Recorder"
LEARNING_RATE = 0.01
LEAST_EPS = 1e-3
"""AdamW's, so that a gradient that is nothing but rounding moves no weight."""
MOST_LOGIT = 2.0
"""The limit of QK-clip. The log-sum of 8 logits near 0 is above it, so heads are clipped."""


@dataclass(frozen=True)
class Miniature:
    """A small configuration, the mesh of its ranks, and what of the large one is not in it."""

    source: "Shrunk"
    mesh: SmallMesh
    config: Config
    """As configured: precision and wires."""
    changes: tuple[str, ...]

    def on(self, mesh: SmallMesh) -> "Miniature":
        """The same on another mesh. Raises UserError if it cannot run."""
        return self.source.on(mesh)

    @property
    def exact(self) -> Config:
        return exact(self.config)

    @property
    def alone(self) -> Config:
        return alone(self.config)


def exact(config: Config) -> Config:
    """A small configuration in fp32 over exact wires."""
    config = deepcopy(config)
    config.train.precision, config.partition.wires = "fp32", WiresConfig()
    config.partition.error_feedback = None
    if config.partition.experts is not None:
        config.partition.experts.wires = None
    return config


def alone(config: Config) -> Config:
    """The same training in one process: no splits, nothing recomputed, no overlap."""
    config = exact(config)
    config.machine = {"levels": {"world": {}}, "device": {"name": "cpu"}}
    config.parallel, config.partition = ParallelConfig(), PartitionConfig(overlap="none")
    config.train.micro_batch = config.train.global_batch // 2
    config.train.activation_checkpointing = "none"
    return config


def make_miniatures(config: Config, plan: RunPlan, folder: Path, most: int) -> list[Miniature]:
    """The miniatures of a layout, each on at most `most` ranks. Their corpora are in `folder`.

    Raises UserError if one of them cannot run.
    """
    segments = segments_of(plan.shape)
    splits = SmallSplits.of(segments, config.parallel.stages_per_rank)
    meshes = small_meshes(segments, most)
    batch = 12 if any(mesh.ranks % 3 == 0 for mesh in meshes) else 8
    if _accumulates(config, plan):
        batch *= max(1, 2 * max(mesh.data_ranks for mesh in meshes) // batch)
    shrunk = Shrunk(config, plan, _shrink(config, splits, folder), batch)
    return [shrunk.on(mesh) for mesh in meshes]


def _shrink(config: Config, splits: SmallSplits, folder: Path) -> Config:
    small = deepcopy(config)
    small.run = replace(config.run, name="miniature", directory=str(folder / "runs"))
    small.model = shrink_model(config, splits)
    small.tokenizer, small.data = "none", _small_data(config.data, folder)
    small.sites = None
    _shrink_optimizer(small)
    if isinstance(config.train.activation_checkpointing, list):
        modes = _spread(config.checkpointing, small.model.trained_layers)
        small.train.activation_checkpointing = modes
    small.train = replace(
        small.train,
        steps=STEPS,
        stop_at=None,
        linear_precision=None,
        compile=False,
        cuda_graphs=False,
        memory_gib=None,
        spike_window=max(STEPS, small.train.spike_window),
        hang_seconds=120.0,
        # Large enough that an error of the loss is far above the rounding of the gradient.
        z_loss=max(small.train.z_loss, 0.01) if small.train.z_loss else 0.0,
    )
    small.checkpoint = CheckpointConfig(
        every=SAVED, minutes=0, keep=0, asynchronous=config.checkpoint.asynchronous
    )
    small.evaluate = EvaluateConfig(every=SAVED, batches=1)
    small.log, small.preflight = LogConfig(callbacks=[RECORDER]), PreflightConfig(enabled=False)
    if small.parallel.layers and splits.stages > 1:
        small.parallel.layers = small_stages(config.parallel.layers, splits.stages)
    return small


def _spread(values: list[T], count: int) -> list[T]:
    """`count` of the values, evenly from the first to the last."""
    return [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]


def _small_data(data: DataConfig, folder: Path) -> DataConfig:
    """As many corpora, up to three, with the same weights."""

    def corpora(given: list[CorpusConfig], part: str) -> list[CorpusConfig]:
        return [
            CorpusConfig(str(folder / f"{part}-{i}"), _weight(corpus), corpus.name)
            for i, corpus in enumerate(given[:3])
        ]

    return DataConfig(
        train=corpora(data.train or [CorpusConfig()], "train"),
        valid=corpora(data.valid, "valid"),
        split=[0.8, 0.2],
        document_mask=data.document_mask,
        packing=data.packing,
        skip=[[1, 2]] if data.skip else [],
    )


def _weight(corpus: CorpusConfig) -> float | list[list[float]]:
    """A curriculum changes after as many steps as the run has saved."""
    if not isinstance(corpus.weight, list):
        return corpus.weight
    weights = [weight for _, weight in corpus.weight[:2]]
    return [[float(SAVED * i), weight] for i, weight in enumerate(weights)]


def _shrink_optimizer(small: Config) -> None:
    """Steps so large that all that belongs to them shows after a few."""
    optimizer, schedule = small.optimizer, small.schedule
    factor = LEARNING_RATE / optimizer.lr if optimizer.lr else 1.0
    optimizer.lr, optimizer.eps = optimizer.lr * factor, max(optimizer.eps, LEAST_EPS)
    for group in optimizer.groups:
        group.lr = None if group.lr is None else group.lr * factor
        group.eps = None if group.eps is None else max(group.eps, LEAST_EPS)
    optimizer.ema = 0.5 if optimizer.ema else 0.0
    optimizer.qk_clip = min(optimizer.qk_clip, MOST_LOGIT)
    optimizer.fused = "torch" if optimizer.fused == "apex" else optimizer.fused
    schedule.min_lr *= factor
    schedule.warmup_steps = 2 if schedule.warmup_fraction else min(schedule.warmup_steps, 2)
    schedule.warmup_fraction, schedule.decay_steps = 0.0, None


@dataclass(frozen=True)
class Shrunk:
    """A configuration with a small model, not yet on a mesh.

    large: the configuration; plan: its plan. small: the shrunk one. batch: sequences of a step.
    """

    large: Config
    plan: RunPlan
    small: Config
    batch: int

    def on(self, mesh: SmallMesh) -> Miniature:
        """The miniature on a mesh. Raises UserError if it cannot run."""
        fitted = deepcopy(self.small)
        fitted.machine = _small_machine(self.large, mesh)
        _fit_splits(fitted.parallel, mesh)
        self._fit_batch(fitted, mesh)
        _fit_wires(fitted, mesh)
        changes = _changes(self.large)
        if not fitted.partition.weights_copy and not _is_possible(fitted, mesh.ranks):
            fitted.partition.weights_copy = True  # the mesh lacks the levels that it needs
            changes.append("partition.weights_copy: false")
        return _checked(Miniature(self, mesh, fitted, tuple(changes)))

    def _fit_batch(self, fitted: Config, mesh: SmallMesh) -> None:
        """Micro-batches of one or more sequences, and one or more of them, as the large run has."""
        train, given, shape = fitted.train, self.large.train, self.plan.shape
        least = mesh.data_ranks * (2 if _accumulates(self.large, self.plan) else 1)
        is_single = given.micro_batch == 1 or self.batch < 2 * least
        train.global_batch, train.micro_batch = self.batch, 1 if is_single else 2
        tokens = train.micro_batch * LENGTH // mesh.splits.context
        whole = given.micro_batch * self.large.model.sequence_length // shape.splits.context
        is_chunked = given.loss_chunk_tokens < whole
        train.loss_chunk_tokens = 5 * tokens // 8 if is_chunked else given.loss_chunk_tokens
        if given.batch_warmup is not None:
            train.batch_warmup = BatchWarmupConfig(self.batch // 2, self.batch // 2, SAVED)


def _accumulates(config: Config, plan: RunPlan) -> bool:
    """Whether a rank has several micro-batches in a step."""
    train = config.train
    return train.global_batch > train.micro_batch * plan.shape.over(("data",)).ranks


def _small_machine(config: Config, mesh: SmallMesh) -> dict[str, Any]:
    """The levels of the machine, with the sizes of the mesh."""
    levels = load_machine(config.machine).levels
    return {
        "levels": {
            name: {
                "size": mesh.level_size(name),
                "gigabytes_per_second": level.gigabytes_per_second,
            }
            for name, level in levels.items()
        },
        "device": {"name": "cpu"},
    }


def _fit_splits(parallel: ParallelConfig, mesh: SmallMesh) -> None:
    splits = mesh.splits
    parallel.tensor, parallel.context = splits.tensor, splits.context
    parallel.expert, parallel.pipeline = splits.expert, splits.pipeline
    parallel.stages_per_rank = min(parallel.stages_per_rank, 2)
    if splits.expert == 1:
        parallel.token_pieces, parallel.dispatch = 1, "auto"
    if splits.pipeline == 1:
        parallel.stages_per_rank, parallel.schedule, parallel.layers = 1, "1f1b", []


def _is_possible(config: Config, ranks: int) -> bool:
    try:
        check_layout(config, ranks)
    except UserError:
        return False
    return True


def _fit_wires(fitted: Config, mesh: SmallMesh) -> None:
    """Leave out wires of activations and tokens over levels that no split of the mesh crosses."""
    wires = fitted.partition.wires
    crossed = [s.level for s in mesh.segments if s.axis in ("tensor", "context", "pipeline")]
    if isinstance(wires.activations, dict):
        wires.activations = {k: v for k, v in wires.activations.items() if k in crossed}
    elif not any(s.axis == "pipeline" for s in mesh.segments):
        wires.activations = {}
    experts = [s.level for s in mesh.segments if s.has_experts]
    wires.tokens = {name: wire for name, wire in wires.tokens.items() if name in experts}


def _changes(config: Config) -> list[str]:
    """What of the configuration a miniature does not have."""
    train, log = config.train, config.log
    left_out = {
        "train.compile": train.compile,
        "train.cuda_graphs": train.cuda_graphs,
        "train.linear_precision": train.linear_precision is not None,
        "sites": config.sites is not None,
        "log.callbacks": bool(log.callbacks),
        "optimizer.fused: apex": config.optimizer.fused == "apex",
        "evaluate.tasks": bool(config.evaluate.tasks),
        "evaluate.average": bool(config.evaluate.average),
    }
    return [name for name, is_set in left_out.items() if is_set]


def _checked(miniature: Miniature) -> Miniature:
    """Raises UserError if a configuration of the miniature is refused."""
    for config, ranks in (
        (miniature.config, miniature.mesh.ranks),
        (miniature.exact, miniature.mesh.ranks),
        (miniature.alone, 1),
    ):
        try:
            check(config)
            check_layout(config, ranks)
        except UserError as error:
            raise UserError(f"certify: miniature of {miniature.mesh}: {error}") from error
    return miniature
