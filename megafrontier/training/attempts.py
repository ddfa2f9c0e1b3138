"""Which starts a run has had, and when to give up: attempts.jsonl in the run directory.

An attempt is a start of the run. One that ends neither finished, nor on request, nor with a code
that nobody starts again by itself (2 and 3: a person has looked), has failed; what it reached is in
metrics.jsonl when the next one starts. Several failures in a row, none further than the first of
them, will not be the last.

An attempt after which bad-nodes.txt lists more hosts than before has failed through them, and the
next one leaves them out: it does not count. A cluster has only so many.

Starts that end before all ranks have met are noted ("unmet") and counted by slurm/train.sbatch.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megafrontier.cluster.hierarchy import Hierarchy
from megafrontier.cluster.identity import Identity
from megafrontier.config import Config
from megafrontier.errors import BAD_INPUT, FAILED, STOPPED, Ending, RunFailed
from megafrontier.training import bad_nodes

_TAIL_BYTES = 65536


class Attempt:
    """The present one. On all ranks but the first it keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def note(self, **values: Any) -> None:
        """Add a line; what cannot be written is left out."""
        if self._path is None:
            return
        line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds"), **values})
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def ended(self, code: int, reason: str = "") -> None:
        """The exit code, and the line that says why."""
        self.note(ended=code, **({"reason": reason} if reason else {}))


@contextmanager
def attempted(config: Config, identity: Identity, hierarchy: Hierarchy) -> Iterator[Attempt]:
    """Note this attempt's start, and the end where the body raises it. Raises RunFailed, on every
    rank alike, after as many failures at one step as `train.attempts` says."""
    directory = Path(config.run.directory)
    first = hierarchy.rank == 0
    attempt = Attempt(directory / "attempts.jsonl" if first else None)
    reached = reached_step(directory / "metrics.jsonl") if first else 0
    listed = len(bad_nodes.listed(directory)) if first else 0
    refusal = _refusal(directory, reached, listed, config.train.attempts) if first else None
    job = {"job": found} if (found := _job()) is not None else {}
    who = {"host": identity.host, "ranks": identity.world_size, **job}
    attempt.note(reached=reached, bad_nodes=listed, **who)
    try:
        agreed = hierarchy.first_error(refusal)
        if agreed is not None:
            raise RunFailed(agreed)
        yield attempt
    except Ending as error:
        attempt.ended(error.code, str(error))
        raise


def note_begun(directory: Path, wanted: str) -> None:
    """Note that this Slurm job has done what `checkpoint.resume` asks for once: its later starts
    have the same arguments. Rank 0 calls it; what cannot be written is left out."""
    if (job := _job()) is not None:
        Attempt(directory / "attempts.jsonl").note(begun=wanted, job=job)


def has_begun(directory: Path, wanted: str) -> bool:
    """Whether an earlier start of this Slurm job has done so."""
    job = _job()
    return job is not None and any(
        entry.get("begun") == wanted and entry.get("job") == job
        for entry in _entries(directory / "attempts.jsonl")
    )


def _job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def reached_step(metrics: Path) -> int:
    """The last step in metrics.jsonl, 0 where there is none. A line cut short is left out."""
    with suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0


def _refusal(directory: Path, reached: int, listed: int, limit: int) -> str | None:
    failures = count_failures(directory / "attempts.jsonl", reached, listed)
    if limit == 0 or failures < limit:
        return None
    return (
        f"step {reached + 1}: the last {failures} attempts ended without getting past it "
        f"(train.attempts); see {directory}/attempts.jsonl, log.txt and hang/ there; started "
        "again it tries as often"
    )


def count_failures(path: Path, reached: int, listed: int) -> int:
    """Failed attempts since one got further than those before it, that one included. `reached` is
    the last step that the newest attempt finished, `listed` the number of bad nodes after it."""
    starts: list[tuple[int, int]] = []
    ends: list[int | None] = []
    for entry in _entries(path):
        if "reached" in entry:
            starts.append((entry["reached"], entry.get("bad_nodes", 0)))
            ends.append(None)
        elif ends and "ended" in entry:
            ends[-1] = entry["ended"]
    failures, best = 0, -1
    afterwards = [*starts[1:], (reached, listed)]
    for (_, before), (last_step, after), code in zip(starts, afterwards, ends, strict=False):
        if code in (0, BAD_INPUT, FAILED, STOPPED):
            failures, best = 0, -1
        elif after > before:
            continue
        elif last_step > best:
            failures, best = 1, last_step
        else:
            failures += 1
    return failures


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError), path.open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):  # a kill cut it short
                yield json.loads(line)
