"""What low-bit wires cost in loss: the same training with each preset, side by side.

    python -m scripts.benchmarks.wire_quality CONFIG [--nproc 8] [--out DIR] [key=value …]

Trains CONFIG (same seed, same batches) once for each variant into DIR/VARIANT, writes the table of
losses to DIR/quality.md and quality.json, and draws what each loss differs by from the exact one to
DIR/differences.png, and all curves into DIR with `megafrontier report`. A variant whose run is
complete is not run again, one that was stopped goes on; so a long comparison may be made in several
sittings. `exact-reordered` and `tensor` compute what `exact` does with their sums in another order:
what these differ by is chance. `tensor-int8` sends the activations of `tensor` in int8.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megafrontier.common.errors import UserError, exit_on_fatal_error
from megafrontier.config import load_config
from megafrontier.launch.main import train
from megafrontier.report.draw import write_report
from megafrontier.report.read import read_runs
from scripts.benchmarks.wire_quality.report import BASE, draw, figures, table

TOPO, HPZ, DDP = (f"partition.strategy={name}" for name in ("topo", "hpz", "ddp"))
TENSOR, PIPELINE = "parallel.tensor=pair", "parallel.pipeline=node"
VARIANTS = {
    "exact": [TOPO, "partition.wires=exact"],
    "exact-reordered": [DDP, "partition.wires=exact"],
    "zero++": [HPZ, "partition.wires=zero++"],
    "low": [TOPO, "partition.wires=low"],
    "low-unrotated": [TOPO, "partition.wires={preset: low, rotation: false}"],
    "low-forgetful": [TOPO, "partition.wires=low", "partition.error_feedback=false"],
    "tensor": [TENSOR, TOPO],
    "tensor-int8": [TENSOR, TOPO, "partition.wires.activations.pair=int8"],
    "pipeline": [PIPELINE, TOPO],
    "pipeline-int8": [PIPELINE, TOPO, "partition.wires.activations={node: int8, world: int8}"],
}


def is_complete(directory: Path, steps: int) -> bool:
    """Whether the run in `directory` has been evaluated after its last step."""
    path = directory / "metrics.jsonl"
    if not path.is_file() or not path.stat().st_size:
        return False
    (run,) = read_runs([directory])
    return any(step >= steps for step, _ in run.evaluations)


def run_variant(
    name: str, config_path: str, overrides: Sequence[str], out: Path, nproc: int
) -> Path:
    """Train a variant with these overrides to its end, unless it has been. Returns its run
    directory."""
    directory = out / name
    chosen = [*overrides, f"run.name={name}", f"run.directory={directory}"]
    config = load_config(config_path, chosen)
    if config.evaluate.batches == 0:
        raise UserError("evaluate.batches: 0, need at least 1 to compare validation losses")
    if (directory / "config.yaml").is_file() and load_config(directory / "config.yaml") != config:
        raise UserError(f"{directory}: has a training with other settings; need another --out")
    if not is_complete(directory, config.train.steps):
        code = train(config, nproc)
        if code:
            raise SystemExit(code)
    return directory


def compare(names: list[str], config: str, overrides: list[str], out: Path, nproc: int) -> None:
    """Run the variants; write the table, the figures and the pictures."""
    unknown = set(names) - set(VARIANTS)
    if unknown or BASE not in names:
        said = ",".join(names)
        raise UserError(f"--variants: {said}, need {BASE}, and others of {', '.join(VARIANTS)}")
    directories = [
        run_variant(name, config, [*overrides, *VARIANTS[name]], out, nproc) for name in names
    ]
    runs = dict(zip(names, read_runs(directories), strict=True))
    found = figures(runs)
    text = table(found)
    print(text)
    (out / "quality.md").write_text(text + "\n")
    (out / "quality.json").write_text(json.dumps(found, indent=1))
    if len(runs) > 1:
        draw(runs, out / "differences.png")
    write_report(directories, out)


def main() -> None:
    """Read the command and make the comparison."""
    parser = argparse.ArgumentParser(prog="wire_quality", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/wire-quality"))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    arguments = parser.parse_intermixed_args()
    with exit_on_fatal_error("wire_quality"):
        compare(
            arguments.variants.split(","),
            arguments.config, arguments.overrides, arguments.out, arguments.nproc,
        )  # fmt: skip


if __name__ == "__main__":
    main()
