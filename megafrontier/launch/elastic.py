"""`train.elastic`: on how many nodes a run goes on if some are lost."""

from collections.abc import Sequence

from megafrontier.common.errors import UserError
from megafrontier.config import Config, load_config
from megafrontier.planner.checks import check_ranks


def most_nodes(config_file: str, overrides: Sequence[str], tasks: int, most: int) -> int:
    """The largest number of nodes, `most` at most, on which the layout of a config can run with
    `tasks` ranks a node; 0 if there is none. Raises UserError for a bad config."""
    config = load_config(config_file, overrides)
    return next((n for n in range(most, 0, -1) if _is_possible(config, n * tasks)), 0)


def _is_possible(config: Config, ranks: int) -> bool:
    if config.needs_planner:  # it finds one
        return True
    try:
        check_ranks(config, ranks)
    except UserError:
        return False
    return True
