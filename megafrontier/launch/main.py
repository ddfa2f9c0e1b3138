"""From the command to running ranks: check, then fork local ranks or join those of a launcher."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from megafrontier.common.errors import (
    STOPPED,
    FatalError,
    RanksAbsent,
    RanksRefused,
    StorageFailed,
    UserError,
    as_fatal_error,
    as_generic_fatal_error,
)
from megafrontier.config import Config, TrainConfig, load_machine, save_config
from megafrontier.launch.allocator import prepare_allocator
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.liveness import LivenessCheck
from megafrontier.launch.health.preflight import check_present, clear_room, preflight
from megafrontier.launch.health.run_lock import hold
from megafrontier.launch.health.watchdog import (
    Watchdog,
    collective_seconds,
    meeting_seconds,
    watched,
)
from megafrontier.launch.local import exit_code, flush_output, fork_ranks, import_early
from megafrontier.launch.rendezvous import check_ranks_per_host, join, refuse
from megafrontier.parallel.env import Identity, identify
from megafrontier.parallel.hierarchy import Hierarchy
from megafrontier.training.callbacks.base import load_callbacks, notify_saved
from megafrontier.training.callbacks.evaluate import (
    Evaluate,
    is_evaluation_missing,
    warn_validation_repeats,
)
from megafrontier.training.callbacks.guard import Guard
from megafrontier.training.callbacks.log import Log, TraceWriter
from megafrontier.training.callbacks.save import Save
from megafrontier.training.callbacks.stragglers import GarbageCollection, Stragglers
from megafrontier.training.device import (
    check_caches,
    describe_kernels,
    explain_out_of_memory,
    memory_advice,
)
from megafrontier.training.logging.run_log import RunLogger, check_directory, open_run_logger
from megafrontier.training.loop import run
from megafrontier.training.plan import RunPlan, check_memory, resolve_plan
from megafrontier.training.preview import check_training, describe_ranks, warn_vocabulary
from megafrontier.training.resume.restarts import StartRecord, record_interrupt, record_start
from megafrontier.training.resume.resume import check_resume, resume, resumes_when_repeated
from megafrontier.training.trainer import Trainer, build_trainer

Made = TypeVar("Made")
Check = Callable[[int], object]
"""Given the number of ranks, raises where they cannot start."""


def train(config: Config, nproc: int | None) -> int:
    """Train as one of a launcher's ranks, as `nproc` local ones, or alone. Returns an exit code.

    Raises UserError for bad input, before any process group starts.
    """
    directory, begun = Path(config.run.directory), datetime.now(UTC)
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
    except KeyboardInterrupt:  # as a parent, or with ranks that hear of it themselves
        if identity is None or identity.rank == 0:
            record_interrupt(directory, begun)
        raise


def _check(config: Config, identity: Identity | None, ranks: int) -> None:
    """As one of a launcher's ranks, or without `identity` as the parent of local ones."""
    if identity is not None:  # a parent may not touch the devices of those it forks
        check_present(load_machine(config.machine).device, identity, config.preflight.enabled)
    check_memory(config, check_training(config, ranks))


def _check_host(config: Config) -> None:
    """What each host's first rank looks for: each locks the folder for it."""
    check_caches(config)
    check_resume(config)
    check_directory(config)  # last: it makes what it looks at


def launch(
    config: Config,
    body: Callable[[], int],
    nproc: int | None,
    check: Check,
    check_host: Callable[[], object] = lambda: None,
    of_refused: Callable[..., FatalError] = lambda error, identity: error,
) -> int:
    """Run `body` on every rank, after `check` with their number and, on one rank a host,
    `check_host`. `of_refused` makes the error to end with where some of a launcher's ranks did not
    pass."""
    if nproc is None:
        identity = identify(os.environ)

        def checked() -> int:
            try:
                _check_among_others(config, identity, check, check_host)
                import_early()
                return body()
            except RanksRefused as error:
                raise of_refused(error, identity=identity) from error

        code = exit_code(checked, speaks=identity.rank == 0)
        _leave_launcher(identity, code)
        return code
    if nproc < 1:
        raise UserError(f"--nproc: {nproc}, need at least 1")
    _passed(check, nproc)
    _passed(check_host)
    return fork_ranks(nproc, body)


def prepared(make: Callable[[], Made], nproc: int | None) -> Made:
    """What `make` makes of the command, a config say, before ranks meet. What one of a launcher's
    ranks cannot have, perhaps on its node alone, all of them hear of, and end."""
    try:
        return make()
    except (UserError, StorageFailed) as error:
        identity = identify(os.environ) if nproc is None else None
        if identity is None or identity.world_size == 1:
            raise
        seconds = meeting_seconds(TrainConfig().hang_seconds)
        refusing = partial(refuse, identity, error, seconds, is_hosts=False)
        _leave_launcher(identity, exit_code(refusing, speaks=identity.rank == 0))
        raise


def _leave_launcher(identity: Identity, code: int) -> None:
    """End one of a launcher's ranks as it stands: a thread may wait in torch's store
    (launch/health/watchdog.py), and aborts a process that the interpreter ends once it is gone."""
    if identity.has_launcher:
        flush_output()
        os._exit(code)


def _passed(check: Callable[..., object], *arguments: object) -> None:
    """Check; what a file system says to a path is bad input or its own failure, never a bug."""
    try:
        check(*arguments)
    except OSError as error:
        raise as_generic_fatal_error(error) from error


def _check_among_others(
    config: Config, identity: Identity, check: Check, check_host: Callable[[], object]
) -> None:
    is_hosts = False
    try:
        _passed(check, identity.world_size)
        is_hosts = True
        if identity.local_rank == 0:
            _passed(check_host)
    except (UserError, StorageFailed) as error:
        if identity.world_size == 1:
            raise
        refuse(identity, error, meeting_seconds(config.train.hang_seconds), is_hosts)


@contextmanager
def joined(
    config: Config,
    met: Callable[[LivenessCheck | None], None] = lambda roll: None,
    failed: Callable[[Exception], None] = lambda error: None,
) -> Iterator[tuple[RunPlan, Hierarchy]]:
    """This rank's place in the machine that a configuration describes; `met` and `failed` as in
    `join`."""
    identity = identify(os.environ)
    plan = resolve_plan(config, identity.world_size)
    device = choose_device(identity, plan.machine.device.name)
    if device.type == "cuda":
        where = f"rank {identity.rank} on {identity.host}"
        with explain_out_of_memory(where, "a device without another process's memory"):
            torch.cuda.set_device(device)  # takes some of its memory, if there is any
    prepare_allocator(device)
    waiting = {
        "timeout_seconds": collective_seconds(config.train.hang_seconds),
        "meeting_seconds": meeting_seconds(config.train.hang_seconds),
    }
    with join(identity, plan.levels, device, met=met, failed=failed, **waiting) as hierarchy:
        check_ranks_per_host(hierarchy.world, identity, plan.machine.device.ranks_per_host)
        yield plan, hierarchy


def uses_accelerator(name: str) -> bool:
    """Whether to compute on one: where there is one, unless `machine.device.name` is `cpu`."""
    return name != "cpu" and torch.cuda.is_available()


def choose_device(identity: Identity, name: str) -> torch.device:
    """This rank's GPU where there is one, unless `name` (`machine.device.name`) is `cpu`; a
    launcher that binds one GPU to each rank shows it as number 0. Local ranks share the cores,
    unless OMP_NUM_THREADS says how many threads each has. Raises UserError for more local ranks
    than devices."""
    if identity.source == "local" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // identity.world_size))
    if uses_accelerator(name):
        count = torch.cuda.device_count()
        if identity.source == "local" and identity.world_size > count:
            raise UserError(
                f"--nproc: {identity.world_size}, need at most {count}, one a device, or "
                "machine.device.name=cpu"
            )
        return torch.device("cuda", identity.local_rank % count)
    return torch.device("cpu")


def _train_rank(config: Config) -> int:
    identity = identify(os.environ)
    directory = Path(config.run.directory)
    try:
        return _train_watched(config, identity, directory)
    except RanksAbsent as error:
        raise excluded_nodes.exclude_absent(error, directory, identity, os.environ) from error


def _train_watched(config: Config, identity: Identity, directory: Path) -> int:
    excluded = partial(excluded_nodes.read, directory)
    with (
        closing(Watchdog(identity, directory, config.train.hang_seconds)) as watch,
        joined(config, watch.start, watch.fail) as (plan, hierarchy),
        open_run_logger(config, hierarchy.world.rank == 0) as run_logger,
        watched(watch),
        hold(directory, identity, hierarchy.world, run_logger.info, config.train.hang_seconds),
        record_start(config, identity, hierarchy.world, run_logger.info, excluded) as start,
    ):
        watch.last_words = start.end
        if config.preflight.enabled:
            clear_room(config, hierarchy.world)
            with watch.trying_nodes():
                preflight(config, plan, identity, hierarchy, run_logger.info)
        where = f"rank {identity.rank} on {identity.host}"
        with explain_out_of_memory(where, memory_advice(config)):
            code = _run(config, plan, hierarchy, run_logger, watch, start)
        start.end(code)
        return code


def _run(
    config: Config,
    plan: RunPlan,
    hierarchy: Hierarchy,
    run_logger: RunLogger,
    watch: Watchdog,
    start: StartRecord,
) -> int:
    trainer = build_trainer(config, plan, hierarchy, run_logger)
    guard, users = Guard(), load_callbacks(config.log.callbacks)
    trainer.stateful = {"guard": guard, **users}
    for line in (
        *warn_vocabulary(config),
        *describe_ranks(config, plan, hierarchy.device),
        *describe_kernels(config, hierarchy.world, plan.wires),
        *warn_validation_repeats(trainer.valid_loader, config.evaluate.batches),
    ):
        run_logger.info(line)
    try:
        resume(trainer, run_logger)
        start.add(resumed=trainer.step)
        is_missing = is_evaluation_missing(trainer)
        hierarchy.world.run_on_all(partial(_keep_books, trainer, run_logger))
        save = Save(run_logger, trainer.step, watch.beat)
        # Placing the first weights is no step's traffic.
        trainer.engine.ledger.take()
        trainer.engine.ledger.take_waited()
        trace, stragglers = TraceWriter(trainer), Stragglers(identify(os.environ).host)
        evaluate = Evaluate(watch.beat, is_missing)
        watch.begin(trainer.step, trainer.engine.ledger)
        garbage = GarbageCollection(config.train.gc_every)
        # Evaluation comes after the checkpoint, because it may be cut short.
        callbacks = [Log(), guard, *users.values(), save, evaluate, trace, stragglers, garbage]
        save.on_saved = partial(notify_saved, callbacks)
        run(trainer, callbacks, watch.beat)
        save.finish(hierarchy.world)
        if trainer.step >= trainer.last_step:
            return 0
        if trainer.is_first:
            how = (
                "the same command goes on"
                if resumes_when_repeated(config)
                else "go on without checkpoint.resume"
            )
            # There may have been no room for it.
            saved = "" if save.saved_step == trainer.step else f", saved at step {save.saved_step}"
            run_logger.info(f"stopped on request at step {trainer.step}{saved}; {how}")
        return STOPPED
    finally:
        trainer.close()


def _keep_books(trainer: Trainer, run_logger: RunLogger) -> None:
    """The first rank begins to keep metrics, and notes the configuration."""
    config, folder = trainer.config, Path(trainer.config.run.directory)
    if not trainer.is_first:
        return
    run_logger.open_sinks(config, trainer.step)
    try:
        save_config(config, folder / "config.yaml")
    except OSError as error:
        line = f"run.directory: {folder}: {error.strerror}, need room to write"
        raise as_fatal_error(error, line) from error
