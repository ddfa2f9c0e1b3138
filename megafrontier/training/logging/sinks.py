"""Where a run's metrics go: metrics.jsonl always, W&B, TensorBoard and MLflow on request.

Only the first rank opens sinks. One `write` is one optimizer step, or one evaluation.
"""

import json
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megafrontier.common.errors import UserError, print_error
from megafrontier.common.files import write_atomically
from megafrontier.common.signals import block_stop_requests
from megafrontier.config import Config, LogConfig, config_to_dict, load_config

LAST_STEP = 2**40
"""As the step of a checkpoint: all that a run has written is kept."""
FINISH_SECONDS = 120.0
"""How long W&B may take to send the rest at the end. Its files stay, for `wandb sync`."""


class JsonLines:
    """One JSON object a line, which other processes can read as soon as `write` returns."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open `path` to append, after moving lines of steps after `resume_step` to
        metrics.superseded.jsonl.

        Those steps ran after the checkpoint and run again, perhaps differently. A last line that a
        kill cut short is dropped.
        """
        if path.exists():
            _keep_lines(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """Append one line and flush it. NaN and infinity, which JSON lacks, become null."""
        finite = json.loads(json.dumps(values), parse_constant=lambda _name: None)
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush the lines so far to the disk, so that a checkpoint that follows has them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _keep_lines(path: Path, resume_step: int) -> None:
    """Move the lines of steps after `resume_step` out of `path`."""
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
    write_atomically(path, "".join(kept))


def _is_due(line: str, resume_step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= resume_step)
    except (ValueError, KeyError, TypeError):
        return False


class WandbSink:
    """A Weights & Biases run. Nested metrics are named as paths, `comm/pair/bytes`."""

    name = "wandb"

    def __init__(self, config: Config, directory: Path, resume_step: int) -> None:
        """offline writes files below `directory`/wandb and uses no network.

        If W&B cannot be reached online, the run goes on offline. A resumed run keeps its W&B id.
        Raises UserError if W&B refuses.
        """
        mode = config.log.wandb
        if mode == "offline":  # read on import: W&B's crash reports need the network
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # Do not let W&B record the machine, its load, the code and git.
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
        entity, _, project = config.log.wandb_project.rpartition("/")
        start = partial(
            wandb.init,
            entity=entity or None,
            project=project,
            name=config.run.name,
            id=_kept_id(directory / "wandb" / "id", resume_step, lambda: uuid.uuid4().hex[:12]),
            dir=str(directory),
            config=config_to_dict(config),
            settings=settings,
        )
        with block_stop_requests():  # W&B starts a process, which must not end before this one
            try:
                self._run: Any = start(mode=mode, resume="allow" if mode == "online" else None)
            except wandb.Error as error:
                # AuthenticationError is a CommError, too, but then W&B has been reached.
                is_unreachable = isinstance(error, wandb.errors.CommError)
                if not is_unreachable or isinstance(error, wandb.errors.AuthenticationError):
                    raise UserError(f"log.wandb: {mode}, wandb does not start: {error}") from error
                print_error(f"warning: log.wandb: {error}; offline, to be sent by `wandb sync`")
                self._run = start(mode="offline")
        # W&B drops metrics below its newest step, and it may have seen steps after the checkpoint.
        # So we leave its own counter alone, and charts show our `step`.
        self._run.define_metric("*", step_metric="step")

    def write(self, values: dict[str, Any]) -> None:
        """Log the numbers of one step."""
        self._run.log({"step": values["step"], **_flat_numbers(values)})

    def close(self) -> None:
        """Finish the run: complete its file, or online upload the rest."""
        self._run.finish()


def _kept_id(path: Path, resume_step: int, make: Callable[[], str]) -> str:
    """The service's id of the resumed run, or a new one, kept in a file."""
    if resume_step > 0 and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = make()
    write_atomically(path, new + "\n")
    return new


class TensorboardSink:
    """TensorBoard events in `directory`/tensorboard. Nested metrics become `comm/pair/bytes`."""

    name = "tensorboard"

    def __init__(self, directory: Path, resume_step: int) -> None:
        """A resumed run appends, and forgets events after `resume_step`."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(directory / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=resume_step + 1, flush_secs=10)

    def write(self, values: dict[str, Any]) -> None:
        """Add a scalar for every number."""
        for name, number in _flat_numbers(values).items():
            self._writer.add_scalar(name, number, values["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class MlflowSink:
    """A run of an MLflow server, in the experiment `megafrontier`. Nested metrics become
    `comm/pair/bytes`."""

    name = "mlflow"

    def __init__(self, config: Config, directory: Path, resume_step: int) -> None:
        """A resumed run goes on as the same run of MLflow. Raises UserError if the server cannot
        be used."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._pending = Metric, deque[Any](maxlen=1)
        self._client: Any = MlflowClient(tracking_uri=config.log.mlflow)
        try:
            make = partial(self._make, config.run.name)
            self._id = _kept_id(directory / "mlflow" / "id", resume_step, make)
            if resume_step == 0:
                values = _flat(config_to_dict(config))
                params = [Param(key, str(value)[:500]) for key, value in values.items()]
                for first in range(0, len(params), 100):  # the most that a request may have
                    self._client.log_batch(self._id, params=params[first : first + 100])
        except Exception as error:  # of the network, of the server, or of mlflow
            line = f"log.mlflow: {config.log.mlflow}, mlflow does not start: {error}"
            raise UserError(line) from error

    def _make(self, name: str) -> str:
        found = self._client.get_experiment_by_name("megafrontier")
        place = found.experiment_id if found else self._client.create_experiment("megafrontier")
        return str(self._client.create_run(place, run_name=name).info.run_id)

    def write(self, values: dict[str, Any]) -> None:
        """Hand on the numbers of one step; a thread of mlflow sends them."""
        now, step = round(time.time() * 1000), values["step"]
        numbers = _flat_numbers(values).items()
        metrics = [
            self._metric(re.sub(r"[^\w\-. :/]", "_", name), float(number), now, step)
            for name, number in numbers
        ]
        self._pending.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def close(self) -> None:
        """Wait until all is sent, and end the run of MLflow."""
        for operation in self._pending:
            operation.wait()
        self._client.set_terminated(self._id)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as `model.layers`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _flat_numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """`{"comm": {"pair": {"bytes": 8}}}` as `{"comm/pair/bytes": 8}`, without what is no number."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and f"{prefix}{key}" != "step":
            flat[f"{prefix}{key}"] = value
    return flat


Sink = JsonLines | WandbSink | TensorboardSink | MlflowSink


def open_sinks(config: Config, directory: Path, resume_step: int) -> list[Sink]:
    """The sinks of `config.log`, in the run directory, continued after `resume_step` (0: new run).

    Raises UserError if W&B or MLflow does not start, OSError if the directory cannot be written.
    """
    sinks = [make() for make in _requested(config, directory, resume_step)]
    # The last one, because it drops lines for good.
    return [JsonLines(directory / "metrics.jsonl", resume_step), *sinks]


def _requested(config: Config, directory: Path, resume_step: int) -> list[Callable[[], Sink]]:
    """What opens each sink that was asked for."""
    log, found = config.log, list[Callable[[], Sink]]()
    if log.wandb != "disabled":
        found.append(partial(WandbSink, config, directory, resume_step))
    if log.tensorboard:
        found.append(partial(TensorboardSink, directory, resume_step))
    if log.mlflow:
        found.append(partial(MlflowSink, config, directory, resume_step))
    return found


def add_line(directory: Path, values: dict[str, Any], log: LogConfig) -> None:
    """Add one line to the metrics of a run in `directory`, which may be over, and to the sinks of
    `log`. A sink that fails costs its line: a warning says so."""
    # A run that is still going has this file open, so nothing is moved out of it.
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
    config = replace(load_config(directory / "config.yaml"), log=log)
    for make in _requested(config, directory, LAST_STEP):
        try:
            with closing(make()) as sink:
                sink.write(values)
        except Exception as error:  # of other packages, or because one is not installed here
            print_error(f"warning: step {values['step']} is not written: {error}")
