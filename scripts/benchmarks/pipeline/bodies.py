"""What one rank of the benchmark does: our pipeline, or torch's."""

from collections.abc import Sequence
from typing import Any

from megafrontier.config import Config
from megafrontier.parallel.mesh import Mesh
from megafrontier.pipeline.runner import Pipeline
from megafrontier.pipeline.table import ActionKind
from megafrontier.training.loop import train_step
from megafrontier.training.plan import RunPlan
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import build_trainer
from scripts.benchmarks.pipeline.stand_in import StandIn
from scripts.benchmarks.slow_network.job import Job
from scripts.benchmarks.slow_network.ranks import Stepper, feed

TICKS = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 1,
}


def ours(job: Job, config: Config, plan: RunPlan, mesh: Mesh) -> Stepper:
    """The trainer, as `megafrontier train` runs it, with actions that take time."""
    trainer = build_trainer(config, plan, mesh)
    assert isinstance(trainer.runner, Pipeline)
    occupy(trainer.runner, float(job.options["tick"]) / config.parallel.stages_per_rank)
    results: list[StepResult] = []

    def step() -> float:
        results.append(train_step(trainer))
        return results[-1].loss

    return Stepper(
        step,
        0,
        lambda: trainer.engine.step_bytes(trainer.loader.micro_batches)[-1],
        trainer=trainer,
        finish=trainer.engine.finish_publishing,
        results=results,
    )


def occupy(pipeline: Pipeline, tick: float) -> None:
    """Let the actions of a pipeline take the time of a device, a forward of a stage `tick`."""
    clock, run = StandIn(), pipeline._act
    pipeline._messenger.wait = clock.restarting(pipeline._messenger.wait)  # type: ignore[method-assign]
    slow = {kind: clock.taking(ticks * tick, run) for kind, ticks in TICKS.items()}

    def act(step: Any, action: Any) -> None:
        slow[action.kind](step, action)

    pipeline._act = act  # type: ignore[method-assign]


def torch_pipelining(job: Job, config: Config, _: RunPlan, mesh: Mesh) -> Stepper:
    """torch.distributed.pipelining with FSDP2; see torch_pipelining.py."""
    from scripts.benchmarks.pipeline.torch_pipelining import TorchPipeline

    loader, batches = feed(job, config, mesh)
    options = job.options
    trained = TorchPipeline(
        config,
        mesh,
        options["schedule"],
        loader.micro_batches,
        float(options["tick"]),
        "reshard" in options,
    )

    def step() -> float:
        found: Sequence[Any] = next(batches)
        return trained.step(found)

    return Stepper(step, 0, lambda: 0)
