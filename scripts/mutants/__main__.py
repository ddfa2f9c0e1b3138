"""Break the library's source in many places, one at a time, and see which certificates notice.

    python -m scripts.mutants --out mutants.jsonl [--count 240] [--seed 1] [--jobs 2]
    python -m scripts.mutants --report mutants.jsonl

A mutant that is in the file already is not tried again. Survivors run the certificates that they
have not run yet, or with `--again` all. The lines that each certificate executes, and its seconds,
are measured first and kept in OUT.map.json.
"""

import argparse
import compileall
import hashlib
import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from scripts.mutants.by_hand import hand_mutants
from scripts.mutants.choose import Mutant, choose, files_of
from scripts.mutants.report import Line, kind_of, read_equivalent, read_lines, report
from scripts.mutants.trials import Measured, Trial, measure, run, trial_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megafrontier"
CONFIGS = Path(__file__).with_name("configs")
ORDER = ("windows", "pipeline", "dense", "mixture", "low", "long", "muon", "latent")
"""Of the configs: those that differ most come first."""
_IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed", "torch.utils.checkpoint", "numpy", "yaml",
    "torch.utils.flop_counter", "omegaconf", "safetensors.torch", "torch.nn.attention",
)  # fmt: skip


def certify(config: Path) -> list[str]:
    """The first broken promise of a config's certificate. Call it in a process of its own."""
    from megafrontier.certify.command import certify as certify_config
    from megafrontier.config import load_config

    ranks = int(config.read_text().partition("ranks:")[2].split()[0])
    found = certify_config(load_config(config, ()), ranks, until_broken=True)
    return [f"{broken.promise}: {broken.figure} {broken.where}"[:300] for broken in found.broken]


def main() -> int:
    """Try the mutants that are missing in the file, or print what the file says."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--out", type=Path, help="a line of JSON for each mutant")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print a file as Markdown")
    parser.add_argument("--count", type=int, default=240, help="besides those by hand")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most", type=int, help="certificates for each mutant")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--only", default="", help="keys of mutants, separated by commas")
    args = parser.parse_args()
    if args.report:
        print(report(args.report))
        return 0
    if not args.out:
        parser.error("need --out or --report")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # after what runs has been ended
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    assert "megafrontier" not in sys.modules
    compileall.compile_dir(PACKAGE, quiet=2)  # once for all copies
    return _try(args)


def _try(args: argparse.Namespace) -> int:
    configs = [CONFIGS / f"{name}.yaml" for name in ORDER]
    measured = _measured(args.out.with_suffix(".map.json"), configs, args.jobs)
    trials = _trials(args, measured, read_lines(args.out), _chosen(args, measured))
    print(f"{len(trials)} to try", flush=True)
    limits = {config: of.limit for config, of in measured.items()}
    results = run(iter(trials), certify, limits, args.jobs)
    with args.out.open("a") as out, closing(results):
        for trial, end, seconds in results:
            mutant = trial.mutant
            line = {"key": mutant.key, "operator": mutant.operator, "file": mutant.file}
            line |= {"line": mutant.line, "end": end, "ran": trial.ran}
            line |= {"seconds": round(seconds, 1), "mirrors": mutant.mirrors, "diff": mutant.diff}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            about = f"{mutant.key} {mutant.file}:{mutant.line} {mutant.operator}"
            print(f"{about}: {end[:90] or kind_of(line)}", flush=True)
    return 0


def _chosen(args: argparse.Namespace, measured: Mapping[Path, Measured]) -> list[Mutant]:
    """The mutants by hand and those of the seed, in a random order."""
    executed = {
        file: set[int]().union(*(of.lines.get(file, set()) for of in measured.values()))
        for file in files_of(PACKAGE)
    }
    mutants = [*hand_mutants(PACKAGE), *choose(PACKAGE, executed, args.count, args.seed)]
    mutants = list({mutant.key: mutant for mutant in mutants}.values())
    random.Random(args.seed).shuffle(mutants)
    return mutants


def _trials(
    args: argparse.Namespace,
    measured: Mapping[Path, Measured],
    done: Mapping[str, Line],
    mutants: Sequence[Mutant],
) -> list[Trial]:
    """What is left to try, `done` being what the file has. Equivalent mutants run nothing."""
    trials, known, only = [], read_equivalent(), args.only.split(",")
    for mutant in mutants:
        line = done.get(mutant.key)
        if (line is not None and line["end"]) or (args.only and mutant.key not in only):
            continue
        ran = [] if line is None or args.again else line["ran"]
        trial = trial_of(PACKAGE, mutant, measured, args.most, ran)
        if mutant.key in known:
            trial.configs.clear()
        if trial.configs or line is None:
            trials.append(trial)
    return trials


def _measured(path: Path, configs: list[Path], jobs: int) -> dict[Path, Measured]:
    """What `measure` has measured of this source and each config, from the file or anew."""
    source = hashlib.sha256(b"".join((PACKAGE / name).read_bytes() for name in files_of(PACKAGE)))

    def state(config: Path) -> str:
        whole = source.copy()
        whole.update(config.read_bytes())
        return whole.hexdigest()

    kept = json.loads(path.read_text()) if path.exists() else {}
    missing = [c for c in configs if kept.get(c.stem, {}).get("state") != state(c)]
    for config, of in measure(PACKAGE, missing, certify, jobs).items():
        lines = {file: sorted(lines) for file, lines in of.lines.items()}
        kept[config.stem] = {"state": state(config), "seconds": of.seconds, "lines": lines}
        path.write_text(json.dumps(kept))
    return {
        config: Measured(of["seconds"], {file: {*lines} for file, lines in of["lines"].items()})
        for config in configs
        if (of := kept.get(config.stem))
    }


if __name__ == "__main__":
    sys.exit(main())
