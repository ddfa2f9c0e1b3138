"""All time limits of starting, watching and ending the ranks of a run, in seconds."""

from dataclasses import dataclass

LOCAL_GRACE = 0.5
"""From the first failure of a local rank to the kill of the others: time to print the reason."""
LOCAL_SPEAKER = 150.0
"""After an error that all local ranks raise: how long the others wait for the rank that prints it.
It may first have to hand over metrics (up to 120 s for W&B)."""
SCRIPT_SPEAKER = 5.0
"""The same for a script's ranks: a launcher has ended the others by then."""
GIVE_UP_GROUPS = 20.0
"""How long a rank waits for its process groups to be destroyed or aborted."""

LEAVE_SECONDS = 10.0
"""From the order to abandon its groups until a rank has dropped its run. Then it is killed."""
RETURN_SECONDS = LEAVE_SECONDS + 10.0
"""After which a rank that has not come back where the others meet again is lost."""
PARENT_SECONDS = 2.0
"""How long a rank with an error of its own waits for the word that another rank was lost."""

_START_FACTOR = 3  # compilation, kernels, connections
_ARRIVE = 600.0  # thousands of ranks import torch from the same storage
_COLLECTIVE = 1800.0
_NO_LIMIT = 7 * 86400.0  # torch wants a number


@dataclass(frozen=True)
class Timeouts:
    """The time limits of one run. Those that depend on the number of ranks do so because every
    rank sends requests to the one thread of rank 0's store, about 100,000 of them a second."""

    hang: float
    """No step, or part of one, is finished: the run hangs. 0: never (`train.hang_seconds`)."""
    first_step: float
    """The same for start-up and the first step."""
    arrive: float
    """From the first rank to the last, until all have arrived at the store."""
    check_nodes: float
    """Connecting the ranks, and again the preflight: in both, only nodes and links are used."""
    collective: float
    """torch's timeout of a collective. More than `first_step`: the watchdog's report says more."""
    answer: float
    """From an alarm until rank 0 has counted the ranks that answer. The other ranks wait for its
    verdict three times as long."""
    storage: float = 20.0
    """Each write to the storage of a rank that is about to end. If no Python thread of it runs for
    three times as long, beyond the other limits, the hard timeout ends it."""

    @classmethod
    def of(cls, world_size: int, hang_seconds: float = 600.0) -> "Timeouts":
        """The limits for a number of ranks and `train.hang_seconds`."""
        first_step = _START_FACTOR * hang_seconds
        is_limited = hang_seconds > 0
        return cls(
            hang=hang_seconds,
            first_step=first_step,
            arrive=min(_ARRIVE, first_step) if is_limited else _ARRIVE,
            # All ranks open connections to the store, twice. torch's own figure for 96,000 ranks
            # is 100 s.
            check_nodes=180.0 + world_size / 200,
            collective=max(_COLLECTIVE, 2 * first_step) if is_limited else _NO_LIMIT,
            answer=3.0 + world_size / 6_000,
        )
