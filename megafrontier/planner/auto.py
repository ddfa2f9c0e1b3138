"""`auto` in a configuration: the planner chooses the layout before the ranks start."""

from megafrontier.config import Config
from megafrontier.planner.search import WORKERS, Free, search

SIMULATED = 3


def choose_layout(config: Config, ranks: int, workers: int = WORKERS) -> tuple[Config, list[str]]:
    """The configuration with a layout in place of `auto`, and lines that say what was taken.

    Only what is `auto` changes. The choice follows from configuration, machine and number of ranks,
    so all ranks choose alike. `workers`: processes at most.

    Raises UserError if no layout fits, and for a machine file that lacks a rate.
    """
    if not config.has_auto_layout:
        return config, []
    is_whole = config.parallel.tensor == "auto"
    free = Free(
        placement=config.partition.strategy == "auto",
        tensor=is_whole,
        expert=config.parallel.expert == "auto" or (is_whole and config.parallel.expert == 1),
        wires=False,
        memory=False,
    )
    chosen, *_ = search(config, ranks, SIMULATED, free, workers)
    line = f"auto: {' '.join(chosen.overrides)}; predicted: {chosen.step.seconds:.3g} s a step"
    return chosen.config, [f"{line}, {chosen.step.gib:.3g} GiB"]
