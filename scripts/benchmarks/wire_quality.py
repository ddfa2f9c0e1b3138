"""What low-bit wires cost in loss: the same training with each preset, side by side.

    python scripts/benchmarks/wire_quality.py CONFIG [--nproc 8] [--out DIR] [key=value …]

Trains CONFIG (same seed, same batches) once for each variant into DIR/VARIANT, writes the table of
final validation losses to DIR/quality.md and quality.json, and draws all curves into DIR with
`megafrontier report`. A variant whose run is complete is not run again, one that was stopped goes
on; so a long comparison may be made in several sittings. `exact-reordered` computes what `exact`
does with its sums in another order: what these two differ by is chance.
"""

import argparse
import json
from pathlib import Path

from megafrontier.config import load_config
from megafrontier.errors import UserError, endings_told
from megafrontier.report import write_report
from megafrontier.training.launch import train

VARIANTS = {
    "exact": ["partition.strategy=topo", "partition.wires=exact"],
    "exact-reordered": ["partition.strategy=ddp", "partition.wires=exact"],
    "zero++": ["partition.strategy=hpz", "partition.wires=zero++"],
    "low": ["partition.strategy=topo", "partition.wires=low"],
    "low-unrotated": [
        "partition.strategy=topo",
        "partition.wires={preset: low, rotation: false}",
    ],
    "low-forgetful": [
        "partition.strategy=topo",
        "partition.wires=low",
        "partition.error_feedback=false",
    ],
}


def final_loss(run: Path) -> tuple[int, float] | None:
    """(step, validation loss) of the run's last evaluation, if it has one."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(line["step"], line["valid_loss"]) for line in lines if "valid_loss" in line]
    return found[-1] if found else None


def run_variant(name: str, config_path: str, overrides: list[str], out: Path, nproc: int) -> Path:
    """Train one variant to its end, unless it has been. Returns its run directory."""
    directory = out / name
    chosen = [*overrides, *VARIANTS[name], f"run.name={name}", f"run.directory={directory}"]
    config = load_config(config_path, chosen)
    if config.evaluate.batches == 0:
        raise UserError("evaluate.batches: 0, need at least 1 to compare validation losses")
    if (directory / "config.yaml").is_file() and load_config(directory / "config.yaml") != config:
        raise UserError(f"{directory}: has a training with other settings; need another --out")
    done = final_loss(directory)
    if done is None or done[0] < config.train.steps:
        code = train(config, nproc)
        if code:
            raise SystemExit(code)
    return directory


def table(losses: dict[str, tuple[int, float]]) -> str:
    """Markdown, each loss beside its distance from the exact one."""
    lines = ["| wires | steps | validation loss | against exact |", "|---|---|---|---|"]
    exact = losses["exact"][1]
    for name, (step, loss) in losses.items():
        lines.append(f"| {name} | {step} | {loss:.4f} | {loss / exact - 1:+.2%} |")
    return "\n".join(lines)


def compare(names: list[str], config: str, overrides: list[str], out: Path, nproc: int) -> None:
    """Run the variants and write the table."""
    unknown = set(names) - set(VARIANTS)
    if unknown or "exact" not in names:
        said = ",".join(names)
        raise UserError(f"--variants: {said}, need exact, and others of {', '.join(VARIANTS)}")
    runs = {name: run_variant(name, config, overrides, out, nproc) for name in names}
    losses = {name: found for name, run in runs.items() if (found := final_loss(run)) is not None}
    text = table(losses)
    print(text)
    (out / "quality.md").write_text(text + "\n")
    (out / "quality.json").write_text(json.dumps(losses, indent=1))
    write_report(list(runs.values()), out)


def main() -> None:
    """Read the command and make the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/wire-quality"))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    arguments = parser.parse_intermixed_args()
    with endings_told("wire_quality"):
        compare(
            arguments.variants.split(","),
            arguments.config, arguments.overrides, arguments.out, arguments.nproc,
        )  # fmt: skip


if __name__ == "__main__":
    main()
