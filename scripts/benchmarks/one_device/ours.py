"""Our own part in one_device, and the machine's: each function runs in a process of its own."""

import time
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Literal

import torch

from megafrontier.config import (
    Config,
    CorpusConfig,
    DataConfig,
    OffloadConfig,
    OptimizerConfig,
    PartitionConfig,
    ScheduleConfig,
    TrainConfig,
    check,
)
from megafrontier.launch.context import join_machine
from megafrontier.model.kernels.float8 import missing_float8
from megafrontier.model.recompute.checkpointing import Mode
from megafrontier.plan.resolve import resolve_plan
from megafrontier.planner.auto import choose_layout
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.simulation.simulate import simulate
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.loop import run
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer, build_trainer
from scripts.benchmarks.one_device.setting import (
    BETAS,
    CLIP,
    LR,
    WEIGHT_DECAY,
    Setting,
    tokenizer_of,
)
from scripts.benchmarks.shared.child import Clock, Finished, Unable, device, synchronise


def matrix_rate(precision: str) -> dict[str, float]:
    """Arithmetic of one large matrix product a second: what MFU is measured against."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = 8192 if torch.cuda.is_available() else 2048
    left, right, out = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(3))
    torch.mm(left, right, out=out)
    synchronise()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < 2.0 or count < 3:
        torch.mm(left, right, out=out)
        synchronise()
        count += 1
    return {"flops_per_second": 2.0 * size**3 * count / (time.perf_counter() - begin)}


def ours(
    setting: dict[str, Any],
    compiled: bool,
    checkpointing: Mode = "none",
    linear_precision: Literal["fp8"] | None = None,
    offloaded: bool = False,
    share: float | None = None,
    overlap_update: bool = False,
    cuda_graphs: bool = False,
) -> dict[str, float]:
    """The framework's own loop, on one rank. With `share`, activation checkpointing is `auto`, and
    the budget lies at this share of the way from what `block` needs to what `none` needs."""
    chosen = Setting(**setting)
    config = our_config(chosen, compiled, checkpointing, offloaded)
    config.train.linear_precision = linear_precision
    config.train.cuda_graphs, config.partition.overlap_update = cuda_graphs, overlap_update
    check(config)
    if cuda_graphs and device().type == "cpu":
        raise Unable("no GPU")
    if share is not None:
        config = _with_budget(config, share)
    missing = missing_float8(device()) if linear_precision else None
    if missing is not None:
        raise Unable(missing)
    with join_machine(config) as (plan, mesh):
        clock = Clock(chosen.warm_up, chosen.steps)
        trainer = build_trainer(config, plan, mesh)
        tick = Tick(clock)
        with suppress(Finished), closing(trainer):
            run(trainer, [tick])
    return clock.figures() | {"loss": tick.loss}


def _with_budget(config: Config, share: float) -> Config:
    modes: tuple[Mode, Mode] = ("block", "none")
    given = [replace(config.train, activation_checkpointing=mode) for mode in modes]
    configs = [replace(config, train=train) for train in given]
    least, most = (simulate(each, resolve_plan(each, 1), UNKNOWN).gib for each in configs)
    memory = least + share * (most - least)
    train = replace(config.train, activation_checkpointing="auto", memory_gib=memory)
    found, lines = choose_layout(replace(config, train=train), 1)
    print(*lines, flush=True)
    return found


class Tick(Callback):
    """Ends the loop when all steps were timed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.loss = 0.0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._clock.tick()
        self.loss = result.loss
        if self._clock.done:
            raise Finished


def our_config(
    setting: Setting, compiled: bool, checkpointing: Mode = "none", offloaded: bool = False
) -> Config:
    """The framework's configuration of a setting. `offloaded`: the optimizer's state is on the
    host."""
    train = TrainConfig(
        steps=10_000,
        global_batch=setting.batch,
        micro_batch=setting.batch,
        precision="bf16" if setting.mixed else "fp32",
        clip_grad_norm=CLIP,
        compile=compiled,
        activation_checkpointing=checkpointing,
    )
    config = Config(
        model=setting.model,
        tokenizer=tokenizer_of(setting.corpus),
        data=DataConfig(train=[CorpusConfig(path=setting.corpus)], split=[1.0, 0.0]),
        train=train,
        optimizer=OptimizerConfig(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY),
        schedule=ScheduleConfig(name="constant"),
        partition=PartitionConfig(offload=OffloadConfig("cpu" if offloaded else "none")),
    )
    check(config)
    return config
