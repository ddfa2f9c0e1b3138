"""With any levels, placement, wires, schedule and model, a run keeps its promises.

Each test run draws one layout; MEGAFRONTIER_ARRANGEMENTS=200 draws 200.
"""

import os
from dataclasses import dataclass
from random import Random

import pytest

from megafrontier.common.errors import UserError
from megafrontier.plan.resolve import resolve_plan
from tests import runs
from tests.ranks import make_levels

COUNT = int(os.environ.get("MEGAFRONTIER_ARRANGEMENTS", "1"))
SIZES = [
    (3,), (4,), (2, 2), (3, 2), (2, 4), (2, 2, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1, 2),
    (1, 2, 1, 2, 2),
]  # fmt: skip
PRESETS = ["exact", "low", "zero++"]
STEPS = 4


@dataclass
class Drawn:
    """Overrides of a run on `ranks` ranks. `schedule` may change no bit of the losses, `partition`
    may change their rounding; `run` is what it trains."""

    ranks: int
    schedule: list[str]
    partition: list[str]
    run: list[str]

    @property
    def is_exact(self) -> bool:
        return "train.precision=fp32" in self.run and "partition.wires=exact" in self.partition


def draw(rng: Random, config_file) -> Drawn:
    """A layout that no check refuses."""
    while True:
        found = _draw(rng)
        try:
            resolve_plan(runs.load(config_file, *found.partition, *found.run), found.ranks)
        except UserError:
            continue  # for example delta wires that are not published
        return found


def _draw(rng: Random) -> Drawn:
    levels = make_levels(rng.choice(SIZES))
    pairs = zip(levels.names, levels.sizes, strict=True)
    sizes = ", ".join(f"{name}: {{size: {size}}}" for name, size in pairs)
    accumulation, micro_batch = rng.choice([1, 2, 3]), rng.choice([1, 2])
    partition = [f"machine={{levels: {{{sizes}}}}}", *_draw_placement(rng, levels.names)]
    partition += _draw_wires(rng, levels.names)
    schedule = _chosen(
        rng, "partition", overlap=["safe", "full"], prefetch=range(4), check_order=["true", "false"]
    )
    late = rng.choice(["offload.optimizer=none", "offload.optimizer=cpu", "overlap_update=true"])
    schedule.append(f"partition.{late}")
    batches = [
        f"train.global_batch={levels.ranks * accumulation * micro_batch}",
        f"train.micro_batch={micro_batch}",
    ]
    return Drawn(levels.ranks, schedule, partition, [*batches, *_draw_run(rng)])


def _draw_placement(rng: Random, names) -> list[str]:
    """Each state is sharded at least as far as the one before."""
    states = ("backward_weights", "weights", "gradients", "optimizer")
    depths = sorted(rng.randint(0, len(names)) for _ in states)
    chosen = zip(states, depths, strict=True)
    placed = [f"partition.{state}={['none', *names][depth]}" for state, depth in chosen]
    return placed[1:] if depths[0] == depths[1] else placed


def _draw_wires(rng: Random, names) -> list[str]:
    if rng.random() < 0.6:
        return [f"partition.wires={rng.choice(PRESETS)}"]
    gather = ["bf16", "int8", "int4", "delta8", "delta4"]
    reduce = ["fp32", "bf16", "int8", "int4"]
    some = [name for name in names if rng.random() < 0.4]
    return [
        *(f"partition.wires.gather.{name}={rng.choice(gather)}" for name in some),
        *(f"partition.wires.reduce.{name}={rng.choice(reduce)}" for name in names),
        *_chosen(rng, "partition", error_feedback=["true", "false"]),
    ]


def _draw_run(rng: Random) -> list[str]:
    boolean = ["true", "false"]
    return [
        *_chosen(
            rng, "train", precision=["fp32", "bf16"], clip_grad_norm=[0, 0.1],
            activation_checkpointing=["none", "block", "selective"], loss_chunk_tokens=[8, 1024],
        ),
        *_chosen(
            rng, "model", layers=[1, 2, 3, 5], tie_embeddings=boolean, bias=boolean,
            dropout=[0, 0, 0.1], position=["rotary", "learned"], parallel_residual=boolean,
        ),
        *_chosen(rng, "data", document_mask=boolean),
    ]  # fmt: skip


def _chosen(rng: Random, section: str, **keys) -> list[str]:
    return [f"{section}.{key}={rng.choice(values)}" for key, values in keys.items()]


@pytest.mark.parametrize("seed", range(COUNT))
def test_any_layout_has_the_losses_of_one_process_and_resumes_to_the_bit(
    config_file, tmp_path, seed
):
    rng = Random(seed)
    drawn = draw(rng, config_file)
    print(drawn)  # shown when the test fails
    stop = rng.randint(1, STEPS - 1)
    always = (
        *drawn.run, f"train.steps={STEPS}", f"run.seed={seed}", "evaluate.batches=0",
        f"checkpoint.every={stop}",  # in both runs, because saving folds the errors
    )  # fmt: skip

    def train(name, ranks, *overrides):
        lines = runs.run(
            config_file, ranks, *always, *overrides, f"run.directory={tmp_path}/{name}"
        )
        return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]

    unbroken = train("unbroken", drawn.ranks, *drawn.partition, "partition.overlap=none")
    chosen = (*drawn.partition, *drawn.schedule)
    train("stopped", drawn.ranks, *chosen, f"train.stop_at={stop}")
    assert train("stopped", drawn.ranks, *chosen) == unbroken
    tolerance = 2e-5 if drawn.is_exact else 0.1
    one = [loss for loss, _ in train("one", 1, "machine=laptop")]
    assert [loss for loss, _ in unbroken] == pytest.approx(one, rel=tolerance)
