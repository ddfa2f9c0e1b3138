"""How often to save, and what share of the time is then spent on steps, if nodes fail at random.

Note [Expected goodput]
Failures come at random, one every `mtbf` seconds in the mean, also while ranks start. Training
takes a local snapshot every τ seconds of steps, and a checkpoint in storage every K τ. A save stops
the steps for `stall` seconds, and a start may resume from it `behind` seconds later. A share q of
the failures destroys the snapshots, so that the start goes back to the checkpoint; all others go
back to the snapshot. Without local snapshots q is 1.

An attempt to get over s seconds without a failure succeeds with p(s) = exp(-s / mtbf) and lasts
mtbf (1 - p(s)) in the mean, whether or not it succeeds. From a snapshot to the next one are
s = τ + stall. After a failure that spared the snapshot, an attempt is longer by the start, and by
`behind`: steps since the newest snapshot that was complete are done again. So the mean time of a
segment, and the probability that no checkpoint is needed meanwhile, are sums of geometric series,
and so is the mean time of the K segments between two checkpoints.

With one kind of save, K = 1, this is Daly's model (J. T. Daly, A higher order estimate of the
optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22, 2006), whose
optimum is about sqrt(2 stall mtbf) (J. W. Young, A first order approximation to the optimum
checkpoint interval, CACM 17, 1974). That approximation fails if a save or a start takes a good part
of `mtbf`, and if `behind` is longer than the interval, so the optimum is looked for numerically
around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

STORAGE_SHARE = 0.15
"""Of failures that also destroy the snapshots of the partner node. 85 % of the failures of three
clusters disabled one node at most (Moody et al., Design, modeling, and evaluation of a scalable
multi-level checkpointing system, SC 2010)."""
_GOLDEN = (sqrt(5) - 1) / 2
_ROUNDS = 48
_REACH = 50.0
"""How far from the approximation an optimum is looked for, as a factor."""


@dataclass(frozen=True)
class SaveCost:
    """What a save costs. `stall`: seconds for which steps wait. `behind`: seconds from then until a
    start may resume from it."""

    stall: float
    behind: float = 0.0


@dataclass(frozen=True)
class FailureModel:
    """mtbf: mean seconds between two failures of the job. start: seconds from a failure to the
    first new step. local: of snapshots near the ranks; None: there are none. storage_share: of
    failures, those that need the checkpoint although there are snapshots."""

    mtbf: float
    start: float
    storage: SaveCost
    local: SaveCost | None = None
    storage_share: float = STORAGE_SHARE

    def goodput(self, every: float, local_every: float | None = None) -> float:
        """The expected share of the time that is spent on steps that count (Note [Expected
        goodput]).

        every: seconds of steps between checkpoints. local_every: between local snapshots.
        """
        local, share = self.local, self.storage_share
        if local is None or local_every is None or local_every >= every:
            local, local_every, share = SaveCost(0.0), every, 1.0
        count = every / local_every
        passed, seconds = self._segment(local_every + local.stall, local.behind, share)
        whole = local_every + local.stall + self.storage.stall
        last_passed, last_seconds = self._segment(whole, local.behind, share)
        # The segments but the last one, each begun only if those before it have passed.
        before = passed ** (count - 1)
        begun = (1 - before) / (1 - passed) if passed < 1 else count - 1
        success = before * last_passed
        if success == 0:
            return 0.0
        period = begun * seconds + before * last_seconds
        period += (1 - success) * self._restart_seconds
        return every * success / period

    def _segment(self, length: float, behind: float, share: float) -> tuple[float, float]:
        """The probability that a segment is passed without need of the checkpoint, and its mean
        time, to its end or to that failure."""
        first = exp(-length / self.mtbf)
        again = exp(-(length + self.start + behind) / self.mtbf)
        tries = (1 - share) * (1 - first) / (1 - (1 - share) * (1 - again))
        seconds = self.mtbf * ((1 - first) + tries * (1 - again))
        return first + tries * again, seconds

    @property
    def _restart_seconds(self) -> float:
        """Mean time of a start from storage, which failures may interrupt."""
        length = (self.start + self.storage.behind) / self.mtbf
        return self.mtbf * expm1(length) if length < 700 else inf

    def best(self, least: float) -> tuple[float, float | None, float]:
        """The seconds of steps between checkpoints and between local snapshots (None: there are
        none) for which the goodput is best, and that goodput. `least`: no interval is shorter."""
        if self.local is None:
            every = self._best_every(self.storage, 1.0, least, self.goodput)
            return every, None, self.goodput(every)
        local = self.local

        def best_local(every: float) -> float:
            found = self._best_every(
                local, 1 - self.storage_share, least, lambda each: self.goodput(every, each)
            )
            return min(every, found)

        every = self._best_every(
            self.storage,
            self.storage_share,
            least,
            lambda each: self.goodput(each, best_local(each)),
        )
        return every, best_local(every), self.goodput(every, best_local(every))

    def _best_every(
        self, save: SaveCost, share: float, least: float, goodput: Callable[[float], float]
    ) -> float:
        """The best interval of one kind of save, which a `share` of failures needs."""
        # A save begins when the one before is complete.
        least = max(least, save.behind)
        guess = max(least, young(save.stall, self.mtbf / share))
        return _maximum(goodput, max(least, guess / _REACH), guess * _REACH)


def young(stall: float, mtbf: float) -> float:
    """Young's first approximation of the best interval (Note [Expected goodput])."""
    return sqrt(2 * stall * mtbf)


def _maximum(value: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one maximum has it, by the golden section of the logarithm."""
    width = high / low
    first, second = high / width**_GOLDEN, low * width**_GOLDEN
    at_first, at_second = value(first), value(second)
    for _ in range(_ROUNDS):
        # Equal values, as of a goodput of 0 or 1, go to the shorter interval.
        if at_first >= at_second:
            high, second, at_second = second, first, at_first
            first = high / (high / low) ** _GOLDEN
            at_first = value(first)
        else:
            low, first, at_first = first, second, at_second
            second = low * (high / low) ** _GOLDEN
            at_second = value(second)
    return first if at_first >= at_second else second
