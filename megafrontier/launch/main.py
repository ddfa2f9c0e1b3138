"""From a command to its running ranks: check, then fork local ranks or join those of a launcher."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from megafrontier.common.errors import (
    STOPPED,
    FatalError,
    RanksAbsent,
    RanksRefused,
    StorageFailed,
    UserError,
    as_fatal_error,
    as_fatal_os_error,
)
from megafrontier.config import Config, TrainConfig, load_machine, save_config
from megafrontier.launch.context import RunContext, open_context
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.preflight import check_present, clear_room, preflight
from megafrontier.launch.health.run_lock import hold
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.local import exit_code, flush_output, fork_ranks, import_early
from megafrontier.launch.rendezvous import refuse
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.fault_injection import fault_point
from megafrontier.training.callbacks.base import load_class
from megafrontier.training.callbacks.evaluate import Evaluate
from megafrontier.training.callbacks.guard import Guard
from megafrontier.training.callbacks.log import Log, TraceWriter
from megafrontier.training.callbacks.save import Save
from megafrontier.training.callbacks.stragglers import GarbageCollection, Stragglers
from megafrontier.training.device import describe_kernels
from megafrontier.training.logging.run_log import RunLogger, check_directory, open_run_logger
from megafrontier.training.loop import run
from megafrontier.training.plan import check_memory, memory_advice
from megafrontier.training.preview import check_training, describe_run
from megafrontier.training.resume.restarts import StartRecord, record_interrupt, record_start
from megafrontier.training.resume.resume import check_resume, goes_back, resume
from megafrontier.training.trainer import Trainer, build_trainer

T = TypeVar("T")
Check = Callable[[int], object]
"""Given the number of ranks, raises if they cannot start."""


def train(config: Config, nproc: int | None) -> int:
    """Train as one of a launcher's ranks, or as `nproc` local ranks. Returns the exit code.

    Raises UserError for bad input, before any process group exists.
    """
    directory = Path(config.run.directory)
    identity = identify(os.environ) if nproc is None else None
    try:
        return launch(
            config,
            lambda: _train_rank(config),
            nproc,
            partial(_check, config, identity),
            partial(_check_host, config),
            partial(excluded_nodes.exclude_refused, directory=directory),
        )
    except KeyboardInterrupt:
        if identity is None or identity.rank == 0:
            record_interrupt(directory)
        raise


def _check(config: Config, identity: Identity | None, ranks: int) -> None:
    """Check on every rank of a launcher, or in the parent of local ranks (`identity`: None)."""
    fault_point("check")
    if identity is not None:  # a parent may not touch the devices of the ranks that it forks
        check_present(load_machine(config.machine).device, identity, config.preflight.enabled)
    check_memory(config, check_training(config, ranks))


def _check_host(config: Config) -> None:
    """Check on the first rank of every host."""
    fault_point("check host")
    check_resume(config)
    check_directory(config)  # last, because it creates the directory


def launch(
    config: Config,
    body: Callable[[], int],
    nproc: int | None,
    check: Check,
    check_host: Callable[[], object] = lambda: None,
    explain_refused: Callable[..., FatalError] = lambda error, identity: error,
) -> int:
    """Run `body` on every rank, after `check` on every rank and `check_host` on one rank a host.
    Returns the exit code.

    If some of a launcher's ranks fail their checks, all end with the error that `explain_refused`
    makes of RanksRefused.
    """
    if nproc is None:
        identity = identify(os.environ)

        def checked() -> int:
            try:
                _check_with_others(config, identity, check, check_host)
                import_early()
                return body()
            except RanksRefused as error:
                raise explain_refused(error, identity=identity) from error

        code = exit_code(checked, speaks=identity.rank == 0)
        _exit_from_launcher(identity, code)
        return code
    if nproc < 1:
        raise UserError(f"--nproc: {nproc}, need at least 1")
    _run_check(check, nproc)
    _run_check(check_host)
    return fork_ranks(nproc, body)


def load_or_refuse(make: Callable[[], T], nproc: int | None) -> T:
    """Return what `make` returns, such as a config, before ranks meet.

    If it fails on one of a launcher's ranks, perhaps only on that node, all ranks end with the
    error.
    """
    try:
        return make()
    except (UserError, StorageFailed) as error:
        identity = identify(os.environ) if nproc is None else None
        if identity is None or identity.world_size == 1:
            raise
        timeouts = Timeouts.of(identity.world_size, TrainConfig().hang_seconds)
        refusing = partial(refuse, identity, error, timeouts, is_hosts=False)
        _exit_from_launcher(identity, exit_code(refusing, speaks=identity.rank == 0))
        raise


def _exit_from_launcher(identity: Identity, code: int) -> None:
    """End one of a launcher's ranks without the interpreter's cleanup: a thread of the watchdog may
    wait in torch's store, and would abort the process when the interpreter is gone."""
    if identity.has_launcher:
        flush_output()
        os._exit(code)


def _run_check(check: Callable[..., object], *arguments: object) -> None:
    """Check. An error of the file system is bad input or a failed storage, never a bug."""
    try:
        check(*arguments)
    except OSError as error:
        raise as_fatal_os_error(error) from error


def _check_with_others(
    config: Config, identity: Identity, check: Check, check_host: Callable[[], object]
) -> None:
    """Check on one of a launcher's ranks. If it fails, all ranks raise RanksRefused."""
    is_hosts = False
    try:
        _run_check(check, identity.world_size)
        is_hosts = True
        if identity.local_rank == 0:
            _run_check(check_host)
    except (UserError, StorageFailed) as error:
        if identity.world_size == 1:
            raise
        timeouts = Timeouts.of(identity.world_size, config.train.hang_seconds)
        refuse(identity, error, timeouts, is_hosts)


def _train_rank(config: Config) -> int:
    directory = Path(config.run.directory)
    try:
        with open_context(config, directory, partial(open_run_logger, config)) as context:
            return _train_watched(context, directory)
    except RanksAbsent as error:
        identity = identify(os.environ)
        raise excluded_nodes.exclude_absent(error, directory, identity, os.environ) from error


def _train_watched(context: RunContext, directory: Path) -> int:
    config, identity, info = context.config, context.identity, context.run_logger.info
    excluded = partial(excluded_nodes.read, directory)
    with (
        hold(directory, identity, context.world, info, config.train.hang_seconds),
        record_start(config, identity, context.world, info, excluded) as start,
    ):
        context.watchdog.on_end = start.end
        if config.preflight.enabled:
            clear_room(config, context.world)
            with context.watchdog.checking_nodes():
                fault_point("preflight")
                preflight(config, context.plan, identity, context.mesh, info)
        with context.explain_out_of_memory(memory_advice(config)):
            code = _run(context, start)
        start.end(code)
        return code


def _run(context: RunContext, start: StartRecord) -> int:
    config, plan, run_logger = context.config, context.plan, context.run_logger
    watchdog = context.watchdog
    trainer = build_trainer(config, plan, context.mesh, run_logger)
    guard, users = Guard(), {name: load_class(name)() for name in config.log.callbacks}
    trainer.stateful = {"guard": guard, **users}
    for line in (
        *describe_run(config, plan, context.world.device),
        *describe_kernels(config, context.world, plan.wires),
        *([context.mesh.describe_groups()] if context.world.size > 1 else []),
    ):
        run_logger.info(line)
    try:
        resume(trainer, run_logger)
        start.add(resumed=trainer.step)
        context.world.run_on_all(partial(_open_records, trainer, run_logger))
        save = Save(run_logger, trainer.step)
        # The broadcast of the first weights belongs to no step.
        trainer.engine.ledger.take()
        trainer.engine.ledger.take_waited()
        trace, stragglers = TraceWriter(trainer), Stragglers(context.identity.host)
        evaluate = Evaluate(watchdog.beat)
        watchdog.begin(trainer.step, trainer.engine.ledger)
        garbage = GarbageCollection(config.train.gc_every)
        # Evaluation comes after the checkpoint, because it may be cut short.
        callbacks = [Log(), guard, *users.values(), save, evaluate, trace, stragglers, garbage]
        save.listeners = callbacks
        run(trainer, callbacks, watchdog.beat)
        if trainer.step >= trainer.last_step:
            return 0
        if trainer.is_first:
            is_repeatable = config.checkpoint.resume != "never" and not goes_back(config)
            how = "the same command goes on" if is_repeatable else "go on without checkpoint.resume"
            # The checkpoint of this step may have found no room.
            saved = "" if save.saved_step == trainer.step else f", saved at step {save.saved_step}"
            run_logger.info(f"stopped on request at step {trainer.step}{saved}; {how}")
        return STOPPED
    finally:
        trainer.close()


def _open_records(trainer: Trainer, run_logger: RunLogger) -> None:
    """Open the metrics and write config.yaml, on rank 0."""
    config, folder = trainer.config, Path(trainer.config.run.directory)
    if not trainer.is_first:
        return
    try:
        run_logger.open_sinks(config, trainer.step)
        save_config(config, folder / "config.yaml")
    except OSError as error:
        line = f"run.directory: {folder}: {error.strerror}, need room to write"
        raise as_fatal_error(error, line) from error
