"""Every named strategy on one machine, side by side: memory, traffic and speed.

    python -m scripts.benchmarks.placements CONFIG [--nproc 8] [--steps 5] [--json F] [key=value …]

For each strategy and rank 0 of N local ranks: bytes of state held between steps (measured on the
tensors alive, and by the formula), bytes of the buffers for whole units and messages, bytes sent
per level in one step (counted, and by the formula), median seconds of the steps but the first, and
the largest peak resident memory of any rank. Each strategy has fresh processes; they run one after
the other, so the machine's drift is in their seconds.
"""

import argparse
import gc
import json
import pickle
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import Config, load_config
from megafrontier.launch.context import join_machine
from megafrontier.launch.local import fork_ranks
from megafrontier.partition import STRATEGIES, Engine
from megafrontier.partition.placement import state_bytes
from megafrontier.training.loop import train_step
from megafrontier.training.plan import RunPlan
from megafrontier.training.preview import check_training
from megafrontier.training.trainer import Trainer, build_trainer
from scripts.benchmarks.shared.measuring import in_a_folder, tensor_bytes


@dataclass
class Row:
    """One strategy's figures, of one rank."""

    strategy: str
    state_bytes: int
    state_formula: int
    buffer_bytes: int
    sent: dict[str, int]
    sent_formula: dict[str, int]
    step_seconds: float
    peak_rss_gib: float


def measure(config: Config, steps: int) -> Row | None:
    """Run on every rank; the first one's row."""
    gc.collect()
    before = tensor_bytes()
    with join_machine(config) as (plan, mesh):
        trainer = build_trainer(config, plan, mesh)
        trainer.engine.ledger.take()
        results = [train_step(trainer) for _ in range(steps)]
        trainer.close()
        gc.collect()
        buffers = trainer.engine.buffer_bytes
        held = tensor_bytes() - before - buffers
        row = Row(
            str(config.partition.strategy),
            held,
            expected_state(trainer.engine),
            buffers,
            {name: int(level["bytes"]) for name, level in results[-1].comm.items()},
            expected_traffic(trainer, plan),
            statistics.median(result.seconds for result in results[1:] or results),
            results[-1].memory_gib,
        )
        return row if trainer.is_first else None


def expected_state(engine: Engine) -> int:
    """Bytes of state of one rank by the formula."""
    levels, placement = engine.hierarchy.levels, engine.placement
    units = engine.units
    feedback_wires = engine.wires if any(unit.feedback.errors for unit in units) else None
    return sum(
        sum(
            state_bytes(
                u.layout.numel, placement, levels, u.weights.itemsize, feedback_wires
            ).values()
        )
        for u in units
    )


def expected_traffic(trainer: Trainer, plan: RunPlan) -> dict[str, int]:
    """Bytes one rank sends over each level in a step by the formula."""
    totals = trainer.engine.step_bytes(trainer.loader.micro_batches)
    return dict(zip(plan.levels.names, totals, strict=True))


def run_strategy(config: Config, nproc: int, steps: int) -> Row:
    """One strategy in fresh ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row"

        def body() -> int:
            row = measure(config, steps)
            if row is not None:
                path.write_bytes(pickle.dumps(row))
            return 0

        if fork_ranks(nproc, body):
            raise SystemExit(f"{config.partition.strategy}: a rank failed")
        row: Row = pickle.loads(path.read_bytes())
        return row


def table(rows: list[Row]) -> str:
    """Markdown."""
    levels = list(rows[0].sent)
    head = ["strategy", "state MB", "formula", "buffers MB", *(f"{n} MB/step" for n in levels)]
    head += ["bytes = formula", "s/step", "peak RSS GiB"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        sizes = (row.state_bytes, row.state_formula, row.buffer_bytes)
        cells = [row.strategy, *(f"{size / 1e6:.2f}" for size in sizes)]
        cells += [f"{row.sent[name] / 1e6:.2f}" for name in levels]
        cells += ["yes" if row.sent == row.sent_formula else "NO"]
        cells += [f"{row.step_seconds:.3f}", f"{row.peak_rss_gib:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all strategies and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=in_a_folder)
    arguments = parser.parse_intermixed_args()
    if arguments.steps < 2:  # the first one publishes nothing
        parser.error(f"--steps {arguments.steps}: need at least 2")
    rows = []
    for strategy in STRATEGIES:
        overrides = [*arguments.overrides, f"partition.strategy={strategy}"]
        with exit_on_fatal_error("placements"):
            config = load_config(arguments.config, overrides)
            check_training(config, arguments.nproc)
        rows.append(run_strategy(config, arguments.nproc, arguments.steps))
        print(f"{strategy} done", flush=True)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
