"""Who does not answer is named, with its host; whoever is first decides what the alarm is."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megafrontier.launch.health import liveness as rollcall
from megafrontier.launch.health.liveness import (
    ANSWER_SECONDS,
    Alarm,
    Answers,
    LivenessCheck,
    blockers,
    describe,
    within,
)
from megafrontier.parallel.env import Identity
from megafrontier.parallel.world import Operation

SIZE = 200  # more than one block


@pytest.fixture
def rolls():
    store = dist.HashStore()
    hosts = [f"frontier{rank // 8:05d}" for rank in range(SIZE)]
    found = [
        LivenessCheck(store, Identity(r, SIZE, r % 8, "slurm", "", hosts[r])) for r in range(SIZE)
    ]
    assert each(found, lambda roll: roll.meet(60)) == {rank: [] for rank in range(SIZE)}
    return found


def verdicts(rolls):
    """Whom each rank learns to be missing."""
    found = each(rolls, lambda roll: roll.answer(hang=False))
    return {rank: answers.missing for rank, answers in found.items()}


def each(rolls, ask):
    """What each rank learns; each asks on its own thread, as the ranks do on their own hosts."""
    found = {}

    def run(roll):
        found[roll.identity.rank] = ask(roll)

    threads = [threading.Thread(target=run, args=(roll,)) for roll in rolls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_those_that_do_not_come_are_named_to_every_rank_that_has():
    store = dist.HashStore()
    came = [LivenessCheck(store, Identity(r, 6, r, "slurm")) for r in (0, 1, 3, 4)]
    begin = time.monotonic()
    assert each(came, lambda roll: roll.meet(0.5)) == {r: [2, 5] for r in (0, 1, 3, 4)}
    assert time.monotonic() - begin < ANSWER_SECONDS, "rank 0 leaves when the others know"


def test_where_rank_0_does_not_come_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(rollcall, "VERDICT_SECONDS", 0.5)
    with pytest.raises(RuntimeError):
        LivenessCheck(dist.HashStore(), Identity(1, 2, 1, "slurm")).meet(0.1)


def test_an_alarm_is_heard_though_the_longest_wait_of_the_store_has_passed(monkeypatch):
    monkeypatch.setattr(rollcall, "_LONGEST", timedelta(milliseconds=50))
    store = dist.HashStore()
    ear, other = (LivenessCheck(store, Identity(rank, 2, rank, "torchrun")) for rank in (0, 1))
    alarm = Alarm(1, "late", 70)
    later = threading.Timer(0.3, lambda: other.raise_alarm(alarm))
    later.start()
    assert ear.wait_for_alarm() == alarm
    later.join()


def test_those_that_do_not_answer_are_named_on_every_rank(rolls, monkeypatch):
    monkeypatch.setattr(rollcall, "ANSWER_SECONDS", 1.5)
    lost = {9, *range(128, 136)}
    found = verdicts([roll for roll in rolls if roll.identity.rank not in lost])
    expected = "rank 9 on frontier00001; ranks 128-135 on frontier00016"
    assert {describe(missing) for missing in found.values()} == {expected}
    assert len(found) == SIZE - len(lost)


def test_where_all_answer_nobody_is_missing_and_nobody_waits(rolls, monkeypatch):
    monkeypatch.setattr(rollcall, "ANSWER_SECONDS", 60)
    assert list(verdicts(rolls).values()) == [[]] * SIZE


def test_where_nothing_moves_those_for_whom_the_others_wait_are_named_on_every_rank(rolls):
    """Ranks 70 and 71 do not reach each other, 69 waits for 70; 9 is at something alone."""

    def ask(roll):
        peer = {70: 71, 71: 70, 69: 70}.get(roll.identity.rank)
        at = "link world" if peer else "run.directory" if roll.identity.rank == 9 else ""
        with roll.status.doing(at, peer):
            return roll.answer(hang=True)

    expected = [(9, "frontier00001", "run.directory")]
    expected += [(rank, "frontier00008", "link world") for rank in (70, 71)]
    assert list(each(rolls, ask).values()) == [Answers([], expected, SIZE // 8)] * SIZE


def test_without_rank_0_there_is_no_verdict(rolls, monkeypatch):
    monkeypatch.setattr(rollcall, "VERDICT_SECONDS", 0.2)
    assert within(20, lambda: rolls[1].answer(hang=True)) is None


def test_the_first_alarm_counts_and_wakes_every_rank(rolls):
    heard = []
    ear = threading.Thread(target=lambda: heard.append(rolls[5].wait_for_alarm()))
    ear.start()
    first = Alarm(3, "no step", 70, hang=True)
    assert rolls[4].alarm() is None
    assert rolls[3].raise_alarm(first) == first
    assert rolls[4].raise_alarm(Alarm(4, "late", 1)) == first
    ear.join()
    assert [*heard, rolls[4].alarm()] == [first, first]


def test_a_call_that_neither_answers_nor_fails_is_left_to_itself():
    assert within(0.1, threading.Event().wait) is None
    assert within(10, lambda: 3) == 3


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
