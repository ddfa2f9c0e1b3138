"""Print what a config and overrides describe: name, directory and attempts of the run, a line each.

With a number of nodes, and if the machine file has ranks per host, also print what runs there and
warn of files and packages that are missing here.

    python slurm/describe.py [--nodes=N] [--tasks-per-node=N] [--tasks=N] [--submitting] CONFIG \
        [key=value …]

A batch file runs this before it starts a thousand ranks. Exit code 2 and one line for bad input,
70 if storage fails. --submitting also refuses a config without training data.
"""

import sys
from functools import partial

from megafrontier.common.errors import FatalError, UserError, exit_on_fatal_error
from megafrontier.config import Config, load_config, load_machine


def describe(
    config: Config,
    nodes: int | None,
    per_node: int | None,
    tasks: int | None,
    is_submitting: bool,
) -> list[str]:
    """The lines to print. Raises UserError if this many nodes and tasks cannot train the config."""
    if is_submitting:
        from megafrontier.data.sampling.samples import (
            refuse_no_corpus,
        )  # torch takes seconds to import

        refuse_no_corpus(config.data)
    per_host = load_machine(config.machine).device.ranks_per_host
    if per_host is not None:
        check_tasks(nodes, per_node, tasks, per_host)
    lines = [config.run.name, config.run.directory, str(config.train.attempts)]
    if nodes is None:
        return lines
    if per_host is not None:
        # torch takes seconds to import
        from megafrontier.training.plan import check_memory, resolve_plan
        from megafrontier.training.preview import describe_run

        plan = resolve_plan(config, nodes * per_host)
        check_memory(config, plan)
        return [*lines, *describe_run(config, plan), *missing(config, nodes * per_host)]
    if nodes > 1:
        lines.append(
            "warning: machine: states no device.ranks_per_host, so nothing is checked for "
            f"{nodes} nodes; need that of the cluster, as machine=frontier"
        )
    return lines


def check_tasks(nodes: int | None, per_node: int | None, tasks: int | None, per_host: int) -> None:
    """Raise UserError if the number of tasks is not the machine file's number of ranks."""
    if per_node is not None and per_node != per_host:
        raise UserError(
            f"--ntasks-per-node: {per_node}, need {per_host}, as machine.device.ranks_per_host says"
        )
    if tasks is None or tasks == per_host * (nodes or tasks // per_host):
        return
    fits = f"a multiple of {per_host}" if nodes is None else f"{per_host * nodes}"
    raise UserError(
        f"--ntasks: {tasks}, need {fits}, {per_host} on each node, as "
        "machine.device.ranks_per_host says"
    )


def missing(config: Config, ranks: int) -> list[str]:
    """Warnings of a corpus, tokenizer, package or checkpoint that is missing here, though nodes may
    have it on their own disks, and of a torch that cannot use the machine's devices."""
    import torch

    from megafrontier.training.preview import check_training
    from megafrontier.training.resume.resume import check_own

    if not config.data.train:  # to look at the sizes of a ready-made config
        return []
    found = []
    for check in partial(check_training, config, ranks), partial(check_own, config):
        try:
            check()
        except (FatalError, OSError) as error:
            found.append(f"warning: here {error}")
    device = load_machine(config.machine).device
    if device.is_accelerator and torch.version.cuda is None and torch.version.hip is None:
        found.append(
            f"warning: here torch is a build for CPUs, need one for {device.name}; "
            "MEGAFRONTIER_PREFIX names the environment"
        )
    return found


def take_option(words: list[str], option: str) -> int | None:
    """Remove a leading `OPTION=N` from the words and return N, or None if there is none.

    Raises UserError if N is not a whole number above 0.
    """
    if not words or not words[0].startswith(f"{option}="):
        return None
    said = words.pop(0).partition("=")[2]
    if not said.isdecimal() or int(said) == 0:
        raise UserError(f"{option}: {said!r}, need a whole number above 0")
    return int(said)


with exit_on_fatal_error("megafrontier"):
    words = sys.argv[1:]
    nodes, per_node = take_option(words, "--nodes"), take_option(words, "--tasks-per-node")
    tasks = take_option(words, "--tasks")
    is_submitting = bool(words) and words[0] == "--submitting"
    if not words[is_submitting:]:
        raise UserError("CONFIG: not given, need the path of a config")
    file, *overrides = words[is_submitting:]
    lines = describe(load_config(file, overrides), nodes, per_node, tasks, is_submitting)
    print("\n".join(lines))
