"""Put the sends and receives of a table into its rows.

Note [No deadlock between exchanges]
The actions of all ranks run on a clock, which puts them in one order. A message belongs to the
moment at which it was made. The rows with exchanges are parts of this one order: the sender and the
receiver have a message at the same place of it. Among the items that are not yet done, the first
one of the order can always run, even if each exchange blocks its rank until its peers have come.
"""

from collections import defaultdict
from functools import cache

from megafrontier.pipeline.simulate import simulate
from megafrontier.pipeline.table import (
    Action,
    StageMessage,
    StageRow,
    Table,
    Transfer,
    TransferGroup,
    TransferKind,
    message_for,
    message_of,
)

_Moment = tuple[float, bool]


@cache
def with_transfers(table: Table, early: bool = True) -> tuple[StageRow, ...]:
    """The rows of `table` with the exchanges between its ranks.

    A send follows the action that made the message. Its receive stands where the clock is then in
    the receiver's row: behind actions that have ended, so that no action waits for a message that
    it does not need. Messages that are made at the same moment form one exchange per rank.

    An action that runs at that moment comes after the receive if `early`: the message travels while
    the action runs. Without `early` the action comes first, for ranks whose exchanges block or
    whose actions use the stream of the exchanges themselves.
    """
    spans = simulate(table).spans
    holder = {action.stage: rank for rank, row in enumerate(table) for action in row}
    exchanges = _exchanges(table, holder, {action: end for action, (_, end) in spans.items()})
    rows = []
    for rank, row in enumerate(table):
        # At one moment: actions that end, then the exchange, then actions that start.
        items: list[tuple[_Moment, Action | TransferGroup]] = [
            ((spans[action][1], False) if early else (spans[action][0], True), action)
            for action in row
        ]
        items += [
            ((moment, early), TransferGroup(sorted(transfers)))
            for moment, transfers in exchanges[rank].items()
        ]
        rows.append(tuple(item for _, item in sorted(items, key=lambda item: item[0])))
    return tuple(rows)


def _exchanges(
    table: Table, holder: dict[int, int], ends: dict[Action, float]
) -> dict[int, dict[float, list[Transfer]]]:
    """For each rank, the transfers of each moment."""
    makers = {message_of(action): action for row in table for action in row}
    found: dict[int, dict[float, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    for receiver, row in enumerate(table):
        for action in row:
            message = message_for(action, len(holder))
            if message is None or holder[message.stage] == receiver:
                continue
            sender, moment = holder[message.stage], ends[makers[message]]
            sent, received = _kinds(message)
            found[sender][moment].append(
                Transfer(sent, message.stage, message.micro_batch, receiver)
            )
            found[receiver][moment].append(
                Transfer(received, action.stage, message.micro_batch, sender)
            )
    return found


def _kinds(message: StageMessage) -> tuple[TransferKind, TransferKind]:
    if message.is_activation:
        return TransferKind.SEND_ACTIVATION, TransferKind.RECEIVE_ACTIVATION
    return TransferKind.SEND_GRADIENT, TransferKind.RECEIVE_GRADIENT
