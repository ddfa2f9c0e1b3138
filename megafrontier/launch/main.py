"""From a command to its running ranks: check, then fork local ranks or join those of a launcher."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from megafrontier.checkpoint.local.snapshot import Snapshot
from megafrontier.checkpoint.local.store import SnapshotStore
from megafrontier.common.errors import (
    LOST,
    STOPPED,
    FatalError,
    NodesUnfit,
    PeersLost,
    RanksAbsent,
    RanksRefused,
    StorageFailed,
    UserError,
    as_fatal_error,
    as_fatal_os_error,
    as_missing_package,
)
from megafrontier.config import Config, TrainConfig, load_machine, save_config
from megafrontier.launch import survivors
from megafrontier.launch.context import RunContext, open_context
from megafrontier.launch.health import excluded_nodes
from megafrontier.launch.health.preflight import check_rank, clear_room, preflight
from megafrontier.launch.health.run_lock import hold
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.launch.local import (
    flush_output,
    fork_ranks,
    fork_ranks_again,
    import_early,
    report,
)
from megafrontier.launch.rendezvous import check_sockets, refuse
from megafrontier.launch.tasks import may_start_again, run_task
from megafrontier.parallel.env import REPLACED, Identity, identify, starts_in_old_tasks
from megafrontier.parallel.fault_injection import fault_point
from megafrontier.plan.assemble import initial_values
from megafrontier.plan.describe import aligned, describe_kernels, describe_run
from megafrontier.plan.refuse import memory_advice
from megafrontier.plan.saves import describe_saves
from megafrontier.planner.checks import check_files, check_ranks
from megafrontier.sites.exchange import SiteExchange
from megafrontier.training.callbacks.base import load_class
from megafrontier.training.callbacks.evaluate import Evaluate
from megafrontier.training.callbacks.first_step import FirstStep
from megafrontier.training.callbacks.guard import Guard
from megafrontier.training.callbacks.log import Log, TraceWriter
from megafrontier.training.callbacks.save import Save
from megafrontier.training.callbacks.snapshots import Snapshots, open_store
from megafrontier.training.callbacks.stragglers import GarbageCollection, Stragglers
from megafrontier.training.goodput import read_goodput
from megafrontier.training.logging.run_log import RunLogger, check_directory, open_run_logger
from megafrontier.training.loop import run
from megafrontier.training.resume.restarts import (
    FILE_NAME,
    StartRecord,
    append_record,
    record_failure,
    record_interrupt,
    record_start,
)
from megafrontier.training.resume.resume import begins_anew, check_resume, goes_back, resume
from megafrontier.training.trainer import Trainer, build_trainer

T = TypeVar("T")
Check = Callable[[int], object]
"""Given the number of ranks, raises if they cannot start."""


def train(config: Config, nproc: int | None, restarts: int = 0) -> int:
    """Train as one of a launcher's ranks, or as `nproc` local ranks, which are started again up to
    `restarts` times after a failure. Returns the exit code.

    Raises UserError for bad input, before any process group exists.
    """
    directory = Path(config.run.directory)
    identity = identify(os.environ) if nproc is None else None
    config, chosen = _choose_layout(config, nproc, identity)
    check = partial(_check, config, identity)
    try:
        body = partial(_train_rank, config, chosen)
        return launch(config, body, nproc, check, directory, restarts)
    except KeyboardInterrupt:
        if identity is None or identity.rank == 0:
            record_interrupt(directory)
        raise


def _choose_layout(
    config: Config, nproc: int | None, identity: Identity | None
) -> tuple[Config, list[str]]:
    if not config.needs_planner:
        return config, []
    from megafrontier.planner.auto import choose_layout  # imports parts of torch for seconds

    if identity is None:
        return choose_layout(config, nproc or 1)
    # The ranks of a host choose at the same time, each on its core.
    return choose_layout(config, identity.world_size, workers=1)


def _check(config: Config, identity: Identity | None, ranks: int) -> None:
    """Check on every rank of a launcher, or in the parent of local ranks (`identity`: None)."""
    fault_point("check")
    if identity is not None:  # a parent may not touch the devices of the ranks that it forks
        check_rank(load_machine(config.machine).device, identity, config.preflight.enabled)
    per_host = load_machine(config.machine).device.ranks_per_host or 1
    plan = check_ranks(config, ranks, ranks if identity is None else per_host)
    # One rank a host looks for files: with 100 corpora and 75,264 ranks, checks on all of them are
    # 45 million metadata operations of the file system.
    if identity is None or identity.local_rank == 0:
        check_files(config, plan)
        check_resume(config)
        check_directory(config)  # last, because it creates the directory


def launch(
    config: Config,
    body: Callable[[], int],
    nproc: int | None,
    check: Check,
    directory: Path | None = None,
    restarts: int = 0,
) -> int:
    """Run `body` on every rank, after `check`. Returns the exit code.

    If some of a launcher's ranks fail the check, all end. If they are few, their nodes are excluded
    from the run in `directory`. Local ranks are started again up to `restarts` times after a
    failure, which is recorded in `directory`.
    """
    if nproc is not None:
        if nproc < 1:
            raise UserError(f"--nproc: {nproc}, need at least 1")
        # The ranks inherit the limit of this process.
        check_sockets(Identity(0, nproc, 0, "local", host=socket.gethostname()))
        _call_or_refuse(partial(check, nproc), None, config.train.hang_seconds)
        if not restarts or directory is None:
            return fork_ranks(nproc, body)
        return fork_ranks_again(nproc, body, restarts, partial(_record_failure, directory))
    identity = identify(os.environ)
    join = partial(_join_launchers_ranks, config, body, check, directory)
    if directory is not None and may_start_again(identity):
        code = run_task(identity, join, partial(_record_failure, directory))
    else:
        code = join()
    _exit_from_launcher(identity, code)
    return code


def _join_launchers_ranks(
    config: Config, body: Callable[[], int], check: Check, directory: Path | None
) -> int:
    """Run `body` as one of a launcher's ranks, after `check`. Returns the exit code."""
    identity = identify(os.environ)
    try:
        if directory is not None:
            _refuse_listed_node(config, identity, directory)
        _call_or_refuse(partial(check_sockets, identity), identity, config.train.hang_seconds)
        checking = partial(check, identity.world_size)
        _call_or_refuse(checking, identity, config.train.hang_seconds)
        import_early()
        return body()
    except FatalError as error:
        survivor = survivors.current()
        if survivor is not None and survivor.is_abandoning(error):
            raise
        if isinstance(error, RanksRefused) and directory is not None:
            error = excluded_nodes.exclude_refused(error, directory, identity)
        return report(error, speaks=identity.rank == 0)


def _refuse_listed_node(config: Config, identity: Identity, directory: Path) -> None:
    """End all ranks if this one starts again in a task on a node that the run excludes."""
    if REPLACED in os.environ and identity.host in excluded_nodes.read(directory):
        problem = NodesUnfit(f"{identity.host} is in {directory / excluded_nodes.FILE_NAME}")
        refuse(identity, problem, Timeouts.of(identity.world_size, config.train.hang_seconds))


def _record_failure(directory: Path, code: int, reason: str) -> None:
    with suppress(OSError):  # the next start warns of it
        record_failure(directory, code, reason)


def load_or_refuse(make: Callable[[], T], nproc: int | None) -> T:
    """Return what `make` returns, such as a config, before ranks meet.

    If it fails on one of a launcher's ranks, perhaps only on that node, all ranks end with the
    error.
    """
    if nproc is not None:
        return make()
    identity = identify(os.environ)
    try:
        return _call_or_refuse(make, identity, TrainConfig().hang_seconds)
    except FatalError as error:
        if identity.world_size > 1:
            _exit_from_launcher(identity, report(error, speaks=identity.rank == 0))
        raise


def _call_or_refuse(call: Callable[[], T], identity: Identity | None, hang_seconds: float) -> T:
    """Return what `call` returns on this rank. If it fails on one of a launcher's ranks, all raise
    RanksRefused. `identity`: None in the parent of local ranks."""
    try:
        return call()
    except (UserError, StorageFailed, OSError, ModuleNotFoundError) as error:
        problem: FatalError
        match error:
            case OSError():
                problem = as_fatal_os_error(error)
            case ModuleNotFoundError():
                problem = as_missing_package(error)
            case _:
                problem = error
        if identity is None or identity.world_size == 1:
            raise problem from error
        refuse(identity, problem, Timeouts.of(identity.world_size, hang_seconds))


def _exit_from_launcher(identity: Identity, code: int) -> None:
    """End one of a launcher's ranks without the interpreter's cleanup: a thread of the watchdog may
    wait in torch's store, and would abort the process when the interpreter is gone."""
    if identity.has_launcher:
        flush_output()
        os._exit(code)


def _train_rank(config: Config, chosen: Sequence[str]) -> int:
    """`chosen`: what the planner chose, for the log."""
    directory = Path(config.run.directory)
    try:
        with open_context(config, directory, partial(open_run_logger, config)) as context:
            return _train_watched(context, directory, chosen)
    except RanksAbsent as error:
        identity = identify(os.environ)
        if starts_in_old_tasks(os.environ):
            _record_absent(directory, identity, error)
            raise PeersLost(str(error)) from error
        raise excluded_nodes.exclude_absent(error, directory, identity, os.environ) from error


def _record_absent(directory: Path, identity: Identity, error: RanksAbsent) -> None:
    """Record that these ranks have not come back, so that slurm/train.sbatch does not wait for
    them."""
    lost = [[rank, ""] for rank in error.ranks]
    if identity.rank == 0:
        with suppress(OSError):
            end = {"ended": LOST, "reason": str(error), "lost": lost}
            append_record(directory / FILE_NAME, end)


def _train_watched(context: RunContext, directory: Path, chosen: Sequence[str]) -> int:
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
            code = _run(context, start, chosen)
        start.end(code)
        if context.world.rank == 0:
            info(str(read_goodput(directory)))
        return code


def _run(context: RunContext, start: StartRecord, chosen: Sequence[str]) -> int:
    config, plan, run_logger = context.config, context.plan, context.run_logger
    watchdog = context.watchdog
    trainer = build_trainer(config, plan, context.mesh, run_logger, has_values=False)
    guard, users = Guard(), {name: load_class(name)() for name in config.log.callbacks}
    trainer.stateful = {"guard": guard, **users}
    if config.sites is not None:
        trainer.stateful["sites"] = SiteExchange(trainer, config.sites)
    lines = (
        *chosen,
        *describe_run(config, plan, context.world.device),
        *describe_kernels(config, context.world, plan, trainer.model),
        *describe_saves(config, plan),
        *([context.mesh.describe_groups()] if context.world.size > 1 else []),
    )
    for line in aligned(lines):
        run_logger.info(line)
    snapshots: SnapshotStore | None = None
    try:
        snapshots = open_store(trainer, context.identity, partial(begins_anew, config))
        found = resume(trainer, run_logger, snapshots)
        if found is None:
            trainer.engine.initialise(initial_values(config))
        start.add(resumed=trainer.step)
        first_step = FirstStep(start, trainer.step)
        context.world.run_on_all(partial(_open_records, trainer, run_logger))
        save = Save(run_logger, found.stored_step if isinstance(found, Snapshot) else trainer.step)
        # The broadcast of the first weights belongs to no step.
        trainer.engine.ledger.take()
        trainer.engine.ledger.take_waited()
        trace, stragglers = TraceWriter(trainer), Stragglers(context.identity.host)
        evaluate = Evaluate(watchdog.beat)
        watchdog.begin(trainer.step, trainer.engine.ledger)
        # A survivor frees the run, and its parent has frozen what was there before.
        garbage = GarbageCollection(config.train.gc_every, freezes=survivors.current() is None)
        # Evaluation comes after the checkpoint, because it may be cut short.
        callbacks = [Log(), first_step, *trainer.stateful.values()]
        callbacks += [save, evaluate, trace, stragglers, garbage]
        if snapshots is not None and snapshots.folder is not None:
            callbacks.append(Snapshots(snapshots, save))
        save.listeners = callbacks
        run(trainer, callbacks, watchdog.beat)
        start.add(between_seconds=trainer.between_seconds)
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
        if snapshots is not None:
            snapshots.close(is_over=False)
        trainer.close()


def _open_records(trainer: Trainer, run_logger: RunLogger) -> None:
    """Open the metrics and write config.yaml, on rank 0."""
    config, folder = trainer.config, Path(trainer.config.run.directory)
    if not trainer.is_first:
        return
    try:
        run_logger.open_sinks(config, trainer.step)
        _keep_given(folder / "config.yaml")
        save_config(config, folder / "config.yaml")
    except OSError as error:
        line = f"run.directory: {folder}: {error.strerror}, need room to write"
        raise as_fatal_error(error, line) from error


def _keep_given(path: Path) -> None:
    """Copy a config.yaml that begins with a comment, as `import` or a person writes it, to
    config.given.yaml before that of the run replaces it. Raises OSError."""
    if path.is_file() and (given := path.read_bytes()).startswith(b"#"):
        path.with_name("config.given.yaml").write_bytes(given)
