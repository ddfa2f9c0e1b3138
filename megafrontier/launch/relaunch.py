"""Relaunch: on which nodes a job of slurm/train.sbatch starts its ranks, and whether it does again.

    python -m megafrontier.launch.relaunch DIRECTORY --spares=S                      before a start
    python -m megafrontier.launch.relaunch DIRECTORY --spares=S --code=C --left-out=NODES    after
    … --elastic=TASKS CONFIG [key=value …]                                        with train.elastic

The environment has Slurm's variables of the job, and JOB, what `scontrol --oneliner show job` says
of it now. Prints a line each: the number of nodes that train; the others, separated by commas;
those of them that the job still has; the first node that trains; the node that watches over the
first node of the job (Note [Watch] in slurm/train.sbatch); seconds to wait before the start, if
any; and after a failure what was lost. Exit code 1 and one line if the ranks cannot start.

With --grows, while ranks train without the nodes LEFT-OUT: only says by its exit code whether more
nodes could train now.

Note [Relaunch]
A job has N + S nodes (`run.spare_nodes`: S), of which N train. When ranks have failed, they start
again in the same job on N of its nodes, because a place in the queue costs more than a restart. A
node is left out if bad-nodes.txt lists it, if Slurm has removed it from the job or says that it is
down or failing, or if it does not start a process now: Slurm takes minutes to notice a lost node.
Nodes that are draining, and those on which processes were lost twice in this job, are used last.

With `train.elastic`, if fewer than N are left, the ranks go on over the most nodes on which the
layout can run, and over more when these are back.

The job goes back to the queue if too few nodes are left, or if not more time is left than a start
takes and the stop signal comes before the time limit. The number of starts without progress is
limited by `train.attempts`, as that of requeues (Note [Restart history]). If the storage is away,
they would all fail within a minute: starts wait longer and longer after others in a row that have
finished no step.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megafrontier.common.errors import BAD_NODE, STOPPED, UserError, exit_on_fatal_error
from megafrontier.launch.health import excluded_nodes
from megafrontier.parallel.env import Launch
from megafrontier.training.resume.restarts import (
    FILE_NAME,
    START_SECONDS,
    RestartRecord,
    find_outage,
    read_records,
    record_failure,
    start_seconds,
)

_LISTED = "in bad-nodes.txt"
SIGNAL_SECONDS = 300.0
"""How long before the time limit the stop signal comes (`--signal` of slurm/train.sbatch)."""
LOSSES = 2
"""Starts in which a node has lost processes, after which other nodes are used first."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60, 240
"""Waited for each earlier start in a row that has finished no step, and at most."""
ANSWER_SECONDS = 60.0
"""After which a node that has started no process is lost."""


def fields_of(job: str) -> dict[str, str]:
    """The fields of a line of `scontrol --oneliner show job`."""
    return dict(word.split("=", 1) for word in job.split() if "=" in word)


def find_unfit(
    nodes: Sequence[str],
    present: Collection[str],
    states: Mapping[str, str],
    bad: Collection[str],
    answering: Collection[str] | None = None,
) -> dict[str, str]:
    """The nodes that may not be used, and why.

    present: those that the job still has. states: Slurm's, by node. bad: those in bad-nodes.txt.
    answering: those that start a process now; None: not tried.
    """
    unfit = {}
    for node in nodes:
        state = states.get(node, "")
        if node in bad:
            unfit[node] = _LISTED
        elif node not in present:
            unfit[node] = "removed from the job by Slurm"
        elif state.endswith("*") or state.startswith(("down", "fail")):
            unfit[node] = f"{state} in Slurm"
        elif answering is not None and node not in answering:
            unfit[node] = "does not answer"
    return unfit


def choose(
    nodes: Sequence[str], unfit: Collection[str], last: Collection[str], count: int
) -> list[str]:
    """`count` nodes in Slurm's order, none of them unfit, those in `last` only if needed. Empty if
    there are too few."""
    fit = sorted((node for node in nodes if node not in unfit), key=lambda node: node in last)
    chosen = set(fit[:count])
    return [node for node in nodes if node in chosen] if len(fit) >= count else []


def what_was_lost(
    records: Sequence[RestartRecord], used: Sequence[str], unfit: Mapping[str, str], code: int
) -> tuple[str, list[str]]:
    """A line that says what ended a start, and the nodes that it names.

    records: those of this start in attempts.jsonl. used: its nodes. code: srun's.
    """
    gone = [node for node in used if unfit.get(node, _LISTED) != _LISTED]
    begins = [number for number, record in enumerate(records) if "reached" in record]
    start = records[begins[-1]] if begins else None
    newest = records[begins[-1] :] if begins else []
    end = next((record for record in reversed(newest) if "ended" in record), None)
    if gone:
        return "; ".join(f"node {node} was lost: {unfit[node]}" for node in gone), gone
    if end is not None and end.get("reason"):
        return str(end["reason"]).partition(";")[0], [host for _, host in end.get("lost", [])]
    if start is None:
        return f"{_describe(code)} before all ranks had met", []
    # Rank 0 records every end that it survives.
    return f"rank 0 on {start['host']} was lost: {_describe(code)}", [str(start["host"])]


def _describe(code: int) -> str:
    name = signal.strsignal(code - 128) if code > 128 else None
    return f"exit code {code}" if name is None else f"signal {code - 128}, {name}"


def pause_before(records: Sequence[RestartRecord], code: int | None) -> int:
    """Seconds to wait before the next start, after one that has ended with `code`, if any. Bad
    nodes are left out at once. `records`: of the run."""
    outage = None if code in (None, BAD_NODE) else find_outage(records, 0)
    earlier = max(0, outage.failures - 1) if outage else 0
    return min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * earlier)


def why_too_late(
    job: Mapping[str, str], records: Sequence[RestartRecord], now: float
) -> str | None:
    """Why not enough time is left for a start at `now`; None if it is. `records`: of the run."""
    try:
        left = datetime.fromisoformat(job["EndTime"]).timestamp() - now
    except (KeyError, ValueError):  # no time limit
        return None
    needed = max(start_seconds(records)[-3:], default=START_SECONDS) + SIGNAL_SECONDS
    if left > needed:
        return None
    return f"{left:.0f} s are left, need {needed:.0f} s for a start and the stop signal"


def of_launch(records: Sequence[RestartRecord], launch: Launch) -> list[RestartRecord]:
    """The records of one start of the tasks, in which the ranks may have started several times."""
    found, is_of_it, ours = [], False, launch.restarts[:3]
    for record in records:
        if "job" in record:
            is_of_it = (record["job"], record.get("restarts", [])[:3]) == (launch.job, ours)
        if is_of_it:
            found.append(record)
    return found


def count_losses(records: Sequence[RestartRecord], launch: Launch) -> Counter[str]:
    """How many starts of this job since Slurm has started it lost a process on each node."""
    ours = [r for r in records if r.get("job") == launch.job and "nodes" in r]
    ours = [r for r in ours if r.get("restarts", [])[:1] == launch.restarts[:1]]
    return Counter(node for record in ours for node in record["nodes"])


def ask_nodes(nodes: Sequence[str], left_out: Collection[str], enough: int) -> set[str]:
    """The nodes that start a process now. Stops waiting for the others a while after the first
    answer, if `enough` have answered."""
    answers: set[str] = set()
    command = [
        "srun", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--ntasks-per-node=1",
        f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", *exclude_option(left_out),
        "sh", "-c", 'echo "$SLURMD_NODENAME"',
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "SLURM_LABELIO"}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as srun:
        output = srun.stdout or ()

        def read() -> None:
            for line in output:
                answers.add(line.strip())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        begin = time.monotonic()
        patience = min(ANSWER_SECONDS, 10 + len(nodes) / 100)  # messages pass from node to node
        while reader.is_alive() and len(answers) < len(nodes):
            waited = time.monotonic() - begin
            if waited > (patience if len(answers) >= enough else ANSWER_SECONDS):
                break
            time.sleep(0.05)
        srun.kill()  # Slurm ends what is left of the step
        reader.join(5)
    return answers & set(nodes)


def exclude_option(nodes: Collection[str]) -> list[str]:
    """The option of srun that leaves these nodes out: none if there are none."""
    return [f"--exclude={','.join(nodes)}"] if nodes else []


def _lines(*command: str) -> list[str]:
    """The lines that a command of Slurm prints; none if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()
    return []


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job. `all`: of this start of it, in Slurm's order. `present`: those that it
    still has. `states`: Slurm's, by node. `bad`: those in bad-nodes.txt."""

    all: list[str]
    present: list[str]
    states: dict[str, str]
    bad: set[str]

    @classmethod
    def ask(cls, job: Mapping[str, str], directory: Path) -> "JobNodes":
        """Ask Slurm. `job`: its fields."""
        listed = os.environ["SLURM_JOB_NODELIST"]
        nodes = _lines("scontrol", "show", "hostnames", listed)
        present = _lines("scontrol", "show", "hostnames", job.get("NodeList", listed))
        asked = ("--all", "--noheader", "--Node", f"--nodes={listed}", "--format=%N %T")
        states = [line.split() for line in _lines("sinfo", *asked)]
        states_by_node = {line[0]: line[1] for line in states if len(line) == 2}
        return cls(nodes, present, states_by_node, excluded_nodes.read(directory))

    def unfit(self, enough: int, is_after_failure: bool) -> dict[str, str]:
        """`find_unfit`. After a failure, all nodes are tried."""
        unfit = find_unfit(self.all, self.present, self.states, self.bad)
        if not is_after_failure:
            return unfit
        here = [node for node in self.all if node in self.present]
        left_out = [node for node in here if node in unfit]
        answering = ask_nodes([n for n in here if n not in unfit], left_out, enough)
        return find_unfit(self.all, self.present, self.states, self.bad, answering)


def explain_failure(
    directory: Path, code: int, nodes: JobNodes, left_out: str, unfit: Mapping[str, str]
) -> tuple[str, bool]:
    """What was lost in the newest start, which is recorded, and whether bad-nodes.txt lists any of
    its nodes. `left_out`: the job's nodes that it did without, separated by commas."""
    launch = Launch.current(os.environ) or Launch("", [])
    used = [node for node in nodes.all if node not in left_out.split(",")]
    records = of_launch(list(read_records(directory / FILE_NAME)), launch)
    reason, lost = what_was_lost(records, used, unfit, code)
    with suppress(OSError):  # the next start warns of it
        record_failure(directory, code, reason, lost)
    return reason, not nodes.bad.isdisjoint(used)


def place(arguments: argparse.Namespace) -> tuple[list[str], str]:
    """The lines to print, and an empty string; or no lines, and why the ranks cannot start."""
    directory, code, job = arguments.directory, arguments.code, fields_of(os.environ["JOB"])
    nodes = JobNodes.ask(job, directory)
    count, reason = len(nodes.all) - arguments.spares, ""
    if count < 1:
        raise UserError(
            f"run.spare_nodes: {arguments.spares}, need fewer than the job's {len(nodes.all)} nodes"
        )
    unfit = nodes.unfit(count, code is not None)
    if code == STOPPED:
        reason = "more nodes can train"
    elif code is not None:
        reason, is_listed = explain_failure(directory, code, nodes, arguments.left_out, unfit)
        if code == BAD_NODE and not is_listed:
            return [], f"{reason}; none of its nodes is in bad-nodes.txt"
    records = list(read_records(directory / FILE_NAME))
    pause = pause_before(records, code)
    if code is not None and (late := why_too_late(job, records, time.time() + pause)):
        return [], f"{reason}; {late}"
    losses = count_losses(records, Launch.current(os.environ) or Launch("", []))
    is_draining = {node for node, state in nodes.states.items() if state.startswith("drain")}
    last = is_draining | {node for node, number in losses.items() if number >= LOSSES}
    chosen = choose(nodes.all, unfit, last, count)
    left = f"{len(nodes.all) - len(unfit)} of {count} nodes are left"
    if not chosen and arguments.elastic:
        count = _most_nodes(arguments, len(nodes.all) - len(unfit))
        chosen = choose(nodes.all, unfit, last, count) if count else []
        reason += f"{'; ' if reason else ''}{left}, {count} go on (train.elastic)"
    if not chosen:
        why = ", ".join(f"{node} {why}" for node, why in list(unfit.items())[:8])
        return [], f"{reason}; {left}" if reason else f"{left}: {why}"
    left_out = [node for node in nodes.all if node not in chosen]
    excluded = [node for node in left_out if node in nodes.present]
    here = os.environ.get("SLURMD_NODENAME")
    watching = next((n for n in (*left_out, *reversed(chosen)) if n not in unfit and n != here), "")
    lists = (",".join(left_out), ",".join(excluded))
    return [str(len(chosen)), *lists, chosen[0], watching, str(pause or ""), reason], ""


def can_grow(arguments: argparse.Namespace) -> bool:
    """Whether more nodes could train than do now."""
    nodes = JobNodes.ask(fields_of(os.environ["JOB"]), arguments.directory)
    left_out = [node for node in arguments.left_out.split(",") if node in nodes.present]
    unfit = find_unfit(left_out, nodes.present, nodes.states, nodes.bad)
    asked = [node for node in left_out if node not in unfit]
    if not asked:
        return False
    others = [node for node in nodes.present if node not in asked]
    training = len(nodes.all) - len(arguments.left_out.split(","))
    answering = len(ask_nodes(asked, others, len(asked)))
    most = min(training + answering, len(nodes.all) - arguments.spares)
    return _most_nodes(arguments, most) > training


def _most_nodes(arguments: argparse.Namespace, most: int) -> int:
    from megafrontier.launch.elastic import most_nodes  # torch takes seconds to import

    return most_nodes(arguments.config, arguments.overrides, arguments.elastic, most)


def main() -> int:
    """See the module. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--spares", type=int, required=True)
    parser.add_argument("--code", type=int)
    parser.add_argument("--left-out", default="")
    parser.add_argument("--elastic", type=int, metavar="TASKS")
    parser.add_argument("--grows", action="store_true")
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    with exit_on_fatal_error("megafrontier"):
        if arguments.grows:
            return 0 if can_grow(arguments) else 1
        lines, why = place(arguments)
    print("\n".join(lines) if lines else why)
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
