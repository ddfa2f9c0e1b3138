"""What a rank of a cluster does in a job that trains: our engine, or computing alone, for some
steps."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from megafrontier.comm.ledger import Trace
from megafrontier.comm.wires.registry import DTYPES
from megafrontier.comm.wires.wire import Wires
from megafrontier.config import Config, load_config
from megafrontier.data.sampling.loader import Loader, open_loader
from megafrontier.data.sampling.samples import Batch
from megafrontier.launch.context import join_machine
from megafrontier.model.gpt import GPT
from megafrontier.model.init import initialise
from megafrontier.parallel.mesh import Mesh
from megafrontier.plan.resolve import RunPlan
from megafrontier.training.loop import train_step
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer, build_trainer
from scripts.benchmarks.shared.device import occupy
from scripts.benchmarks.shared.job import Answer, Job
from scripts.benchmarks.shared.links import machine_cpu_seconds, sent
from scripts.benchmarks.shared.measuring import resident_bytes
from scripts.benchmarks.shared.step_bytes import step_bytes


@dataclass
class Stepper:
    """Something that trains: `step` does one optimizer step and returns the mean loss.

    `between` runs between steps and is not part of them, `finish` after the last one: it sends what
    a step leaves to be sent under the next. `results` are of the engine's steps.
    """

    step: Callable[[], float]
    parameters: int
    formula_bytes: Callable[[], int]
    protocol_bytes: Callable[[], int] = lambda: 0
    trainer: Trainer | None = None
    between: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None
    results: Sequence[StepResult] = ()


Make = Callable[[Job, Config, RunPlan, Mesh], Stepper]


def trains(make: Make) -> Callable[[Job], Answer]:
    """The function of a job whose ranks train what `make` makes."""

    @wraps(make)
    def run(job: Job) -> Answer:
        torch.set_num_threads(1)
        resident = _reset_peak_memory()
        config = load_config(job.config, job.overrides)
        with join_machine(config) as (plan, mesh):
            stepper = make(job, config, plan, mesh)
            answer = _measure(job, config, mesh, stepper, resident)
            mesh.world.all_true(True)  # nobody leaves while a peer still needs it
            if stepper.trainer is not None:
                stepper.trainer.close()
        return answer

    return run


def _measure(job: Job, config: Config, mesh: Mesh, stepper: Stepper, resident: int) -> Answer:
    mesh.world.all_true(True)
    # From before the warm-up, for a step that is timed begins with the sending of the one before.
    bytes_before, packets_before = sent()
    for _ in range(job.warmup):
        stepper.step()
    mesh.world.all_true(True)
    cpu, machine_cpu = time.process_time(), machine_cpu_seconds()
    begins, ends = [], []
    trace = _start_trace(job, stepper.trainer)
    for _ in range(job.steps):
        begins.append(time.perf_counter())
        loss = stepper.step()
        ends.append(time.perf_counter())
        stepper.between()
    cpu, machine_cpu = time.process_time() - cpu, machine_cpu_seconds() - machine_cpu
    counted, seconds = _comm(stepper.results[-job.steps :])
    if trace is not None:
        trace.write(Path(job.options["trace"]))
    stepper.finish()
    mesh.world.all_true(True)  # the slowest rank of the node has sent its last, too
    bytes_after, packets_after = sent()
    return Answer(
        begins,
        ends,
        cpu,
        machine_cpu,
        config.train.global_batch * config.model.sequence_length,
        stepper.parameters,
        job.warmup + job.steps,
        bytes_after - bytes_before,
        packets_after - packets_before,
        stepper.formula_bytes(),
        stepper.protocol_bytes(),
        counted,
        seconds,
        resident_bytes("VmHWM") - resident,
        loss,
    )


def _start_trace(job: Job, trainer: Trainer | None) -> Trace | None:
    """Hang a trace on the first rank's ledger, where one is asked for."""
    if "trace" not in job.options or trainer is None or not trainer.is_first:
        return None
    ledger = trainer.engine.ledger
    ledger.trace = Trace(ledger.names)
    return ledger.trace


def _comm(results: Sequence[StepResult]) -> tuple[int | None, dict[str, float]]:
    """(bytes over the slowest level, seconds by level) of a step, by the engine's own count."""
    if not results:
        return None, {}
    names = list(results[0].comm)
    seconds = {n: statistics.mean(r.comm[n]["seconds"] for r in results) for n in names}
    return round(statistics.mean(r.comm[names[-1]]["bytes"] for r in results)), seconds


# Steppers


def train_steps(trainer: Trainer, protocol_bytes: Callable[[], int] = lambda: 0) -> Stepper:
    """The steps of a trainer, as `megafrontier train` runs them."""
    results: list[StepResult] = []

    def step() -> float:
        results.append(train_step(trainer))
        return results[-1].loss

    return Stepper(
        step,
        sum(entry.numel for unit in trainer.engine.units for entry in unit.layout.entries),
        lambda: step_bytes(trainer.engine, trainer.loader.micro_batches)[-1],
        protocol_bytes,
        trainer,
        finish=trainer.engine.finish_publishing,
        results=results,
    )


@trains
def ours(job: Job, config: Config, plan: RunPlan, mesh: Mesh) -> Stepper:
    """The engine."""
    trainer = build_trainer(config, plan, mesh)
    occupy(trainer.model, job.block_seconds)
    return train_steps(trainer, lambda: _gloo_bytes(trainer, plan))


class Preambles:
    """Stands where a wire and its codec do and says what gloo sends around one message."""

    is_delta = False
    """Of several messages it makes one."""

    def __init__(self, messages: int) -> None:
        self.codec = self
        self._bytes = 3 * 48 * messages

    def message_bytes(self, _elements: int) -> int:
        """Ready to send, ready to receive, and the head of the data, 48 bytes each."""
        return self._bytes


def _gloo_bytes(trainer: Trainer, plan: RunPlan) -> int:
    """What gloo adds over the slowest level: its all-gather sends each piece in two messages, and
    one small sum, of loss and norm, is all-gathered in each step."""
    levels = plan.levels
    count = len(levels.names)
    wires: Any = Wires((Preambles(2),) * count, (Preambles(1),) * count)
    sums = (levels.sizes[-1] - 1) * Preambles(2).message_bytes(1)
    return step_bytes(trainer.engine, trainer.loader.micro_batches, wires)[-1] + sums


@trains
def alone(job: Job, config: Config, _: RunPlan, mesh: Mesh) -> Stepper:
    """Computing without communication: plain PyTorch, and this rank's share of the update."""
    model = whole_model(job, config).to(DTYPES[config.train.precision])
    _, batches = feed(job, config, mesh)
    parameters = sum(p.numel() for p in model.parameters())
    share = torch.zeros(parameters // mesh.levels.ranks)
    share.grad = torch.zeros_like(share)
    optimizer = torch.optim.AdamW([share], fused=True)

    def step() -> float:
        total, tokens = 0.0, 0
        for batch in next(batches):
            loss = model(batch.tokens, batch.targets, batch.documents)
            loss.backward()
            total, tokens = total + loss.item(), tokens + batch.targets.numel()
        optimizer.step()
        model.zero_grad()
        return total / tokens

    # Without a meeting the ranks would drift apart, and the last have the cores for themselves.
    return Stepper(step, parameters, lambda: 0, between=lambda: mesh.world.all_true(True))


def feed(job: Job, config: Config, mesh: Mesh) -> tuple[Loader, Iterator[Sequence[Batch]]]:
    """What reads the corpus, and this rank's micro-batches of one step after the other."""
    loader = open_loader(config, "train", mesh.data_rank, mesh.data_size, mesh.device)
    assert loader is not None
    return loader, map(loader.step, range(job.warmup + job.steps))


def whole_model(job: Job, config: Config) -> GPT:
    """The configured GPT with the first values our engine gives it, fp32."""
    model = GPT(config.model, loss_chunk_tokens=config.train.loss_chunk_tokens)
    initialise(model, config.run.seed)
    occupy(model, job.block_seconds)
    return model


def _reset_peak_memory() -> int:
    """Bytes resident now; the peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()
