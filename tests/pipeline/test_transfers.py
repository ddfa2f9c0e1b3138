"""The rows with exchanges run on any ranks, however these wait for each other."""

import pytest

from megafrontier.pipeline.schedule import make_table
from megafrontier.pipeline.simulate import Deadlock, StageCosts, simulate
from megafrontier.pipeline.table import Action, TransferGroup, message_for, message_in, message_of
from megafrontier.pipeline.transfers import with_transfers

CASES = [
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
]


def tables(case, exhaustive):
    schedule, stages = case
    for ranks in range(1, 9) if exhaustive else (1, 2, 3, 5):
        for micro_batches in range(1, 33) if exhaustive else (1, 2, 5, 11):
            yield make_table(schedule, ranks, stages, micro_batches)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("early", [True, False])
def test_no_rank_waits_for_ever_although_each_exchange_blocks_its_rank(case, early, exhaustive):
    uneven = StageCosts(forward=3.0, backward_input=1.0, backward_weight=0.5)
    for table in tables(case, exhaustive):
        for costs in (StageCosts(1.0, 1.0, 1.0), uneven):
            simulate(with_transfers(table, early), costs, overlap=False, transfer_seconds=0.3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_message_between_ranks_is_sent_once_and_received_once_in_time(case, exhaustive):
    for table in tables(case, exhaustive):
        stages = 1 + max(action.stage for row in table for action in row)
        made = {message_of(action): rank for rank, row in enumerate(table) for action in row}
        needed = {
            (made[message], rank, message)
            for rank, row in enumerate(table)
            for action in row
            if (message := message_for(action, stages)) and made[message] != rank
        }
        found = []
        for rank, row in enumerate(with_transfers(table)):
            done = set()
            for item in row:
                if isinstance(item, Action):
                    message = message_for(item, stages)
                    assert message is None or message in done
                    done.add(message_of(item))
                    continue
                for transfer in item:
                    message = message_in(transfer)
                    if transfer.kind.is_send:
                        assert message in done
                        found.append((rank, transfer.peer, message))
                    else:
                        done.add(message)
        assert len(found) == len(needed)
        assert set(found) == needed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exchanges_that_take_no_time_add_no_bubble(case, exhaustive):
    for table in tables(case, exhaustive):
        assert simulate(with_transfers(table)).seconds == simulate(table).seconds


@pytest.mark.parametrize("stages", [1, 2])
def test_zero_bubble_hides_all_messages_except_at_the_start_and_the_end(stages):
    table = make_table("zero_bubble", 4, stages, 32)
    rows = with_transfers(table)
    extra = simulate(rows, transfer_seconds=0.2).seconds - simulate(table).seconds
    assert 0 < extra < 15 * 0.2
    exposed = simulate(rows, transfer_seconds=0.2, overlap=False).seconds
    assert exposed - simulate(table).seconds > 32 * stages * 2 * 0.2


def test_a_row_in_the_wrong_order_is_a_deadlock():
    first, last = with_transfers(make_table("1f1b", 2, 1, 2))
    last = (last[2], *last[:2], *last[3:])  # the first action before its input
    assert isinstance(last[0], TransferGroup)
    with pytest.raises(Deadlock):
        simulate([first, last], overlap=False)
