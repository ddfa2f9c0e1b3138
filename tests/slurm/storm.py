"""A fault storm: kills at random moments of one run, which has to end as if nothing had been.

    python -m tests.slurm.storm [--kills 50] [--nodes 0] [--seed 0]

Each kill takes one rank, while it starts, in a step, or while a checkpoint is half written. With
`--nodes` the run has as many spare nodes, which are lost one after another, and goes on from
snapshots in the nodes' memory (`checkpoint.local`), never from the storage. Needs root and Slurm,
see cluster.py.
"""

import argparse
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import tests.conftest  # noqa: F401 (one thread, so that this process may fork ranks)
from megafrontier.training.resume.restarts import FILE_NAME, RestartRecord, read_records
from tests import runs
from tests.slurm.cluster import boot, wait_until, why_not
from tests.slurm.jobs import PATIENCE_SECONDS, Job, SubmittedRuns, make_configs, unbroken

MOMENTS = ("start", "step", "save")
STEPS_A_KILL = 3
TRAINING_NODES = 4
STEPS_A_SAVE = 2
START_SECONDS = 8.0


def storm(training: SubmittedRuns, kills: int, seed: int) -> None:
    """Kill so many times, then let the run go on to its end. Fails unless its losses are those of
    an unbroken run, to the bit, no torn checkpoint was resumed from, and nothing is left lying
    about."""
    rng = random.Random(seed)
    # More steps than the kills leave it, and as many failures in a row as they may bring about.
    overrides = (f"train.steps={20 + STEPS_A_KILL * kills}", f"checkpoint.every={STEPS_A_SAVE}")
    training.slow_down()
    job = training.submit(*overrides, "train.attempts=0")
    whole = set()
    for number in range(1, kills + 1):
        moment = rng.choice(MOMENTS)
        torn = strike(training, job, moment, rng)
        if torn > STEPS_A_SAVE:
            whole.add(f"step-{torn - STEPS_A_SAVE:08d}")
        again = "started again in this job"
        job.wait_until(lambda: job.output.count(again) >= number, f"restart {number}")  # noqa: B023
        print(f"kill {number} of {kills}: at {moment}, {len(training.losses)} steps done")
    training.speed_up()
    assert job.ended() == "COMPLETED", job.output
    assert job.restarts == 0, "the same job"
    assert training.losses == unbroken(training.config, 4, *overrides)
    for name in whole:
        assert f"resumed from {training.directory}/checkpoints/{name}" in job.output
    assert list(training.directory.glob("checkpoints/.*")) == [], "nothing to clean up by hand"


def strike(training: SubmittedRuns, job: Job, moment: str, rng: random.Random) -> int:
    """Kill one rank of the job's present start, at such a moment. Returns the step of a checkpoint
    that stays torn, else 0."""
    job.wait_until(lambda: len(job.ranks()) == 4, "ranks")
    if moment != "start":
        # Some steps, so that a checkpoint that is written behind them is published or not.
        for _ in range(rng.randint(1, 2 * STEPS_A_KILL)):
            training.wait_for_a_step_more(job)
    if moment == "save":
        victim = rng.randrange(4)
        step = training.kill_during_a_save(job, victim)
        return step if victim == 0 else 0
    time.sleep(rng.uniform(0, START_SECONDS if moment == "start" else 0.5))
    wait_until(lambda: job.ranks(), PATIENCE_SECONDS, "a rank to kill")
    job.kill_rank(rng.choice(sorted(job.ranks())))
    return 0


def storm_in_memory(training: SubmittedRuns, kills: int, losses: int, seed: int) -> None:
    """Kill so many ranks and cut so many nodes, in random order, each in a step. Fails unless the
    run ends in its first job with the losses of an unbroken run to the bit, each failure loses at
    most the steps between two snapshots, and nothing is read from the storage."""
    rng, ranks = random.Random(seed), TRAINING_NODES * training.ranks_per_node
    events = ["rank"] * kills + ["node"] * losses
    rng.shuffle(events)
    overrides = (f"train.steps={20 + 2 * STEPS_A_KILL * len(events)}", "train.global_batch=8")
    memory = training.directory.with_name("memory")
    memory.mkdir()
    training.slow_down()
    job = training.submit(
        *overrides, "train.attempts=0", "checkpoint.every=50", f"run.spare_nodes={losses}",
        f"checkpoint.local.every={STEPS_A_SAVE}", f"checkpoint.local.folder={memory}",
        options=(f"--nodes={TRAINING_NODES}", "--time=120"),
    )  # fmt: skip
    path = training.directory / FILE_NAME
    for number, event in enumerate(events, 1):
        job.wait_until(lambda: len(_first_steps(path)) == number, f"failure {number}")  # noqa: B023
        for _ in range(rng.randint(2, 1 + STEPS_A_KILL)):
            training.wait_for_a_step_more(job)
        time.sleep(rng.uniform(0, 0.5))
        if event == "rank":
            job.kill_rank(rng.randrange(ranks))
        else:  # not the first node, which has the batch script
            job.lose_node(job.node_of(rng.randrange(training.ranks_per_node, ranks)))
        print(f"{number} of {len(events)}: a {event}, {len(training.losses)} steps", flush=True)
    job.wait_until(lambda: len(_first_steps(path)) == len(events) + 1, "the last start")
    training.speed_up()
    assert job.ended() == "COMPLETED", job.output
    assert job.restarts == 0, "the same job"
    steps = _first_steps(path)[1:]
    _say_costs(events, steps)
    assert max(step["lost_steps"] for step in steps) <= STEPS_A_SAVE, steps
    assert training.losses == unbroken(training.config, ranks, *overrides)
    resumed = re.findall(r"resumed from (.*)", runs.log(training.directory))
    assert len(resumed) >= len(events)
    assert all(" 0 from storage" in line for line in resumed), resumed


def _first_steps(path: Path) -> list[RestartRecord]:
    records = read_records(path) if path.exists() else []
    return [record for record in records if "first_step" in record]


def _say_costs(events: list[str], steps: list[RestartRecord]) -> None:
    for kind in ("rank", "node"):
        found = [step for event, step in zip(events, steps, strict=True) if event == kind]
        seconds = sorted(step["down_seconds"] for step in found)
        if found:
            print(
                f"{kind}: {len(found)} lost, {statistics.median(seconds):.1f} s in the median from "
                f"the failure to the end of the next step, {seconds[-1]:.1f} at most; at most "
                f"{max(step['lost_steps'] for step in found)} steps lost"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="default: 50")
    parser.add_argument("--nodes", type=int, default=0, help="nodes that are lost too; default: 0")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims; default: 0")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"no Slurm here: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    nodes = TRAINING_NODES + arguments.nodes if arguments.nodes else 2
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with boot(folder / "slurm", nodes) as cluster:
            training = SubmittedRuns(cluster, make_configs(folder), folder / "run").with_ranks(2)
            if arguments.nodes:
                storm_in_memory(training, arguments.kills, arguments.nodes, arguments.seed)
            else:
                storm(training, arguments.kills, arguments.seed)
    seconds = time.monotonic() - begin
    print(f"{arguments.kills} kills, {seconds:.0f} s: the losses of an unbroken run to the bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
