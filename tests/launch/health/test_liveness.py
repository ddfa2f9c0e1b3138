"""Absent, missing and blocking ranks are named with their hosts; the first alarm counts."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megafrontier.launch.health import liveness
from megafrontier.launch.health.liveness import (
    Alarm,
    LivenessCheck,
    blockers,
    call_with_timeout,
    describe,
)
from megafrontier.launch.health.timeouts import Timeouts
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import Operation

SIZE = 200  # more than one block


def met(**limits):
    """The liveness checks of all ranks, which have met."""
    store, timeouts = dist.HashStore(), replace(Timeouts.of(SIZE), **limits)
    hosts = [f"frontier{rank // 8:05d}" for rank in range(SIZE)]
    found = [
        LivenessCheck(store, Identity(r, SIZE, r % 8, "slurm", "", hosts[r]), timeouts)
        for r in range(SIZE)
    ]
    assert each(found, lambda check: check.meet(60)) == {rank: [] for rank in range(SIZE)}
    return found


def each(checks, ask):
    """Call `ask` for every rank on a thread of its own; the results by rank."""
    with ThreadPoolExecutor(len(checks)) as pool:
        found = pool.map(ask, checks)
    return {check.identity.rank: answer for check, answer in zip(checks, found, strict=True)}


def verdicts(checks):
    """The missing ranks that each rank learns of."""
    found = each(checks, lambda check: check.answer(hang=False))
    return {rank: answers.missing for rank, answers in found.items()}


def test_absent_ranks_are_reported_to_every_rank_that_arrives():
    store = dist.HashStore()
    came = [LivenessCheck(store, Identity(r, 6, r, "slurm")) for r in (0, 1, 3, 4)]
    begin = time.monotonic()
    assert each(came, lambda check: check.meet(0.5)) == {r: [2, 5] for r in (0, 1, 3, 4)}
    assert time.monotonic() - begin < Timeouts.of(6).answer, "rank 0 leaves when the others know"


def test_without_rank_0_the_other_ranks_time_out():
    timeouts = replace(Timeouts.of(2), answer=0.2)
    with pytest.raises(RuntimeError):
        LivenessCheck(dist.HashStore(), Identity(1, 2, 1, "slurm"), timeouts).meet(0.1)


def test_an_alarm_is_received_after_the_longest_wait_of_the_store(monkeypatch):
    monkeypatch.setattr(liveness, "_LONGEST", timedelta(milliseconds=50))
    store = dist.HashStore()
    ear, other = (LivenessCheck(store, Identity(rank, 2, rank, "torchrun")) for rank in (0, 1))
    alarm = Alarm(1, "late", 70)
    later = threading.Timer(0.3, lambda: other.raise_alarm(alarm))
    later.start()
    assert ear.wait_for_alarm() == alarm
    later.join()


def test_every_rank_learns_which_ranks_do_not_answer():
    lost = {9, *range(128, 136)}
    found = verdicts([check for check in met(answer=1.5) if check.identity.rank not in lost])
    expected = "rank 9 on frontier00001; ranks 128-135 on frontier00016"
    assert {describe(missing) for missing in found.values()} == {expected}
    assert len(found) == SIZE - len(lost)


def test_if_all_answer_no_rank_is_missing_and_none_waits():
    assert list(verdicts(met(answer=60)).values()) == [[]] * SIZE


def test_in_a_hang_every_rank_learns_which_ranks_block_the_others():
    """Ranks 70 and 71 do not reach each other, 69 waits for 70, and 9 is stuck alone."""

    def ask(check):
        peer = {70: 71, 71: 70, 69: 70}.get(check.identity.rank)
        at = "link world" if peer else "run.directory" if check.identity.rank == 9 else ""
        with check.status.doing(at, peer):
            return check.answer(hang=True)

    expected = [(9, "frontier00001", "run.directory")]
    expected += [(rank, "frontier00008", "link world") for rank in (70, 71)]
    for found in each(met(), ask).values():
        assert [tuple(row) for row in found.stuck] == expected
        assert (found.missing, found.hosts) == ([], SIZE // 8)


def test_without_rank_0_there_is_no_verdict():
    check = met(answer=0.1)[1]
    assert call_with_timeout(20, lambda: check.answer(hang=True)) is None


def test_the_first_alarm_counts_and_wakes_every_rank():
    checks = met()
    heard = []
    ear = threading.Thread(target=lambda: heard.append(checks[5].wait_for_alarm()))
    ear.start()
    first = Alarm(3, "no step", 70, hang=True)
    assert checks[3].raise_alarm(first) == first
    assert checks[4].raise_alarm(Alarm(4, "late", 1)) == first
    ear.join()
    assert [*heard, checks[4].wait_for_alarm()] == [first, first]


def test_a_call_that_takes_too_long_returns_none():
    assert call_with_timeout(0.1, threading.Event().wait) is None
    assert call_with_timeout(10, lambda: 3) == 3


def test_many_lost_hosts_are_counted_not_listed():
    words = describe([(rank, f"n{rank}") for rank in range(20)])
    assert words.startswith("rank 0 on n0; rank 1 on n1; ")
    assert words.endswith("; and those of 12 more hosts")
    assert describe([(1, "n0"), (3, "n0")]) == "ranks 1, 3 on n0"


LINK, STORAGE, NOTHING = "link world", "run.directory", Operation()


@pytest.mark.parametrize(
    ("operations", "found"),
    [
        ([NOTHING, NOTHING], {}),
        ([NOTHING, Operation(STORAGE)], {1: STORAGE}),
        ([Operation("stage 0", waits_for="a message"), Operation("stage 1")], {1: "stage 1"}),
        (
            [Operation(LINK, 1), Operation(LINK, 0), Operation(LINK, 1), NOTHING],
            {0: LINK, 1: LINK},
        ),
        # Rank 1 is not there yet, or at an exchange over another level.
        ([Operation(LINK, 1), Operation(STORAGE)], {1: STORAGE}),
        ([Operation(LINK, 1), Operation("link node", 0)], {}),
    ],
)
def test_a_rank_blocks_the_others_if_it_is_stuck_alone_or_with_a_peer_that_is_too(
    operations, found
):
    assert blockers(operations) == found
