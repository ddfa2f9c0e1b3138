"""The words of a schedule: actions, transfers, and the rows that hold them.

A stage is a run of consecutive blocks. Stages have global numbers, 0 to
ranks * stages_per_rank - 1, in the order of the blocks. A table has one row per rank of the
pipeline: the actions of that rank, in its order.
"""

from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and of weights in one pass
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


_COMPUTED = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward (inputs)",
    ActionKind.BACKWARD_WEIGHT: "backward (weights)",
}


class Action(NamedTuple):
    """One computation of a stage, for one micro-batch."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @property
    def description(self) -> str:
        """For reports."""
        return f"stage {self.stage}, {_COMPUTED[self.kind]} of micro-batch {self.micro_batch}"


class TransferKind(StrEnum):
    """The direction of a transfer, as its rank sees it, and what it carries."""

    SEND_ACTIVATION = "send activation"
    RECEIVE_ACTIVATION = "receive activation"
    SEND_GRADIENT = "send gradient"
    RECEIVE_GRADIENT = "receive gradient"

    @property
    def is_send(self) -> bool:
        """Whether this rank is the sender."""
        return self in (TransferKind.SEND_ACTIVATION, TransferKind.SEND_GRADIENT)

    @property
    def is_activation(self) -> bool:
        """Whether it carries an output of a stage, not a gradient of one."""
        return self in (TransferKind.SEND_ACTIVATION, TransferKind.RECEIVE_ACTIVATION)


class Transfer(NamedTuple):
    """One message between this rank and the rank `peer` of the pipeline.

    `stage` is this rank's stage: the one whose output or input gradient is sent, or the one whose
    input or output gradient is received.
    """

    kind: TransferKind
    stage: int
    micro_batch: int
    peer: int

    def __str__(self) -> str:
        way = "to" if self.kind.is_send else "from"
        return f"{self.kind} {self.stage}.{self.micro_batch} {way} rank {self.peer}"


class TransferGroup(tuple[Transfer, ...]):
    """Transfers of one rank that are started together, for instance in one batch_isend_irecv."""

    __slots__ = ()

    @property
    def description(self) -> str:
        """For reports."""
        return ", ".join(f"stage {t.stage}, {t.kind} of micro-batch {t.micro_batch}" for t in self)


ActionRow = tuple[Action, ...]
Table = tuple[ActionRow, ...]
StageRow = tuple[Action | TransferGroup, ...]


class StageMessage(NamedTuple):
    """What an action makes for another stage: the output of `stage`, or its input's gradient."""

    is_activation: bool
    stage: int
    micro_batch: int


def message_of(action: Action) -> StageMessage | None:
    """The message that an action makes. A backward of weights makes none."""
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return None
    return StageMessage(action.kind is ActionKind.FORWARD, action.stage, action.micro_batch)


def message_for(action: Action, stages: int) -> StageMessage | None:
    """The message that an action needs from another stage, if any, in a row of `stages` stages."""
    if action.kind is ActionKind.FORWARD and action.stage > 0:
        return StageMessage(True, action.stage - 1, action.micro_batch)
    is_backward = action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    if is_backward and action.stage < stages - 1:
        return StageMessage(False, action.stage + 1, action.micro_batch)
    return None


def message_in(transfer: Transfer) -> StageMessage:
    """The message that a transfer carries."""
    stage = transfer.stage
    if not transfer.kind.is_send:
        stage += -1 if transfer.kind.is_activation else 1
    return StageMessage(transfer.kind.is_activation, stage, transfer.micro_batch)
