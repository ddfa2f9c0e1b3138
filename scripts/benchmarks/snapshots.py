"""What snapshots near the ranks cost: seconds of a step, and memory of the nodes.

    python -m scripts.benchmarks.snapshots --ranks 4 --every 10 --rounds 6 [key=value …]

Half of the local ranks are on another node, as far as snapshots know. Rounds of `every` steps, with
a snapshot and without, take turns in one process. On a machine that others use, the processor time
of all ranks says more than the clock.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from megafrontier.checkpoint.format import Manifest
from megafrontier.checkpoint.shard_file import file_size
from megafrontier.checkpoint.states import own_shards
from megafrontier.config import load_config
from megafrontier.launch.context import join_machine
from megafrontier.launch.local import fork_ranks
from megafrontier.parallel.env import identify
from megafrontier.plan.assemble import initial_values
from megafrontier.training.callbacks.save import Save, saved_buffers
from megafrontier.training.callbacks.snapshots import Snapshots, open_store
from megafrontier.training.logging.run_log import RunLogger
from megafrontier.training.loop import start_step
from megafrontier.training.trainer import build_trainer
from scripts.benchmarks.shared.inputs import write_inputs
from scripts.benchmarks.shared.measuring import at_least, make_parser, resident_bytes


def measure(path: str, overrides: list[str], every: int, rounds: int, answer: Path) -> int:
    """Train on this rank; rank 0 writes what the ranks have measured."""
    torch.set_num_threads(1)
    directory = f"run.directory={answer.parent}"
    config = load_config(path, [*overrides, directory, f"checkpoint.local.every={every}"])
    identity = identify(os.environ)
    node = f"node{2 * identity.rank // identity.world_size}"
    with join_machine(config) as (plan, mesh):
        trainer = build_trainer(config, plan, mesh)
        trainer.engine.initialise(initial_values(config))
        store = open_store(trainer, replace(identity, host=node), lambda: True)
        assert store is not None
        snapshots = Snapshots(store, Save(RunLogger(None), 0))
        resident = resident_bytes("VmHWM")
        seconds: dict[bool, list[list[float]]] = {True: [], False: []}
        for number in range(2 * rounds + 2):
            takes, begin = number % 2 == 0, (time.perf_counter(), time.process_time())
            for step in range(every):
                result = start_step(trainer, [snapshots]).read()
                # Only the first step of a round is one at which a snapshot is due.
                due = every if takes and step == 0 else every + 1
                snapshots.after_step(trainer, replace(result, step=due))
            mesh.world.barrier()
            spent = [time.perf_counter() - begin[0], time.process_time() - begin[1]]
            if number > 1:  # the first ones allocate
                seconds[takes].append(mesh.world.gather(_row(*spent)).mean(0).tolist())
        shards = own_shards(trainer.engine, trainer.unit_states, saved_buffers(trainer))
        blank = Manifest(0, 0, id="0" * 16)
        writers = [part for part in shards if part.is_writer]
        size = sum(file_size(blank, part.shard_set, part.index) for part in writers)
        grown = resident_bytes("VmHWM") - resident
        assert store.folder is not None
        held = store.folder.held_bytes / (mesh.world.size // 2)
        memory = mesh.world.gather(_row(size, held, grown)).mean(0).tolist()
        if mesh.rank == 0:
            answer.write_text(json.dumps([seconds[True], seconds[False], *memory]))
        store.close(is_over=True)
        trainer.close()
    return 0


def _row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def main() -> int:
    parser = make_parser(__doc__, "snapshots")
    for name, default in (("--ranks", 4), ("--every", 10), ("--rounds", 6)):
        parser.add_argument(name, type=at_least(1, int), default=default)
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, answer = write_inputs(Path(folder)), Path(folder, "answer.json")
        given = chosen.overrides, chosen.every, chosen.rounds, answer
        code = fork_ranks(chosen.ranks, lambda: measure(path, *given))
        if code:
            return code
        with_one, without, size, held, grown = json.loads(answer.read_text())
    for number, what in enumerate(("by the clock", "processor time")):
        step = statistics.median(row[number] for row in without) / chosen.every
        more = [a[number] - b[number] for a, b in zip(with_one, without, strict=True)]
        share = statistics.median(more) / step / chosen.every
        print(
            f"{what}: a step {step:.3f} s, a snapshot {statistics.median(more):.3f} s: {share:.2%}"
        )
    print(f"a shard {size / 1e6:.1f} MB; the node has {held / size / 2:.3f} × that for each copy")
    print(f"resident memory of a rank grows by {grown / size:.2f} × its shard")
    return 0


if __name__ == "__main__":
    sys.exit(main())
