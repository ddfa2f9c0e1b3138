"""Runs of miniatures on random tokens, each in a process group of its own, and what they left."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from megafrontier.certify.recorder import FOLDER, Part
from megafrontier.certify.shrink import LENGTH
from megafrontier.checkpoint.load import Checkpoint, open_checkpoint
from megafrontier.common.checkpoints import candidates, checkpoints_of, step_folder
from megafrontier.common.signals import die_with_parent
from megafrontier.config import Config, CorpusConfig
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter
from megafrontier.launch.local import flush_output
from megafrontier.launch.main import train

TOKENS = 6000
"""Of a corpus, for the steps of a run without reading a token twice."""
Tensors = dict[str, torch.Tensor]


class TrialFailed(Exception):
    """A run ended with an error, or did not end in time. The message is its last line."""


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended well."""

    directory: Path
    ranks: int

    @cached_property
    def steps(self) -> dict[int, dict[str, Any]]:
        """The metrics of each step."""
        return {line["step"]: line for line in self._metrics if "loss" in line}

    @cached_property
    def valid_losses(self) -> dict[int, dict[str, float]]:
        """By step, and by name of the loss."""
        return {
            line["step"]: {k: v for k, v in line.items() if k.startswith("valid_loss")}
            for line in self._metrics
            if "valid_loss" in line
        }

    @cached_property
    def _metrics(self) -> list[dict[str, Any]]:
        text = (self.directory / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def parts(self, step: int, kind: str) -> list[Part]:
        """All ranks' parts of the `gradients` or `weights` of a step."""
        return [part for found in self.records(step) for part in found[kind]]

    def records(self, step: int) -> list[dict[str, Any]]:
        """What each rank recorded of a step. Its files are read once."""
        if step not in self._records:
            folder = self.directory / FOLDER
            names = (f"{step}-{rank}.pt" for rank in range(self.ranks))
            self._records[step] = [torch.load(folder / n, weights_only=False) for n in names]
        return self._records[step]

    @cached_property
    def _records(self) -> dict[int, list[dict[str, Any]]]:
        return {}

    def checkpoint(self, step: int) -> Path:
        return step_folder(checkpoints_of(self.directory), step)

    @cached_property
    def final(self) -> dict[str, Tensors]:
        """The newest checkpoint: by state the global tensors by name."""
        newest = next(candidates(checkpoints_of(self.directory)))
        return whole_states(open_checkpoint(newest))


def whole_states(checkpoint: Checkpoint) -> dict[str, Tensors]:
    """By state the whole tensors of a small checkpoint."""
    stored: dict[str, list[str]] = {}
    for name, boxes in checkpoint.manifest.tensors.items():
        for state in boxes[0].unit.states:
            stored.setdefault(state, []).append(name)
    return {state: checkpoint.tensors(state, names) for state, names in stored.items()}


def run_training(config: Config, ranks: int, directory: Path, limit: float) -> TrainedRun:
    """Train a miniature. Raises TrialFailed, after `limit` seconds at the latest."""
    config = deepcopy(config)
    config.run.directory = str(directory)
    run_apart(lambda: train(config, ranks), directory.with_suffix(".log"), limit)
    return TrainedRun(directory, ranks)


def run_apart(body: Callable[[], int | None], log: Path, limit: float) -> None:
    """Run `body` in a forked process to its end. Arguments and errors as of `ForkedBody`."""
    ForkedBody(body, log).wait(limit)


class ForkedBody:
    """A function in a forked process, whose output goes to `log`. As a context manager, ends the
    process at the end of the body, also after an error."""

    def __init__(self, body: Callable[[], int | None], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        flush_output()
        self._log, self._has_ended = log, False
        parent, self._pid = os.getpid(), os.fork()
        if self._pid == 0:
            _run_and_exit(body, log, parent)

    def wait(self, limit: float) -> None:
        """Wait for its end. Raises TrialFailed if it does not end with 0 in `limit` seconds. It
        leaves nothing that it started."""
        deadline = time.monotonic() + limit
        done = status = 0
        try:
            while not done and time.monotonic() < deadline:
                time.sleep(0.01)
                done, status = os.waitpid(self._pid, os.WNOHANG)
        finally:
            self._end(is_reaped=bool(done))
        if not done:
            raise TrialFailed(f"no end after {limit:.0f} s")
        if os.waitstatus_to_exitcode(status) != 0:
            raise TrialFailed(_last_line(self._log))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._has_ended:
            self._end(is_reaped=False)

    def _end(self, is_reaped: bool) -> None:
        """Kill the process and all that it started. Waits for it unless it `is_reaped`."""
        self._has_ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not is_reaped:
            # It may not have made its own process group yet.
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _run_and_exit(body: Callable[[], int | None], log: Path, parent: int) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        os.environ["OMP_NUM_THREADS"] = "1"  # small products gain nothing from more
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        for number in (1, 2):  # of this process, and of what is not Python
            os.dup2(sys.stdout.fileno(), number)
        code = body() or 0
    except Exception:
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("megafrontier: ") if lines else "no output"


def write_corpora(config: Config) -> None:
    """Write the corpora that a miniature names."""
    for number, corpus in enumerate([*config.data.train, *config.data.valid]):
        _write(corpus, random_corpus(config, number))


def _write(corpus: CorpusConfig, found: tuple[NDArray, NDArray, NDArray]) -> None:
    tokens, sizes, mask = found
    ends, bad = np.ones(len(sizes), bool), np.zeros(len(sizes), bool)
    with CorpusWriter(corpus.path, np.dtype(np.uint16), has_mask=True) as writer:
        DocumentWriter(writer).write_chunks(tokens, sizes, ends, bad, mask)
        writer.publish()


def random_corpus(config: Config, number: int) -> tuple[NDArray, NDArray, NDArray]:
    """Of the `number`-th corpus: tokens, the sizes of documents, and which tokens are targets. A
    third of the documents is shorter than a quarter of a sequence, a third longer than one. With
    `data.packing` the others are longer than a half, so that many sequences end with padding."""
    random, vocabulary = np.random.default_rng(number), config.model.vocab_size
    shortest = LENGTH // 4 if config.data.packing == "none" else LENGTH // 2 + 2
    sizes: list[int] = []
    while sum(sizes) < TOKENS:
        sizes += [
            int(random.integers(1, LENGTH // 4)),
            int(random.integers(shortest, LENGTH)),
            int(random.integers(LENGTH, 3 * LENGTH)),
        ]
    total = sum(sizes)
    tokens = random.integers(0, vocabulary, total).astype(np.uint16)
    mask = (random.random(total) < 0.8).astype(np.uint8)
    return tokens, np.array(sizes, np.int32), mask
