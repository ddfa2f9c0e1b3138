"""One task of a Slurm step: the parent of its rank, which can start again in the task.

Note [Tasks]
Slurm cannot start a task of a step again, and a new step costs seconds, in which each rank imports
torch. So the process that srun starts is not the rank but its parent: it has imported everything
and forks the rank, as the parent of local ranks does. A process of the first task has the store.

The parents do not talk to each other. A killed rank is forked again by its own, and its new process
raises an alarm at which the others abandon their groups and come back to the store (Note
[Survivors]). They do so as well when the liveness check says that a rank was lost or hangs.
There the ranks wait for each other for RETURN_SECONDS only. If one does not come, because its node
is lost or because it has ended twice before it had met the others, all tasks end, and
slurm/train.sbatch starts the ranks again on nodes that start a process now.
"""

import os
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from megafrontier.common.errors import BAD_NODE, FINAL
from megafrontier.common.signals import stop_requested
from megafrontier.launch.local import LocalRanks
from megafrontier.launch.survivors import GIVES_UP, MET
from megafrontier.parallel.env import LAUNCHED, REPLACED, RESTARTS, ROUND, STORE, Identity


def may_start_again(identity: Identity) -> bool:
    """Whether slurm/train.sbatch has started this task, so that it starts the ranks again if the
    tasks cannot."""
    return identity.source == "slurm" and identity.world_size > 1 and RESTARTS in os.environ


def run_task(
    identity: Identity, body: Callable[[], int], on_failure: Callable[[int, str], None]
) -> int:
    """Run `body` as this task's rank in a forked process, and again after a failure of any rank.
    Returns the exit code. `on_failure` is called on rank 0 with the exit code and what was lost, if
    it is rank 0."""
    with TaskRank(identity, body) as task:
        number = 0
        while True:
            task.start()
            lost: list[str] = []
            code = task.wait(lost.append, may_restart=True)
            ends = code in FINAL or code == BAD_NODE or task.forwarded or stop_requested()
            if ends or not task.has_met or task.gives_up:
                return code
            if lost and identity.rank == 0:
                on_failure(code, lost[0])
            number += 1
            os.environ[REPLACED] = lost[0] if lost else f"rank {identity.rank} ended with {code}"
            os.environ[ROUND], os.environ[LAUNCHED] = str(number), str(time.time())
            task.gather()


class TaskRank(LocalRanks):
    """The process of a task's rank, as its parent sees it."""

    is_alone = True

    def __init__(self, identity: Identity, body: Callable[[], int]) -> None:
        super().__init__([identity.rank], body, can_survive=True)
        self._identity = identity

    def _create_server(self) -> socket.socket | None:
        if self._identity.rank:
            return None
        port = urlsplit(self._identity.rendezvous).port or 0
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        # The ranks that survive have connections to the store beside those of the new ones.
        backlog = 4 * self._identity.world_size
        try:
            return socket.create_server(
                ("", port), family=family, backlog=backlog, dualstack_ipv6=has_both
            )
        except OSError:  # rank 0 is going to say why
            return None

    def _environment(self, rank: int) -> dict[str, str]:
        return {} if rank == 0 and self._store is None else {STORE: "parent"}

    @property
    def has_met(self) -> bool:
        """Whether the rank has met the others since it started."""
        return MET in self._said

    @property
    def gives_up(self) -> bool:
        """Whether the rank says that the ranks cannot meet again."""
        return GIVES_UP in self._said
