"""What must hold before a run starts.

`train`, `train --dry-run`, `plan` and slurm/describe.py call the same checks, so that all of them
refuse a config with the same line:

                                    train   --dry-run   plan      slurm
    check_layout, check_memory      error   error       error*    error
    check_files                     error   error       warning   warning
    check_resume or check_own       error   error       -         warning
    check_directory, check_parents  error   error       -         -

* `plan` lists a layout that does not fit into memory, and says so.
"""

import socket
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

from megafrontier.common.errors import FatalError, UserError
from megafrontier.config import Config
from megafrontier.config.sites import split_address
from megafrontier.data.sampling.loader import PARTS
from megafrontier.evaluation.tasks import check_tasks
from megafrontier.optim.adamw import find_apex
from megafrontier.plan.refuse import check_data, check_host_memory, check_layout, check_memory
from megafrontier.plan.resolve import RunPlan
from megafrontier.sites.transport import read_secret
from megafrontier.training.callbacks.base import Callback, load_class
from megafrontier.training.resume.resume import check_own


def check_ranks(config: Config, ranks: int, on_host: int | None = None) -> RunPlan:
    """Check layout and memory of each rank. Returns the plan. `on_host`: the ranks on this host;
    None: they run elsewhere. Raises UserError."""
    plan = check_layout(config, ranks)
    check_memory(config, plan)
    check_host_memory(config, plan, on_host)
    return plan


def check_files(config: Config, plan: RunPlan, needs_corpus: bool = True) -> None:
    """Check what this machine must have: tokenizer, corpora, packages, and the secret of sites.
    Without `needs_corpus`, `data.train` may be empty, as it is in ready-made configs. Raises
    UserError."""
    parts = PARTS if needs_corpus or config.data.train else ()
    check_data(config, plan, parts)
    check_packages(config)
    if config.sites is not None:
        read_secret(config.sites.secret)


def check_packages(config: Config) -> None:
    """Check that the packages, tasks and callbacks that the config names are there, and that
    callbacks fit. Raises UserError."""
    log = config.log
    wandb = "" if log.wandb == "disabled" else log.wandb
    chosen = {"wandb": wandb, "tensorboard": "true" * log.tensorboard, "mlflow": log.mlflow}
    for package, value in chosen.items():
        if value and find_spec(package) is None:
            fits = f"needs a package: pip install megafrontier[{package}]"
            raise UserError(f"log.{package}: {value}, {fits}")
    check_tasks(config)
    if config.optimizer.fused == "apex":
        find_apex()
    for name in log.callbacks:
        changes = load_class(name).after_optimizer is not Callback.after_optimizer
        is_offloaded = config.partition.offload.optimizer != "none"
        if changes and (is_offloaded or config.partition.overlap_update):
            key = "offload.optimizer=none" if is_offloaded else "overlap_update=false"
            fits = f"may change masters after a step, need partition.{key}"
            raise UserError(f"log.callbacks: {name}, {fits}")


def warn_of_files(config: Config, plan: RunPlan, resumes: bool = True) -> Iterator[str]:
    """A warning for each check of this machine's files that fails: the nodes of the run may have
    them. `resumes`: also for a checkpoint that the run would resume from."""
    checks: list[Callable[[], None]] = [partial(check_files, config, plan, needs_corpus=False)]
    checks += [partial(check_own, config)] * resumes
    for check in checks:
        try:
            check()
        except (FatalError, OSError) as error:
            yield f"warning: here {error}"
    yield from warn_of_names(config)


def warn_of_names(config: Config) -> Iterator[str]:
    """A warning for each host of `sites.addresses` that has no address here. A run goes on without
    such a site."""
    for address in [] if config.sites is None else config.sites.addresses:
        host, port = split_address(address)
        try:
            socket.getaddrinfo(host, port)
        except OSError as error:
            yield f"warning: sites.addresses: {address}: {error.strerror}, need a host known here"
