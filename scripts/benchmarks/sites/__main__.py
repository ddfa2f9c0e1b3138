"""Train CONFIG at one site and at several, and compare validation losses and bytes between sites.

    python -m scripts.benchmarks.sites CONFIG [--sites 2] [--every 30 100] [--ranks 1] [--out DIR]
        [--lr 0.7 1] [--momentum 0.9 0.5] [--wire int4 topk]
        [key=value …]

All sites are jobs on this host. They share the global batch of CONFIG, so that every run sees the
same samples. A batch of validation is as large as a site's batch, so sites evaluate more batches of
them. Data parallelism would send fp32 gradients in each step: 4 bytes a parameter to each
other site. A complete run is not run again.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from megafrontier.common.errors import exit_on_fatal_error
from megafrontier.config import load_config
from megafrontier.model.flops import parameter_count
from megafrontier.report.read import read_runs
from scripts.benchmarks.shared.measuring import free_port, make_parser
from scripts.benchmarks.sites.job import Job, site_keys
from scripts.benchmarks.wire_quality.__main__ import is_complete


def train(config: str, ranks: int, jobs: Sequence[tuple[Path, list[str]]]) -> None:
    """Run a job for each folder and overrides, side by side. Raises SystemExit if one fails."""
    started = []
    for folder, overrides in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        words = [config, "--nproc", str(ranks), f"run.directory={folder}", *overrides]
        started.append(Job(words, folder / "output.txt"))
    codes = [job.wait() for job in started]
    if any(codes):
        raise SystemExit(f"{jobs[0][0].parent}: exit codes {codes}; see output.txt there")


def read(folder: Path, steps: int) -> dict[str, Any] | None:
    """The last validation loss, and the bytes that a rank sent to other sites; None if the run is
    not complete."""
    if not is_complete(folder, steps):
        return None
    (run,) = read_runs([folder])
    sent = sum(line["comm"].get("site", {}).get("bytes", 0) for line in run.steps)
    return {"loss": dict(run.evaluations)[steps], "bytes": sent}


def main() -> None:
    """Run what is missing, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--every", type=int, nargs="+", default=[30])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.7])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.9])
    parser.add_argument("--wire", nargs="+", default=["int4"])
    parser.add_argument("--ranks", type=int, default=1, help="of each job")
    parser.add_argument("--out", type=Path, default=Path("runs/sites"))
    options = parser.parse_args()
    with exit_on_fatal_error("sites"):
        config = load_config(options.config, options.overrides)
    steps, batch = config.train.steps, config.train.global_batch // options.sites
    one = options.out / "one"
    if read(one, steps) is None:
        train(options.config, options.ranks, [(one, options.overrides)])
    base = read(one, steps)
    assert base is not None
    full = 4 * parameter_count(config.model) * steps * (options.sites - 1)
    print(f"one site: validation loss {base['loss']:.4f}", flush=True)
    variants = product(options.every, options.lr, options.momentum, options.wire)
    for every, lr, momentum, wire in variants:
        folder = options.out / f"{options.sites}-every-{every}-lr-{lr}-momentum-{momentum}-{wire}"
        if read(folder / "0", steps) is None:
            folder.mkdir(parents=True, exist_ok=True)
            addresses = [f"127.0.0.1:{free_port()}" for _ in range(options.sites)]
            keys = f"every: {every}, wire: {wire}, deadline_seconds: 500"
            keys += f", optimizer: {{lr: {lr}, momentum: {momentum}}}"
            batches = config.evaluate.batches * options.sites
            common = [*options.overrides, f"train.global_batch={batch}"]
            common += [f"evaluate.batches={batches}"]
            jobs = [
                (folder / str(number), [*common, site_keys(addresses, folder, number, keys)])
                for number in range(options.sites)
            ]
            train(options.config, options.ranks, jobs)
        found = read(folder / "0", steps)
        assert found is not None
        change = 100 * (found["loss"] / base["loss"] - 1)
        saved = full / (found["bytes"] * options.ranks)
        print(
            f"{options.sites} sites, every {every}, outer lr {lr}, momentum {momentum}, {wire}: "
            f"validation loss {found['loss']:.4f} ({change:+.2f} %), "
            f"{saved:.0f} x fewer bytes than fp32 gradients",
            flush=True,
        )


if __name__ == "__main__":
    main()
