"""`auto` in a configuration: the planner chooses the layout, and the modes of activation
checkpointing, before the ranks start."""

from megafrontier.config import Config
from megafrontier.planner.candidates import Free
from megafrontier.planner.checkpointing import describe_modes, resolve_checkpointing
from megafrontier.planner.search import WORKERS, search

SIMULATED = 3


def choose_layout(config: Config, ranks: int, workers: int = WORKERS) -> tuple[Config, list[str]]:
    """The configuration with a layout and modes in place of `auto`, and lines that say what was
    taken.

    Only what is `auto` changes. The choice follows from configuration, machine and number of ranks,
    so all ranks choose alike. `workers`: processes at most.

    Raises UserError if no layout fits, and for a machine file that lacks a rate or the memory.
    """
    if not config.has_auto_layout:
        return resolve_checkpointing(config, ranks)
    is_whole = config.parallel.tensor == "auto"
    parallel = config.parallel
    free = Free(
        placement=config.partition.strategy == "auto",
        tensor=is_whole,
        context=is_whole and parallel.context == 1,
        expert=parallel.expert == "auto" or (is_whole and parallel.expert == 1),
        pipeline=is_whole and parallel.pipeline == 1,
        wires=False,
        memory=False,
    )
    chosen, *_ = search(config, ranks, SIMULATED, free, workers)
    line = f"auto: {' '.join(chosen.overrides)}; predicted: {chosen.step.seconds:.3g} s a step"
    lines = [f"{line}, {chosen.step.gib:.3g} GiB"]
    if config.train.activation_checkpointing == "auto":
        lines.append(f"auto: {describe_modes(chosen.config)}")
    return chosen.config, lines
