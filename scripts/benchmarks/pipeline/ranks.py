"""What one rank of the benchmark does: our pipeline, whose actions take the time of a device."""

import time
from typing import Any

from megafrontier.config import Config
from megafrontier.parallel.mesh import Mesh
from megafrontier.pipeline.runner import Pipeline
from megafrontier.pipeline.table import ActionKind
from megafrontier.training.plan import RunPlan
from megafrontier.training.trainer import build_trainer
from scripts.benchmarks.shared.job import Job
from scripts.benchmarks.shared.ranks import Stepper, train_steps, trains

TICKS = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 1,
}


@trains
def ours(job: Job, config: Config, plan: RunPlan, mesh: Mesh) -> Stepper:
    """The trainer, as `megafrontier train` runs it, with actions that take time."""
    trainer = build_trainer(config, plan, mesh)
    assert isinstance(trainer.runner, Pipeline)
    occupy(trainer.runner, float(job.options["tick"]) / config.parallel.stages_per_rank)
    return train_steps(trainer)


def occupy(pipeline: Pipeline, tick: float) -> None:
    """Let the actions of a pipeline take the time of a device, a forward of a stage `tick`.

    An action computes its small part and then waits until its time is over, as a host does whose
    device computes. Time that an action waits for its input does not count.
    """
    run, receive, began = pipeline._act, pipeline._messenger.wait, 0.0

    def act(step: Any, action: Any) -> None:
        nonlocal began
        began = time.perf_counter()
        run(step, action)
        end = began + TICKS[action.kind] * tick
        time.sleep(max(0.0, end - time.perf_counter()))

    def wait(*arguments: Any, **named: Any) -> Any:
        nonlocal began
        result = receive(*arguments, **named)
        began = time.perf_counter()
        return result

    pipeline._act = act  # type: ignore[method-assign]
    pipeline._messenger.wait = wait  # type: ignore[method-assign]
