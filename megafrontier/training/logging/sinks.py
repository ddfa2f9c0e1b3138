"""Where a run's metrics go: metrics.jsonl always, Weights & Biases and TensorBoard when asked.

Only the first rank opens sinks. One `write` is one optimizer step, or one evaluation.
"""

import json
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from megafrontier.common.errors import UserError, as_fatal_error
from megafrontier.common.files import write_whole
from megafrontier.common.signals import stops_held_back
from megafrontier.config import Config, config_to_dict

FINISH_SECONDS = 120.0
"""How long W&B may take at the end to send what it has not: its files stay, for `wandb sync`."""


class Sink(Protocol):
    """A place that takes one dict of metrics a step; `values["step"]` is always there."""

    name: str

    def write(self, values: dict[str, Any]) -> None:
        """Keep the metrics of one step."""

    def close(self) -> None:
        """Flush and release what the sink holds."""


def open_sinks(
    config: Config,
    directory: Path,
    resume_step: int = 0,
    warn: Callable[[str], None] = lambda line: None,
) -> list[Sink]:
    """The sinks that `config.log` asks for, in the run directory, going on after `resume_step`.

    A fresh run has `resume_step` 0. `warn` hears of one that does less than asked for. Raises
    UserError when a package is missing or the directory cannot be written.
    """
    sinks: list[Sink] = []
    if config.log.wandb != "disabled":
        sinks.append(WandbSink(config, directory, config.log.wandb, resume_step, warn))
    if config.log.tensorboard:
        sinks.append(TensorboardSink(directory, resume_step))
    try:  # opened last, for it drops lines for good, and another may refuse
        return [JsonLines(directory / "metrics.jsonl", resume_step), *sinks]
    except Exception:
        for sink in sinks:
            sink.close()
        raise


class JsonLines:
    """One JSON object a line, each readable from outside as soon as `write` returns."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Open `path` to append; lines of steps after `resume_step` are dropped first.

        They stem from steps that ran after the last checkpoint and will run again, and are kept in
        metrics.superseded.jsonl beside it: some are of a line of training that was given up. None
        keeps them all. A last line that a kill cut short is dropped in either case.
        Raises UserError when the file cannot be written, StorageFailed where the storage fails.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _keep_lines(path, resume_step)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            line = f"{path}: cannot write metrics: {error.strerror}"
            raise as_fatal_error(error, line) from error

    def write(self, values: dict[str, Any]) -> None:
        """Append one line and flush it; NaN and infinity, which JSON lacks, become null."""
        self._file.write(json.dumps(_finite(values)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring the lines so far to the disk: a checkpoint that is there is to have them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbSink:
    """A Weights & Biases run; nested metrics are named as paths, `comm/pair/bytes`."""

    name = "wandb"

    def __init__(
        self,
        config: Config,
        directory: Path,
        mode: Literal["offline", "online"],
        resume_step: int = 0,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`mode` is offline (files below `directory`/wandb, no network) or online; where W&B cannot
        be reached, which is no reason not to train, offline after all.

        A resumed run keeps its W&B id. Raises UserError when wandb is missing or refuses.
        """
        if mode == "offline":  # W&B reads this on import; its crash reports need the network
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise UserError(missing_package("log.wandb", mode, "wandb")) from error
        # W&B would also record the machine, its load, the code and git: none of its business.
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            finish_timeout=FINISH_SECONDS,
        )

        def start(mode: Literal["offline", "online"]) -> Any:
            with stops_held_back():  # W&B starts a process, which has to last as long as we do
                return wandb.init(
                    project="megafrontier",
                    name=config.run.name,
                    id=_wandb_id(directory / "wandb" / "id", resume_step),
                    resume="allow" if mode == "online" else None,
                    dir=str(directory),
                    mode=mode,
                    config=config_to_dict(config),
                    settings=settings,
                )

        try:
            self._run = start(mode)
        except wandb.Error as error:
            # AuthenticationError is one, too, but an answer.
            is_away = isinstance(error, wandb.errors.CommError)
            if not is_away or isinstance(error, wandb.errors.AuthenticationError):
                raise UserError(f"log.wandb: {mode}, wandb does not start: {error}") from error
            warn(f"warning: log.wandb: {error}; kept in {directory / 'wandb'} for `wandb sync`")
            self._run = start("offline")
        # W&B drops what comes at a step below its newest; it has seen those after the checkpoint
        # that this run goes on from. So its own count goes on, and `step` is what charts show; an
        # evaluation of the checkpoint's own step may be the first to come.
        self._ahead = max(0, self._run.starting_step - resume_step)
        self._run.define_metric("*", step_metric="step")

    def write(self, values: dict[str, Any]) -> None:
        """Log the numbers of one step at that step."""
        step = values["step"]
        self._run.log({"step": step, **_flat_numbers(values)}, step=step + self._ahead)

    def close(self) -> None:
        """Finish the run: offline its file is whole, online everything is uploaded."""
        self._run.finish()


class TensorboardSink:
    """TensorBoard events in `directory`/tensorboard; nested metrics become `comm/pair/bytes`."""

    name = "tensorboard"

    def __init__(self, directory: Path, resume_step: int = 0) -> None:
        """On resume TensorBoard forgets the events after `resume_step`.

        Raises UserError when the tensorboard package is missing.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(missing_package("log.tensorboard", "true", "tensorboard")) from error
        folder = str(directory / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=resume_step + 1, flush_secs=10)

    def write(self, values: dict[str, Any]) -> None:
        """Add one scalar for every number."""
        for name, number in _flat_numbers(values).items():
            self._writer.add_scalar(name, number, values["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _keep_lines(path: Path, resume_step: int | None) -> None:
    """Take the lines after the step that a run goes on from out of `path`."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept: list[str] = []
    dropped: list[str] = []
    for line in lines:
        if line.endswith("\n"):
            (kept if _is_due(line, resume_step) else dropped).append(line)
    if kept == lines:
        return
    if dropped:
        with path.with_name(f"{path.stem}.superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(dropped)
    write_whole(path, "".join(kept))


def _is_due(line: str, resume_step: int | None) -> bool:
    try:
        return resume_step is None or json.loads(line)["step"] <= resume_step
    except (ValueError, KeyError, TypeError):
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat_numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """`{"comm": {"pair": {"bytes": 8}}}` as `{"comm/pair/bytes": 8}`; only numbers stay."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and f"{prefix}{key}" != "step":
            flat[f"{prefix}{key}"] = value
    return flat


def _wandb_id(path: Path, resume_step: int) -> str:
    """The id of the run that is resumed, or a new one, kept beside W&B's files."""
    if resume_step > 0 and path.is_file():
        kept = path.read_text(encoding="utf-8").strip()
        if kept:  # else cut short by a kill
            return kept
    path.parent.mkdir(parents=True, exist_ok=True)
    new = uuid.uuid4().hex[:12]
    path.write_text(new + "\n", encoding="utf-8")
    return new


def missing_package(key: str, value: str, package: str) -> str:
    """What to say of an optional package that `key` asks for."""
    return f"{key}: {value}, needs a package: pip install megafrontier[{package}]"
