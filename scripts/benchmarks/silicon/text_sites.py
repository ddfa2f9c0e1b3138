"""The loss of two sites beside one with more than 100M parameters, on one device, from text.

    python -m scripts.benchmarks.silicon.text_sites OUT [--megabytes 32] [--every 30 100]
        [key=value …]

The text is the source of the installed Python, as in the quickstart. All sites share the device.
Trains with AdamW, and with Muon for the matrices of blocks: `python -m scripts.benchmarks.sites`.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

from scripts.benchmarks.shared.measuring import ROOT, at_least, make_parser

LEFT_OUT = {"site-packages", "test", "tests", "lib2to3", "idlelib"}
VOCABULARY = 2048
KEYS = (
    "machine=laptop", "model.layers=14", "model.hidden=768", "model.heads=12",
    "model.kv_heads=null", "model.sequence_length=512", "train.precision=bf16",
    "train.compile=true", "train.steps=300", "train.global_batch=64", "train.micro_batch=16",
    "optimizer.lr=1e-3", "schedule.min_lr=1e-5", "evaluate.every=300", "evaluate.batches=4",
    "checkpoint.every=0", "checkpoint.minutes=0", "preflight.enabled=false",
)  # fmt: skip
OPTIMIZERS = {
    "adamw": (),
    "muon": ("optimizer.groups=[{match: 'matrix:blocks.*', name: muon, lr: 0.01}]",),
}


def write_corpus(folder: Path, megabytes: float) -> list[str]:
    """Train a tokenizer and prepare a corpus of so much text, if they are not there. Returns the
    keys that name them."""
    tokenizer, corpus = folder / "tokenizer", folder / "corpus"
    if not Path(f"{corpus}.idx").is_file():
        texts, left = [], megabytes * 1e6
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            if not LEFT_OUT & set(path.parts) and left > 0:
                texts.append(str(path))
                left -= path.stat().st_size
        words = ["--vocab-size", str(VOCABULARY), "--skip-bad", "--out", str(tokenizer)]
        command("megafrontier", "tokenizer", *texts, *words)
        words = ["--tokenizer", str(tokenizer), "--append-eod", "--skip-bad", "--out", str(corpus)]
        command("megafrontier", "prepare", *texts, *words)
    return [f"tokenizer={tokenizer}", f"data.train=[{{path: {corpus}}}]"]


def command(module: str, *words: str) -> None:
    """Run a module. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=True)


def main() -> None:
    """Prepare, train, and print what `sites` prints."""
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--megabytes", type=at_least(0.1, float), default=32.0)
    parser.add_argument("--every", type=at_least(1), nargs="+", default=[30, 100])
    arguments = parser.parse_intermixed_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    keys = [*KEYS, *write_corpus(out, arguments.megabytes), *arguments.overrides]
    every = [str(steps) for steps in arguments.every]
    options = ["--sites", "2", "--every", *every, "--lr", "1", "--momentum", "0"]
    for name, more in OPTIMIZERS.items():
        print(f"{name}:", flush=True)
        words = ["configs/quickstart.yaml", *keys, *more, *options, "--out", str(out / name)]
        command("scripts.benchmarks.sites", *words)


if __name__ == "__main__":
    main()
