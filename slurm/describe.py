"""Print what a config and overrides describe: name, directory, attempts, spare nodes and folder of
snapshots (or none) of the run, and whether it is elastic, a line each.

With the number of nodes that train, and if the machine file has ranks per host, also print what
runs there and warn of files and packages that are missing here.

    python slurm/describe.py [--nodes=N] [--ntasks-per-node=N] [--ntasks=N] [--time=LIMIT] \
        [--signal=B:USR1@SECONDS] [--submitting] CONFIG [key=value …]

A batch file runs this before it starts a thousand ranks. Exit code 2 and one line for bad input,
70 if storage fails. --submitting also refuses a config without training data.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megafrontier.common.errors import UserError, exit_on_fatal_error
from megafrontier.config import Config, load_config, load_machine, refuse_no_corpus

if TYPE_CHECKING:  # torch takes seconds to import
    from megafrontier.plan.resolve import RunPlan


def describe(arguments: argparse.Namespace) -> list[str]:
    """The lines to print. Raises UserError if these nodes and tasks cannot train the config."""
    config, nodes = load_config(arguments.config, arguments.overrides), arguments.nodes
    if arguments.submitting:
        refuse_no_corpus(config.data)
    per_host = load_machine(config.machine).device.ranks_per_host
    run = config.run
    local = config.checkpoint.local
    lines = [run.name, run.directory, str(config.train.attempts), str(run.spare_nodes)]
    lines.append(local.folder if local.every else "none")
    lines.append("true" if config.train.elastic else "false")
    if nodes is None:
        return lines
    if run.spare_nodes:
        lines.append(f"{nodes} nodes train, {run.spare_nodes} more are spares (run.spare_nodes)")
    if per_host is not None:
        # torch takes seconds to import
        from megafrontier.certify.certificate import describe_certificate
        from megafrontier.plan.describe import describe_run
        from megafrontier.plan.saves import describe_saves
        from megafrontier.planner.checks import check_ranks

        check_tasks("--ntasks-per-node", arguments.ntasks_per_node, per_host)
        check_tasks("--ntasks", arguments.ntasks, nodes * per_host)
        ranks = nodes * per_host
        if config.needs_planner:
            from megafrontier.planner.auto import choose_layout

            config, chosen = choose_layout(config, ranks)
            lines += chosen
        plan = check_ranks(config, ranks)
        lines += [*describe_run(config, plan), *missing(config, plan)]
        lines.append(describe_certificate(Path(config.run.directory), config, ranks))
        if arguments.submitting:
            from megafrontier.planner.command import predict

            lines += predict(config, plan, working_seconds(arguments))
        else:  # a prediction takes seconds to minutes
            lines += describe_saves(config, plan, None, working_seconds(arguments))
        return lines
    if nodes > 1:
        lines.append(
            "warning: machine: states no device.ranks_per_host, so nothing is checked for "
            f"{nodes} nodes; need that of the cluster, as machine=frontier"
        )
    return lines


def check_tasks(option: str, tasks: int | None, ranks: int) -> None:
    """Raise UserError if a number of tasks is not the machine file's number of ranks."""
    if tasks not in (None, ranks):
        raise UserError(f"{option}: {tasks}, need {ranks}, by machine.device.ranks_per_host")


def working_seconds(arguments: argparse.Namespace) -> float | None:
    """How long a job works before Slurm asks it to stop, by sbatch's --time and --signal; None if
    that is not known."""
    days, _, clock = (arguments.time or "").rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or not (days or "0").isdecimal():
        return None
    # Without days one number is minutes, and two are minutes and seconds.
    numbers = [int(part) for part in parts]
    if not days and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    limit = 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds
    before = (arguments.signal or "").partition("@")[2]
    return limit - int(before) if limit and before.isdecimal() else limit or None


def missing(config: Config, plan: "RunPlan") -> list[str]:
    """Warnings of a corpus, tokenizer, package, secret or checkpoint that is missing here, though
    nodes may have it on their own disks, and of a torch that cannot use the machine's devices."""
    import torch

    from megafrontier.planner.checks import warn_of_files

    if not config.data.train:  # to look at the sizes of a ready-made config
        return []
    found = list(warn_of_files(config, plan))
    device = load_machine(config.machine).device
    if device.is_accelerator and torch.version.cuda is None and torch.version.hip is None:
        found.append(
            f"warning: here torch is a build for CPUs, need one for {device.name}; "
            "MEGAFRONTIER_PREFIX names the environment"
        )
    return found


parser = argparse.ArgumentParser()
for option in "--nodes", "--ntasks-per-node", "--ntasks":
    parser.add_argument(option, type=int)
for option in "--time", "--signal":
    parser.add_argument(option)
parser.add_argument("--submitting", action="store_true")
parser.add_argument("config")
parser.add_argument("overrides", nargs="*")
with exit_on_fatal_error("megafrontier"):
    print("\n".join(describe(parser.parse_args())))
