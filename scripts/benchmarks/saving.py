"""How long a checkpoint holds up training, saved at once and behind the next steps.

    python -m scripts.benchmarks.saving CONFIG [--nproc 8] [--rounds 5] [--folder DIR]
        [--json F] [key=value …]

In each round N local ranks train some plain steps, save at once, and save behind the next steps.
Seconds are those of rank 0, which waits for the others. The checkpoints lie in a new folder within
DIR (default: for temporary files), whose storage the figures depend on.

blocked: training waits. At once: for all of the save. Behind: to copy and to publish.
slower: by how much the steps behind which the checkpoint is written are slower than plain ones.
MB/s: bytes of the checkpoint by the seconds of the save: behind the steps, those to copy, to write
rank 0's shard and to publish.
"""

import argparse
import gc
import json
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from megafrontier.checkpoint.save import PendingSave
from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import Config, load_config
from megafrontier.launch.context import join_machine
from megafrontier.launch.local import fork_ranks
from megafrontier.training.callbacks.save import checkpoint_bytes, save_trainer, start_saving
from megafrontier.training.loop import train_step
from megafrontier.training.preview import check_training
from megafrontier.training.trainer import Trainer, build_trainer
from scripts.benchmarks.shared.measuring import at_least, in_a_folder

PLAIN_STEPS = 4


@dataclass
class Round:
    """Seconds of one round, but for the number of steps behind which a checkpoint was written."""

    plain_step: float
    at_once: float
    copied: float
    behind_steps: float
    num_behind: int
    written: float
    published: float

    @property
    def blocked(self) -> float:
        """What a save behind the steps makes training wait."""
        return self.copied + self.published

    @property
    def slower(self) -> float:
        """What the steps behind which it is written take longer than others."""
        return self.behind_steps - self.num_behind * self.plain_step

    @property
    def behind(self) -> float:
        """What the save takes, without waiting for the end of a step."""
        return self.copied + self.written + self.published


def measure_round(trainer: Trainer) -> Round:
    """All ranks call it."""
    plain = median(train_step(trainer).seconds for _ in range(PLAIN_STEPS))
    trainer.world.barrier()
    at_once = -time.perf_counter()
    save_trainer(trainer)
    at_once += time.perf_counter()
    train_step(trainer)
    trainer.world.barrier()
    begin = time.perf_counter()
    trainer.pending_save = pending = start_saving(trainer)
    pending.write_behind()
    copied = time.perf_counter()
    ends: list[float] = []
    watcher = threading.Thread(target=_watch, args=(pending, ends))
    watcher.start()
    number = 1
    while train_step(trainer).is_saving:
        number += 1
    stepped = time.perf_counter()
    pending.finish()
    trainer.pending_save = None
    published = time.perf_counter() - stepped
    watcher.join()
    written = ends[0] - copied
    return Round(plain, at_once, copied - begin, stepped - copied, number, written, published)


def _watch(pending: PendingSave, ends: list[float]) -> None:
    """Add the time at which this rank's thread has written."""
    while not pending.is_written:
        time.sleep(0.002)
    ends.append(time.perf_counter())


def measure(config: Config, nproc: int, rounds: int, out: Path) -> None:
    """Run fresh ranks, of which the first writes the rounds."""

    def body() -> int:
        with join_machine(config) as (plan, mesh):
            trainer = build_trainer(config, plan, mesh)
            gc.collect()
            train_step(trainer)
            save_trainer(trainer)  # makes folders, and loads what a save uses
            found = [asdict(measure_round(trainer)) for _ in range(rounds)]
            trainer.close()
            if trainer.is_first:
                out.write_text(json.dumps([checkpoint_bytes(config, plan), found]))
        return 0

    if fork_ranks(nproc, body):
        raise SystemExit("a rank failed")


def table(size: int, found: list[Round]) -> str:
    """Markdown, of the medians."""

    def of(name: str) -> float:
        return median(getattr(one, name) for one in found)

    step, megabytes = of("plain_step"), size / 1e6
    blocked, slower = of("blocked"), of("slower")
    return "\n".join(
        [
            f"{megabytes:.1f} MB, a step {step:.2f} s, {len(found)} rounds",
            "| save | blocked, s | of a step | steps behind | slower, s | in all, steps | MB/s |",
            "|---|---:|---:|---:|---:|---:|---:|",
            f"| at once | {of('at_once'):.3f} | {of('at_once') / step:.2f} | 0 | 0 "
            f"| {of('at_once') / step:.2f} | {megabytes / of('at_once'):.0f} |",
            f"| behind the steps | {blocked:.3f} | {blocked / step:.2f} | {of('num_behind'):.0f} "
            f"| {slower:.3f} | {(blocked + slower) / step:.2f} | {megabytes / of('behind'):.0f} |",
        ]
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc", type=at_least(1), default=8)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=in_a_folder)
    arguments = parser.parse_intermixed_args()
    nproc, rounds = int(arguments.nproc), int(arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        with exit_on_fatal_error("saving"):
            overrides = [*arguments.overrides, f"run.directory={folder}/run"]
            config = load_config(arguments.config, overrides)
            check_training(config, nproc)
        measure(config, nproc, rounds, Path(folder) / "rounds")
        size, found = json.loads((Path(folder) / "rounds").read_text())
    print(table(size, [Round(**one) for one in found]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"bytes": size, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
