"""A fault storm: kills at random moments of one run, which has to end as if nothing had been.

    python -m tests.slurm.storm [--kills 50] [--seed 0]

Each kill takes one rank, while it starts, in a step, or while a checkpoint is half written. Needs
root and Slurm, see cluster.py.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import tests.conftest  # noqa: F401 (one thread, so that this process may fork ranks)
from tests.slurm.cluster import boot, wait_until, why_not
from tests.slurm.jobs import PATIENCE_SECONDS, Job, SubmittedRuns, make_configs, unbroken

MOMENTS = ("start", "step", "save")
STEPS_A_KILL = 3
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="default: 50")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims; default: 0")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"no Slurm here: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with boot(folder / "slurm", nodes=2) as cluster:
            training = SubmittedRuns(cluster, make_configs(folder), folder / "run").with_ranks(2)
            storm(training, arguments.kills, arguments.seed)
    seconds = time.monotonic() - begin
    print(f"{arguments.kills} kills, {seconds:.0f} s: the losses of an unbroken run to the bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
