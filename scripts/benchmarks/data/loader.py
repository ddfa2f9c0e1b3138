"""How fast one core reads training samples, and how long a training step waits for them.

    python -m scripts.benchmarks.data.loader OUT [--megabytes 256] [--rounds 5]

Reading: batches of shuffled windows of a corpus of random ids in documents of 1 to 2,000 tokens, by
one thread, with and without the document mask, at several sequence lengths; tokens a second of one
core, from a file that the system has in memory after the first round. Waiting: the share of a real
training step of a small model (the script's 10M preset) that is spent in `Loader.step`, the next
step being read meanwhile.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megafrontier.config import CorpusConfig, DataConfig
from megafrontier.data.sampling.samples import open_samples
from megafrontier.launch.context import join_machine
from megafrontier.training.loop import train_step
from megafrontier.training.trainer import build_trainer
from scripts.benchmarks.one_device.ours import our_config
from scripts.benchmarks.one_device.setting import PRESETS, Setting, write_documents
from scripts.benchmarks.shared.child import Span
from scripts.benchmarks.shared.measuring import at_least
from scripts.benchmarks.shared.rounds import (
    Results,
    Task,
    add_options,
    markdown,
    measure,
    middle_of,
    spread,
)

MODULE = "scripts.benchmarks.data.loader"

LENGTHS = (128, 512, 2048, 8192)
BATCH_TOKENS = 1 << 14
VOCAB_SIZE = 50_000
READING, WAITING = "reading", "waiting in a training step"


def write_corpus(prefix: Path, megabytes: float) -> None:
    """Random ids of two bytes, so many MB, in documents of 1 to 2,000 tokens, if not there yet."""
    random = np.random.default_rng(0)

    def documents() -> Iterator[tuple[NDArray, NDArray]]:
        tokens = 0
        while tokens < megabytes * 5e5:
            sizes = random.integers(1, 2000, 1000)
            tokens += int(sizes.sum())
            yield random.integers(0, PRESETS["10M"].vocab_size, int(sizes.sum())), sizes

    write_documents(prefix, PRESETS["10M"].vocab_size, documents())


def reading(corpus: str, length: int, mask: bool, seconds: float) -> dict[str, float]:
    """Batches of 16 Ki tokens, one after the other, in this thread."""
    torch.set_num_threads(1)
    data = DataConfig(train=[CorpusConfig(path=corpus)], split=[1.0, 0.0], document_mask=mask)
    samples = open_samples(data, length, 1234, VOCAB_SIZE, "train", int)
    assert samples is not None
    rows = BATCH_TOKENS // length
    samples.batch(0, rows)
    count, begin = 0, time.perf_counter()
    with Span() as span:
        while time.perf_counter() - begin < seconds:
            count += 1
            samples.batch(count * rows, rows)
    tokens = count * BATCH_TOKENS
    return {
        "tokens_per_second": tokens / span.seconds,
        "tokens_per_cpu_second": tokens / span.cpu_seconds,
    }


def waiting(setting: dict[str, Any], mask: bool) -> dict[str, float]:
    """Real steps, after a few that are not timed; the loader's time in each."""
    chosen_setting = Setting(**setting)
    config = our_config(chosen_setting, compiled=False)
    config.data.document_mask = mask
    with join_machine(config) as (plan, mesh):
        trainer = build_trainer(config, plan, mesh)
        waited = _timed_steps(trainer.loader)
        for _ in range(chosen_setting.warm_up):
            train_step(trainer)
        waited.clear()
        with Span() as span:
            for _ in range(chosen_setting.steps):
                train_step(trainer)
        trainer.close()
    steps = chosen_setting.steps
    return {"step_seconds": span.seconds / steps, "waited_seconds": sum(waited) / steps}


def _timed_steps(loader: Any) -> list[float]:
    """Make the loader note how long each of its `step` calls takes."""
    waited: list[float] = []
    step = loader.step

    def timed(number: int) -> Any:
        begin = time.perf_counter()
        try:
            return step(number)
        finally:
            waited.append(time.perf_counter() - begin)

    loader.step = timed
    return waited


def table(results: Results) -> str:
    """Both tables, as far as they are measured."""
    parts = []
    if READING in results.groups():
        head = ["", "million tokens/s", "million tokens/CPU second"]
        rows = [
            [name, *(_millions(results, name, f"tokens_per_{per}") for per in _PER)]
            for name in results.variants(READING)
        ]
        parts.append(f"## {READING}\n\n{markdown(head, rows)}")
    if WAITING in results.groups():
        head = ["", "step s", "waited ms", "share"]
        rows = [_waiting_row(results, name) for name in results.variants(WAITING)]
        parts.append(f"## {WAITING}\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


_PER = ("second", "cpu_second")


def _millions(results: Results, name: str, figure: str) -> str:
    return spread([value / 1e6 for value in results.values(READING, name, figure)], ".1f")


def _waiting_row(results: Results, name: str) -> list[str]:
    seconds = results.values(WAITING, name, "step_seconds")
    waited = results.values(WAITING, name, "waited_seconds")
    shares = [part / whole for part, whole in zip(waited, seconds, strict=True)]
    skipped = results.skipped(WAITING, name)
    waited_ms = spread([1e3 * value for value in waited], ".2f")
    return [name, skipped or middle_of(seconds, ".3f"), waited_ms, spread(shares, ".3%")]


def tasks_of(corpus: str, arguments: argparse.Namespace) -> list[Task]:
    """Each length with and without the mask; then real steps."""
    tasks = []
    for length in LENGTHS:
        for mask in (False, True):
            name = f"{length:,} tokens{', document mask' if mask else ''}"
            options = {"length": length, "mask": mask, "seconds": arguments.seconds}
            tasks.append(
                Task(
                    READING,
                    name,
                    f"{MODULE}:reading",
                    {"corpus": corpus, **options},
                )
            )
    preset = PRESETS["10M"]
    setting = Setting("10M", "fp32", preset.batch, preset.sequence_length, 2, 10, corpus)
    for mask in (False, True):
        name = f"10M, {setting.batch} × {setting.sequence_length} tokens"
        name += ", document mask" if mask else ""
        options = {"setting": vars(setting), "mask": mask}
        tasks.append(Task(WAITING, name, f"{MODULE}:waiting", options))
    return tasks


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--megabytes", type=at_least(0.1, float), default=256.0, help="of the corpus"
    )
    parser.add_argument(
        "--seconds", type=at_least(0.01, float), default=3.0, help="of reading in a turn"
    )
    arguments = parser.parse_args()
    corpus = (arguments.out / f"corpus-{arguments.megabytes:g}").resolve()
    write_corpus(corpus, arguments.megabytes)
    measure(tasks_of(str(corpus), arguments), arguments, table)


if __name__ == "__main__":
    main()
