"""Runs one rank's row of a pipeline's table: forwards, backwards and messages, in its order.

Every rank reads the whole micro-batches itself, because they are a pure function of the step. So
only hidden states and their gradients cross a stage's border.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafrontier.comm.wires.wire import UNCHANGED, WorkWires
from megafrontier.model.gpt import GPT
from megafrontier.model.recompute.deferred import DeferredGradients, OtherGradients
from megafrontier.parallel.mesh import Mesh
from megafrontier.partition.engine import Engine
from megafrontier.partition.modules.hooks import Backward
from megafrontier.pipeline.division import Division, last_backwards
from megafrontier.pipeline.messages import Messenger, PendingTensor
from megafrontier.pipeline.split_backward import SplitBackward
from megafrontier.pipeline.table import (
    Action,
    ActionKind,
    StageMessage,
    Transfer,
    TransferGroup,
    message_for,
    message_in,
    message_of,
)
from megafrontier.pipeline.work import Work, count

_GIVEN: dict[ActionKind, Backward] = {
    ActionKind.BACKWARD_INPUT: "inputs",
    ActionKind.BACKWARD_WEIGHT: "weights",
}


class Pipeline:
    """One rank's stages of a GPT, connected to those of the other ranks."""

    def __init__(
        self,
        model: GPT,
        engine: Engine,
        mesh: Mesh,
        division: Division,
        dtype: torch.dtype,
        wires: WorkWires = UNCHANGED,
    ) -> None:
        """`dtype`: of hidden states. `wires`: of these and their gradients on each level; None, and
        by default, they keep their type. All ranks of the pipeline make it, after `shard`."""
        self.division = division
        self.model, self._engine, self._mesh, self._dtype = model, engine, mesh, dtype
        self._messenger = Messenger(engine, mesh, wires)
        self._places = {s: i for i, s in enumerate(division.stages_of(mesh.pipeline_rank))}
        if division.splits_backward:
            layers = [*model.blocks, *filter(None, [model.prediction])]
            self._split = SplitBackward(model, layers, copies=model.is_compiled)
        is_early = not engine.delays_early_messages
        self.row = cache(partial(division.row, mesh.pipeline_rank, early=is_early))
        """(micro-batches, trains=True) → what this rank does in a step."""

    def train(self, work: Work) -> Tensor:
        """Forward and backward of a step's micro-batches; gradients go to their shards.

        Returns the sum of losses and the number of tokens, float64 [2] on the device: 0 on ranks
        without the last stage.
        """
        return self._run(work, trains=True)

    @torch.no_grad()
    def evaluate(self, work: Work) -> Tensor:
        """Forward of micro-batches. Returns as `train` does."""
        return self._run(work, trains=False)

    def _run(self, work: Work, trains: bool) -> Tensor:
        row = self.row(len(work.batches), trains=trains)
        step = _Step(work, torch.zeros(2, dtype=torch.float64, device=self._mesh.device))
        last = last_backwards(row)
        for item in row:
            with self._mesh.world.status.doing(item.description, device=self._mesh.device):
                if isinstance(item, TransferGroup):
                    self._exchange(step, item)
                else:
                    ends = item in last, last.get(item, False)
                    given = _GIVEN.get(item.kind, "whole")
                    with self._engine.stage(self._places[item.stage], *ends, given):
                        self._act(step, item)
                    work.after()
        return step.totals

    def _act(self, step: "_Step", action: Action) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(step, action)
            case ActionKind.BACKWARD:
                self._backward(step, action)
            case ActionKind.BACKWARD_INPUT:
                self._backward_of_inputs(step, action)
            case ActionKind.BACKWARD_WEIGHT:
                self._split.weights(step.deferred.pop((action.stage, action.micro_batch)))

    def _forward(self, step: "_Step", action: Action) -> None:
        blocks, batch = self.division.blocks(action.stage), step.work.batches[action.micro_batch]
        hidden = self._needed(step, action)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        step.work.before(batch, blocks.start)
        out = self.model(
            batch.tokens,
            batch.targets,
            batch.documents,
            hidden=hidden,
            blocks=blocks,
            scores=step.work.scores is not None,
            padding=batch.padding,
        )
        if action.stage == self.division.stages - 1:
            step.totals += count(self.model, step.work, batch, out)
            out = step.work.scaled(out)
        else:
            self._made(step, action, out.detach())
        if torch.is_grad_enabled():
            # Backward needs the graph of a hidden state, not its values.
            result = out if out.dim() == 0 else get_gradient_edge(out)
            step.graphs[action.stage, action.micro_batch] = hidden, result

    def _backward(self, step: "_Step", action: Action) -> None:
        hidden, result = step.graphs.pop((action.stage, action.micro_batch))
        gradient = self._needed(step, action)
        torch.autograd.backward(result, gradient)
        if hidden is not None:
            assert hidden.grad is not None
            self._made(step, action, hidden.grad)

    def _backward_of_inputs(self, step: "_Step", action: Action) -> None:
        at = action.stage, action.micro_batch
        hidden, result = step.graphs.pop(at)
        gradient, step.deferred[at] = self._split.inputs(
            result,
            self._needed(step, action),
            hidden,
            self._parameters(action.stage),
            step.others[action.stage],
        )
        if gradient is not None:
            self._made(step, action, gradient)

    def _parameters(self, stage: int) -> Iterator[Tensor]:
        """The parameters that a stage uses."""
        names = [f"blocks.{number}" for number in self.division.blocks(stage)]
        has_head = stage == self.division.stages - 1
        predicts = has_head and self.model.prediction is not None
        is_tied = self.model.config.tie_embeddings and hasattr(self.model, "embedding")
        names += ["embedding"] * (stage == 0 or predicts or (has_head and is_tied))
        names += ["prediction"] * predicts + ["head"] * has_head
        for name in names:
            yield from self.model.get_submodule(name).parameters()

    def _needed(self, step: "_Step", action: Action) -> Tensor | None:
        """The tensor that an action starts from, if it comes from another stage."""
        key = message_for(action, self.division.stages)
        return None if key is None else self._messenger.wait(step.here.pop(key))

    def _made(self, step: "_Step", action: Action, tensor: Tensor) -> None:
        """Keep what an action made, for another rank or for another stage of this one."""
        key = message_of(action)
        assert key is not None
        there = action.stage + (1 if key.is_activation else -1)
        if there in self._places:
            step.here[key] = PendingTensor(tensor)
        else:
            step.made[key] = tensor.contiguous()

    def _exchange(self, step: "_Step", exchange: TransferGroup) -> None:
        transfers = [(transfer, self._tensor(step, transfer)) for transfer in exchange]
        messages = self._messenger.start(transfers)
        for (transfer, _), message in zip(transfers, messages, strict=True):
            if not transfer.kind.is_send:
                step.here[message_in(transfer)] = message

    def _tensor(self, step: "_Step", transfer: Transfer) -> Tensor:
        """What is sent, or new memory for what is received."""
        if transfer.kind.is_send:
            return step.made.pop(message_in(transfer))
        batch = step.work.batches[transfer.micro_batch]
        splits, config = self._mesh.splits, self.model.config
        rows, length = batch.tokens.shape
        if (parts := splits.context * splits.tensor) > 1:  # a part of the tokens of all rows
            rows, length = 1, rows * length // parts
        shape = rows, length, config.hidden
        return torch.empty(shape, dtype=self._dtype, device=self._mesh.device)


@dataclass
class _Step:
    """The state of a step: what has come, what is to be sent, and graphs without a backward,
    and what backwards of inputs have left to do."""

    work: Work
    totals: Tensor
    here: dict[StageMessage, PendingTensor] = field(default_factory=dict)
    made: dict[StageMessage, Tensor] = field(default_factory=dict)
    graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = field(
        default_factory=dict
    )
    deferred: dict[tuple[int, int], DeferredGradients] = field(default_factory=dict)
    others: dict[int, OtherGradients] = field(default_factory=lambda: defaultdict(OtherGradients))
