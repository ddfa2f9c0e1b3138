"""Whether each feature runs on this device, with the losses of a host.

    python -m scripts.benchmarks.silicon.equal OUT [--features window sinks …] [--workers 4]

A small model trains 5 steps for each feature, on the device in fp32 and in bf16, and on the host in
fp32, each time in a process of its own. OUT/table.md has the largest relative gaps of losses and
gradient norms to the host's. The exit code is 1 if one is above its bound or has no figures.
Without a device, the host is compared with itself.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from megafrontier.config import Config, load_config
from megafrontier.launch.context import join_machine
from megafrontier.planner.auto import choose_layout
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.loop import run
from megafrontier.training.step import StepResult
from megafrontier.training.trainer import Trainer, build_trainer
from scripts.benchmarks.one_device.setting import tokenizer_of, write_corpus
from scripts.benchmarks.shared.measuring import at_least, make_parser
from scripts.benchmarks.shared.tables import markdown

PRELOADED = ["megafrontier.planner.auto", "megafrontier.training.trainer"]
"""What all processes need, imported once."""
WITHOUT_DEVICE = dict.fromkeys(
    ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), ""
)
SECONDS = 120.0
"""Of a process. One that takes longer hangs."""
CONFIG = """
run: {{name: equal, directory: {out}/run, seed: 7}}
model: {{layers: 2, hidden: 256, heads: 4, kv_heads: 2, sequence_length: 256, vocab_size: 2048,
        norm: rmsnorm, activation: swiglu, position: rotary, bias: false}}
tokenizer: {tokenizer}
data: {{train: [{{path: {corpus}}}], split: [1, 0]}}
train: {{steps: 5, global_batch: 8, micro_batch: 4, precision: fp32}}
optimizer: {{lr: 1.0e-3}}
schedule: {{name: constant}}
machine: laptop
checkpoint: {{every: 0, minutes: 0}}
evaluate: {{batches: 0}}
"""
HOST, EXACT, MIXED = "host", "fp32", "bf16"
BOUNDS = {EXACT: (1e-4, 1e-3), MIXED: (1e-2, 0.1)}
"""Of a loss and of a gradient norm, by the precision on the device. bf16 has 8 significant bits."""


@dataclass(frozen=True)
class Feature:
    """Overrides of the small config."""

    computes: tuple[str, ...] = ()
    """What also the host does."""
    runs: tuple[str, ...] = ()
    """What changes only how the device does it."""
    places: tuple[str, ...] = (EXACT, MIXED)

    def overrides(self, place: str) -> tuple[str, ...]:
        precision = f"train.precision={MIXED if place == MIXED else EXACT}"
        return (*self.computes, *(self.runs if place != HOST else ()), precision)


MIXTURE = ("model.moe={experts: 4, active: 2, ffn_hidden: 128}",)
DOCUMENTS, WINDOW = "data.document_mask=true", "model.attention.window=64"
COMPILED, LATE = "train.compile=true", "partition.overlap_update=true"
FEATURES = {
    "plain": Feature(),
    "window": Feature((WINDOW,)),
    "sinks": Feature(("model.attention.sinks=true",)),
    "softcap": Feature(("model.attention.softcap=20", "model.logit_softcap=30")),
    "documents": Feature((DOCUMENTS,)),
    "documents, window, sinks": Feature((DOCUMENTS, WINDOW, "model.attention.sinks=true")),
    "latent": Feature((
        "model.kv_heads=null",
        "model.attention.latent={key_value: 64, rope_size: 32, nope_size: 32, value_size: 64}",
    )),
    "delta": Feature((
        "model.attention.pattern=[delta, full]",
        "model.attention.delta={key_heads: 2, value_heads: 4, key_size: 64, value_size: 64}",
    )),
    "mixture": Feature(MIXTURE),
    "prediction": Feature(("model.prediction={}",)),
    "Muon": Feature(("optimizer.name=muon",)),
    "QK-clip": Feature(("optimizer.qk_clip=5",)),
    "fp8": Feature(runs=("train.linear_precision=fp8",), places=(MIXED,)),
    "offload": Feature(runs=("partition.offload.optimizer=cpu",)),
    "update under the forward": Feature(runs=(LATE,)),
    "checkpointing auto": Feature(
        runs=("train.activation_checkpointing=auto", "train.memory_gib=0.2")
    ),
    "checkpointing offload": Feature(runs=("train.activation_checkpointing=offload",)),
    "compiled": Feature(runs=(COMPILED,)),
    "compiled mixture": Feature(MIXTURE, (COMPILED,)),
    "compiled, update under the forward": Feature(runs=(COMPILED, LATE)),
    "compiled, CUDA graphs": Feature(runs=(COMPILED, "train.cuda_graphs=true")),
    "compiled, fp8": Feature(runs=(COMPILED, "train.linear_precision=fp8"), places=(MIXED,)),
}  # fmt: skip


class Recorder(Callback):
    """Keeps loss and gradient norm of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.steps.append((result.loss, result.grad_norm))


def train(config: Config) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    chosen, _ = choose_layout(config, 1)
    recorder = Recorder()
    with (
        join_machine(chosen) as (plan, mesh),
        closing(build_trainer(chosen, plan, mesh)) as trainer,
    ):
        run(trainer, [recorder])
    return recorder.steps


def answer(pipe: Connection, path: Path, feature: str, place: str) -> None:
    """Train in this process and send the steps, or why there are none."""
    if place == HOST:
        os.environ.update(WITHOUT_DEVICE)
    try:
        pipe.send(train(load_config(path, FEATURES[feature].overrides(place))))
    except Exception as error:  # is the answer
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])


def ask(path: Path, feature: str, place: str) -> list[tuple[float, float]] | str:
    """What a process of its own answers."""
    context = multiprocessing.get_context("forkserver")
    mine, other = context.Pipe()
    process = context.Process(target=answer, args=(other, path, feature, place))
    process.start()
    other.close()
    try:
        found = mine.recv() if mine.poll(SECONDS) else f"no answer within {SECONDS:.0f} s"
    except EOFError:
        process.join()
        found = f"the process ended with exit code {process.exitcode}"
    process.kill()
    return found


def gaps(
    found: Sequence[tuple[float, float]], host: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """The largest relative gap of a loss, and of a gradient norm."""
    loss, norm = (
        max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(found, host, strict=True)) for i in (0, 1)
    )
    return loss, norm


def judge_gap(found: object, host: object, place: str) -> tuple[bool, str]:
    """Whether a place agrees with the host, and its cell in the table."""
    if isinstance(host, str) or isinstance(found, str):
        return False, f"host: {host}" if isinstance(host, str) else str(found)
    mine = gaps(found, host)  # type: ignore[arg-type]
    is_good = all(gap <= bound for gap, bound in zip(mine, BOUNDS[place], strict=True))
    return is_good, f"{mine[0]:.1e}, {mine[1]:.1e}{'' if is_good else ': above the bound'}"


def compare(path: Path, names: Iterable[str], workers: int) -> tuple[bool, str]:
    """Whether all features agree with the host, and the table."""
    asked = [(name, place) for name in names for place in (HOST, *FEATURES[name].places)]
    with ThreadPoolExecutor(workers) as pool:
        futures: dict[tuple[str, str], Future] = {
            each: pool.submit(ask, path, *each) for each in asked
        }
    rows, is_good = [], True
    for name in dict.fromkeys(name for name, _ in asked):
        cells = [name]
        for place in (EXACT, MIXED):
            future = futures.get((name, place))
            if future is None:
                cells.append("")
                continue
            is_equal, cell = judge_gap(future.result(), futures[name, HOST].result(), place)
            is_good &= is_equal
            cells.append(cell)
        rows.append(cells)
    head = ["feature", *(f"{place}: loss, gradient norm" for place in (EXACT, MIXED))]
    return is_good, markdown(head, rows)


def write_config(out: Path) -> Path:
    """The small config and its corpus."""
    out.mkdir(parents=True, exist_ok=True)
    corpus = (out / "corpus").resolve()
    write_corpus(corpus, 2048)
    path = out / "config.yaml"
    path.write_text(
        CONFIG.format(out=out.resolve(), corpus=corpus, tokenizer=tokenizer_of(str(corpus)))
    )
    return path


def main() -> None:
    """Compare, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=[*FEATURES])
    parser.add_argument("--workers", type=at_least(1), default=4, help="processes side by side")
    arguments = parser.parse_args()
    # The parent of all must not use a device, or its children could not.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    multiprocessing.set_forkserver_preload(PRELOADED)
    is_good, table = compare(write_config(arguments.out), arguments.features, arguments.workers)
    (arguments.out / "table.md").write_text(table + "\n")
    print(table)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
