"""What the exchange between sites adds to a step."""

from dataclasses import replace
from math import prod

from megafrontier.config import Config
from megafrontier.partition.layout import padded
from megafrontier.plan.footprint import unit_sizes
from megafrontier.plan.resolve import RunPlan
from megafrontier.planner.simulation.rank import Simulated
from megafrontier.sites.endpoint import LEVEL
from megafrontier.sites.outer import codec_of, message_bytes


def add_sites(config: Config, plan: RunPlan, step: Simulated) -> Simulated:
    """The step with the mean share of an exchange: its bytes, and what `sites.delay` steps do not
    hide of its seconds. All fragments count as equally large."""
    sites = config.sites
    if sites is None:
        return step
    codec, others = codec_of(sites.wire), len(sites.addresses) - 1
    sent = float(others * sum(message_bytes(codec, n) for n in shard_elements(config, plan)))
    steps, rate = sites.every or config.train.steps, sites.gigabytes_per_second
    exposed = 0.0
    if rate is not None:
        seconds = sent / sites.fragments / (rate * 1e9)
        visible = max(0.0, seconds - sites.delay * step.seconds)
        exposed = visible * sites.fragments / steps
    return replace(
        step,
        seconds=step.seconds + exposed,
        sent={**step.sent, LEVEL: sent / steps},
        exposed={**step.exposed, LEVEL: exposed},
    )


def shard_elements(config: Config, plan: RunPlan) -> list[int]:
    """Elements of the first rank's shard of each unit."""
    found = []
    for unit in unit_sizes(config, plan.shape.splits, plan.division):
        placement, levels = plan.of(unit.axes).placement, plan.shape.over(unit.axes)
        shards = prod(levels.sizes[: placement.on(levels).optimizer])
        found.append(padded(unit.numel, levels.ranks) // shards)
    return found
