"""From the command to running ranks: check, then fork local ranks or join those of a launcher."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megafrontier.cluster.hierarchy import Hierarchy, check_ranks_per_host, join
from megafrontier.cluster.identity import Identity, identify
from megafrontier.cluster.local import exit_code, fork_ranks
from megafrontier.config import Config, save_config
from megafrontier.errors import UserError
from megafrontier.training.arrangement import Arrangement, arrange, check_training
from megafrontier.training.evaluation import Evaluate
from megafrontier.training.guard import Guard
from megafrontier.training.logbook import Log, Logbook, open_logbook
from megafrontier.training.loop import run
from megafrontier.training.saving import Save, resume
from megafrontier.training.trainer import build_trainer


def train(config: Config, nproc: int | None) -> int:
    """Train as one of a launcher's ranks, as `nproc` local ones, or alone. Returns an exit code.

    Raises UserError for bad input, before any process group starts.
    """
    return launch(lambda: _train_rank(config), nproc, lambda n: check_training(config, n))


def launch(body: Callable[[], int], nproc: int | None, check: Callable[[int], None]) -> int:
    """Run `body` on every rank, after `check` with their number."""
    if nproc is None:
        identity = identify(os.environ)
        check(identity.world_size)
        return exit_code(body, speaks=identity.rank == 0)
    if nproc < 1:
        raise UserError(f"--nproc: {nproc}, need at least 1")
    check(nproc)
    return fork_ranks(nproc, body)


@contextmanager
def joined(config: Config) -> Iterator[tuple[Arrangement, Hierarchy]]:
    """This rank's place in the machine that a configuration describes."""
    identity = identify(os.environ)
    arrangement = arrange(config, identity.world_size)
    check_ranks_per_host(identity, arrangement.machine.device.ranks_per_host)
    device = choose_device(identity)
    with join(identity, arrangement.levels, device) as hierarchy:
        yield arrangement, hierarchy


def choose_device(identity: Identity) -> torch.device:
    """This rank's GPU where there is one; a launcher that binds one GPU to each rank shows it as
    number 0. On a CPU, local ranks share the cores."""
    if torch.cuda.is_available():
        device = torch.device("cuda", identity.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if identity.source == "local":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // identity.world_size))
    return torch.device("cpu")


def _train_rank(config: Config) -> int:
    with (
        joined(config) as (arrangement, hierarchy),
        open_logbook(config, hierarchy.rank == 0) as logbook,
    ):
        _run(config, arrangement, hierarchy, logbook)
    return 0


def _run(config: Config, arrangement: Arrangement, hierarchy: Hierarchy, logbook: Logbook) -> None:
    trainer = build_trainer(config, arrangement, hierarchy)
    try:
        resume(trainer, logbook)
        logbook.open_sinks(config, trainer.step)
        if trainer.is_first:
            save_config(config, Path(config.run.directory) / "config.yaml")
        save = Save(logbook, trainer.step)
        trainer.engine.ledger.take()  # placing the first weights is no step's traffic
        run(trainer, [Log(logbook), Evaluate(logbook), save, Guard()])
    finally:
        trainer.close()
