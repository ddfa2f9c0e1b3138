"""The estimate by which the search sorts layouts is near the bytes of the simulation."""

from itertools import combinations

import pytest

from megafrontier.config import load_config
from megafrontier.config.model.moe import ExpertGroupsConfig, MoEConfig
from megafrontier.plan.footprint import unit_sizes
from megafrontier.plan.resolve import micro_batches_of, resolve_plan
from megafrontier.planner.candidates import by_levels
from megafrontier.planner.estimate import sent_bytes
from megafrontier.planner.simulation.rates import UNKNOWN
from megafrontier.planner.simulation.routing import distinct_share
from megafrontier.planner.simulation.simulate import simulate

SMALL = (
    "model.layers=6", "model.vocab_size=1024", "model.sequence_length=256",
    "train.global_batch=128", "train.micro_batch=4",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("gpt-125m", ("partition.strategy=zero3",)),
        ("gpt-125m", ("partition.strategy=topo", "partition.wires=low")),
        ("gpt-125m", ("partition.strategy=ddp", "parallel.tensor=pair")),
        ("gpt-125m", ("parallel.tensor=4", "train.activation_checkpointing=block")),
        ("moe-quickstart", ("machine=frontier", "parallel.expert=8")),
        ("moe-quickstart", ("machine=frontier", "parallel.expert=8", "parallel.dispatch=flat")),
    ],
)
def test_the_bytes_of_each_level_are_nearly_those_of_the_simulation(name, chosen):
    """Units that stay unsharded where forward turns to backward are gathered less often."""
    config = load_config(f"configs/{name}.yaml", [*SMALL, *chosen])
    plan = resolve_plan(config, 16)
    simulated = simulate(config, plan, UNKNOWN)
    number = micro_batches_of(config, plan)
    groups = by_levels(plan, unit_sizes(config, plan.shape.splits))
    estimated = sent_bytes(config, plan, groups, number)
    assert estimated == pytest.approx(list(simulated.sent.values()), rel=0.4)


@pytest.mark.parametrize(("groups", "active_groups"), [(1, 1), (4, 2), (3, 2), (6, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_share_of_tokens_that_reach_a_group_is_that_of_all_choices(groups, active_groups, size):
    limited = ExpertGroupsConfig(groups, active_groups)
    moe = MoEConfig(experts=12, active=2, groups=limited)
    reached = total = 0.0
    for chosen in combinations(range(groups), active_groups):
        open_to = [e for e in range(12) if e // (12 // groups) in chosen]
        choices = [*combinations(open_to, 2)]
        reached += sum(min(choice) < size for choice in choices) / len(choices)
        total += 1
    assert distinct_share(moe, size) == pytest.approx(reached / total)
