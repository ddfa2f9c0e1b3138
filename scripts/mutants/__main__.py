"""Break the library's source in many places, one at a time, and see which certificates notice.

    python -m scripts.mutants --out mutants.jsonl [--count 240] [--seed 1] [--jobs 2]
    python -m scripts.mutants --report mutants.jsonl

A mutant that is in the file already is not tried again, except survivors with `--again`. The lines
that each certificate executes, and its seconds, are measured first and kept in OUT.map.json.
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
from contextlib import closing, suppress
from pathlib import Path

from scripts.mutants.by_hand import hand_mutants
from scripts.mutants.choose import choose, files_of
from scripts.mutants.report import kind_of, read_lines, report
from scripts.mutants.trials import Measured, measure, run, trial_of

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
    parser.add_argument("--only", default="", help="keys or configs, separated by commas")
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
    only = {*filter(None, args.only.split(","))}
    configs = [CONFIGS / f"{name}.yaml" for name in ORDER]
    configs = [c for c in configs if c.stem in only] or configs
    measured = _measured(args.out.with_suffix(".map.json"), configs, args.jobs)
    scope = {*files_of(PACKAGE)}
    executed = {name: set[int]() for name in sorted(scope)}
    for of in measured.values():
        for name in scope & of.lines.keys():
            executed[name] |= of.lines[name]
    mutants = [*hand_mutants(PACKAGE), *choose(PACKAGE, executed, args.count, args.seed)]
    mutants = list({mutant.key: mutant for mutant in mutants}.values())
    random.Random(args.seed).shuffle(mutants)
    done = read_lines(args.out)
    keys = {key for key, line in done.items() if not args.again or kind_of(line) != "survived"}
    wanted = [m for m in mutants if (m.key in only if only - {c.stem for c in configs} else True)]
    missing = [mutant for mutant in wanted if mutant.key not in keys]
    print(f"{len(mutants)} mutants, {len(missing)} to try", flush=True)
    trials = (trial_of(PACKAGE, mutant, measured, args.most) for mutant in missing)
    limits = {config: of.limit for config, of in measured.items()}
    with args.out.open("a") as out, closing(run(trials, certify, limits, args.jobs)) as results:
        for trial, end, seconds in results:
            mutant = trial.mutant
            line = {
                "key": mutant.key,
                "operator": mutant.operator,
                "file": mutant.file,
                "line": mutant.line,
                "end": end,
                "ran": trial.ran,
                "seconds": round(seconds, 1),
                "mirrors": mutant.mirrors,
                "diff": mutant.diff,
            }
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            what = end or "SURVIVED"
            print(
                f"{mutant.key} {mutant.file}:{mutant.line} {mutant.operator}: {what[:90]}",
                flush=True,
            )
    return 0


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
