"""Jobs on the test cluster: submit the files of slurm/, watch a run, and hurt it."""

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megafrontier.launch.local import STORE_NAME
from megafrontier.parallel.fault_injection import VARIABLE
from tests import runs
from tests.slurm.cluster import FAST, ROOT, Cluster, wait_until

STEP_BYTES = 1.2e5
"""What a node sends in one step of the tiny model, about."""
STEPS = 24
OVERRIDES = (
    f"train.steps={STEPS}",
    "train.global_batch=4",
    "train.micro_batch=1",
    "checkpoint.every=4",
    "preflight.enabled=false",
)
CONFIGS = {1: "one.yaml", 2: "two.yaml"}
"""By ranks of a node."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
SRUN_WAIT_SECONDS = "15"
"""How long a rank that neither notices nor is told that another has died may take to end."""
PATIENCE_SECONDS = 300
ASKING_SECONDS = 1.0
"""Between two questions to Slurm, each of which is a handful of processes."""


@dataclass(frozen=True)
class Job:
    """A job of the test cluster."""

    cluster: Cluster
    number: str

    @property
    def fields(self) -> dict[str, str]:
        return self.cluster.show("job", self.number)

    @property
    def nodes(self) -> list[str]:
        """Where it runs, or ran last."""
        return self.cluster.run("scontrol", "show", "hostnames", self.fields["NodeList"]).split()

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.fields["Restarts"])

    @property
    def output(self) -> str:
        return Path(self.fields["StdOut"]).read_text()

    def ended(self) -> str:
        """Its last state, when it has come to that."""
        self.wait_until(lambda: self.state in ENDED, "its end", ASKING_SECONDS)
        return self.state

    def wait_until(self, ready, what: str, interval: float = 0.1) -> None:
        try:
            wait_until(ready, PATIENCE_SECONDS, f"job {self.number}: {what}", interval)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.fields}\n{self.output}") from None

    def wait_for_restart(self, count: int) -> None:
        self.wait_until(lambda: self.restarts >= count, f"restart {count}", ASKING_SECONDS)

    def set_time_limit(self, minutes: int) -> None:
        self.cluster.run("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def let_time_run_out(self, seconds: int) -> None:
        """Let so many be left of its time. Slurm looks every 30 s, and gives the signal up to 30 s
        early."""
        end = time.strftime("%FT%T", time.localtime(time.time() + seconds))
        self.cluster.run("scontrol", "update", f"JobId={self.number}", f"EndTime={end}")

    def signal(self, name: str) -> None:
        """As a user does: to all ranks, not to the batch script."""
        self.cluster.run("scancel", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.cluster.run("scancel", self.number)

    def ranks(self) -> dict[int, int]:
        """Process ids of its ranks that live, by rank. All nodes share this machine's. A rank is
        the child of its task, as the store of the first task is."""
        # Another cluster of this machine may have a job of the same number.
        wanted = {b"SLURM_JOB_ID": self.number, b"SLURM_CONF": str(self.cluster.config)}
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and (rank := _rank_of(folder, wanted)) is not None:
                found[int(folder.name)] = rank
        tasks = {_parent_of(process) for process in found}
        return {rank: process for process, rank in found.items() if process not in tasks}

    def node_of(self, rank: int) -> str:
        """Where the rank lives."""
        return _variables_of(Path(f"/proc/{self.ranks()[rank]}"))[b"SLURMD_NODENAME"].decode()

    def lose_node(self, node: str) -> None:
        """Pull its cable, and end its ranks, which would not notice for a while."""
        self.cluster.cut(node)
        for process in self.ranks().values():
            with suppress(OSError):
                if _variables_of(Path(f"/proc/{process}"))[b"SLURMD_NODENAME"] == node.encode():
                    os.kill(process, signal.SIGKILL)

    def kill_rank(self, rank: int) -> None:
        os.kill(self.ranks()[rank], signal.SIGKILL)

    def freeze_ranks(self) -> None:
        """Until they are told to go on, which Slurm does before it ends them."""
        for process in self.ranks().values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)


def _parent_of(process: int) -> int:
    with suppress(OSError):  # it has just ended
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _rank_of(folder: Path, wanted: dict[bytes, str]) -> int | None:
    """The rank of a process that trains in a step with these variables; None of any other."""
    try:
        if b"megafrontier\0train" not in (folder / "cmdline").read_bytes():
            return None
        if (folder / "comm").read_text().strip() == STORE_NAME:
            return None
        variables = _variables_of(folder)
    except OSError:  # it has just ended
        return None
    if any(variables.get(name) != value.encode() for name, value in wanted.items()):
        return None
    # srun and the batch script, which have the job's variables too, are in no step.
    return int(variables[b"SLURM_PROCID"]) if b"SLURM_STEP_ID" in variables else None


def _variables_of(folder: Path) -> dict[bytes, bytes]:
    words = (folder / "environ").read_bytes().split(b"\0")
    return dict(word.split(b"=", 1) for word in words if b"=" in word)


class Gate:
    """A file of the steps that a run may begin. `environment` is of the job that submits it."""

    def __init__(self, path: Path, steps: int = STEPS) -> None:
        self.path, self.opened = path, 0
        path.touch()
        waits = [
            {"at": "step", "step": step, "do": "wait", "path": str(path), "message": f"<{step}>"}
            for step in range(1, steps + 1)
        ]
        self.environment = {VARIABLE: json.dumps(waits)}

    def let_pass(self, step: int) -> None:
        """Let the run make all steps up to this one."""
        with self.path.open("a") as file:
            file.writelines(f"<{number}>" for number in range(self.opened + 1, step + 1))
        self.opened = max(self.opened, step)

    def pass_until(self, job: Job, ready: Callable[[], object], what: str, pace: float) -> None:
        """Let the run make a step every `pace` seconds until `ready` does not say no any more."""
        job.wait_until(lambda: ready() or self.let_pass(self.opened + 1), what, pace)


@dataclass(frozen=True)
class SubmittedRuns:
    """One run directory, and the jobs that train in it, with so many ranks on each node: each of
    them takes seconds of computing to import torch."""

    cluster: Cluster
    config: Path
    directory: Path
    ranks_per_node: int = 1

    def with_ranks(self, per_node: int) -> "SubmittedRuns":
        """The same with 1 or 2 on each node, and as many levels as that."""
        config = self.config.with_name(CONFIGS[per_node])
        return replace(self, config=config, ranks_per_node=per_node)

    def submit(
        self, *overrides: str, options: tuple[str, ...] = ("--nodes=2",), **environment: str
    ) -> Job:
        """`slurm/train.sbatch` as a user of a cluster like this one calls it."""
        tasks = f"--ntasks-per-node={self.ranks_per_node}"
        return self.call(
            "train.sbatch", tasks, "--time=20", *options, str(self.config),
            f"run.directory={self.directory}", *OVERRIDES, *overrides, **environment,
        )  # fmt: skip

    def call(self, file: str, *arguments: str, **environment: str) -> Job:
        """Submit a file of slurm/ on the login node."""
        environment |= {"MEGAFRONTIER_CLUSTER": "generic", "SLURM_WAIT": SRUN_WAIT_SECONDS}
        said = self.cluster.run(str(ROOT / "slurm" / file), *arguments, **environment)
        return Job(self.cluster, re.findall(r"Submitted batch job (\d+)", said)[-1])

    def submit_by_hand(self, *overrides: str) -> Job:
        """The same by plain sbatch, with the lines for Frontier that stand in the file."""
        said = self.cluster.run(
            "sbatch", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1",
            str(ROOT / "slurm" / "train.sbatch"), str(self.config),
            f"run.directory={self.directory}", *OVERRIDES, *overrides,
            MEGAFRONTIER_CLUSTER="generic", MEGAFRONTIER_HOME=str(ROOT),
        )  # fmt: skip
        return Job(self.cluster, re.findall(r"Submitted batch job (\d+)", said)[-1])

    def slow_down(self, seconds: float = 0.5) -> None:
        """Let a step take so long on two nodes: links that slow cost time, but no core's. The
        pre-flight would take a minute to try them, so it is off but where it is asked for."""
        self.cluster.network.shape(STEP_BYTES / seconds)

    def speed_up(self) -> None:
        """As fast as the machine is again."""
        self.cluster.network.shape(FAST)

    def gate(self) -> "Gate":
        """Lets the ranks of a run make steps when the test says so."""
        return Gate(self.directory.with_name("gate"))

    def wait_for_a_step_more(self, job: Job) -> None:
        """Until metrics.jsonl has grown; a start that resumes cuts it first."""
        path = self.directory / "metrics.jsonl"
        sizes = [sys.maxsize]

        def has_grown() -> bool:
            sizes.append(path.stat().st_size if path.exists() else 0)
            return sizes[-1] > sizes[-2]

        job.wait_until(has_grown, "a step more")

    def kill_during_a_save(self, job: Job, victim: int = 0) -> int:
        """Kill a rank while a checkpoint is half written. Returns the checkpoint's step. Without
        rank 0, which publishes, it stays so; another's part may already have been done."""
        ranks = job.ranks()
        stale = self._partials()
        while True:
            wait_until(lambda: self._partials() - stale, PATIENCE_SECONDS, "a save", 0.001)
            for process in ranks.values():
                os.kill(process, signal.SIGSTOP)
            torn = [name for name, _ in self._partials() - stale]
            if torn:  # and stays so: nobody moves
                os.kill(ranks[victim], signal.SIGKILL)
            for process in ranks.values():
                os.kill(process, signal.SIGCONT)
            if torn:
                return int(torn[0].split("-")[1].split(".")[0])

    def _partials(self) -> set[tuple[str, int]]:
        """Names of unfinished checkpoints, with the time at which the folder changed: an earlier
        kill's stay until the next save."""
        found = set()
        for path in self.directory.glob("checkpoints/.step-*.partial"):
            with suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ctime_ns))
        return found

    @property
    def losses(self) -> list[float]:
        """Of every step so far."""
        path = self.directory / "metrics.jsonl"
        return runs.losses(runs.metrics(self.directory)) if path.exists() else []

    def wait_for_step(self, job: Job, step: int) -> None:
        job.wait_until(lambda: len(self.losses) >= step, f"step {step}")


def make_configs(folder: Path) -> Path:
    """A corpus and CONFIGS; the one for a rank a node."""
    text = runs.make_config_file(folder).read_text()
    for levels, per_node in (("pair: {size: 2}, ", 2), ("", 1)):
        changed = text.replace("pair: {size: 2}, node: {size: 2}, ", levels)
        (folder / CONFIGS[per_node]).write_text(changed)
    return folder / CONFIGS[1]


@cache
def unbroken(config: Path, ranks: int, *overrides: str) -> list[float]:
    """Losses of the same run on ranks of this process, which nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = (*OVERRIDES, f"run.directory={folder}", *overrides)
        return runs.losses(runs.run(config, ranks, *chosen))
