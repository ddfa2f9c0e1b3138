"""The wire format of each level: presets, a user's choices over them, and what is refused."""

from collections.abc import Mapping

from megafrontier.comm.wires.wire import Wires, WorkWires, make_wire
from megafrontier.common.errors import UserError, need
from megafrontier.config import PartitionConfig, WiresConfig
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition.placement import Placement, node_depth

PRESETS: dict[str, dict[str, dict[str, str]]] = {
    "exact": {"gather": {}, "reduce": {}},
    # ZeRO++ (arXiv:2306.10209): weights int8 between nodes, gradients int4 in two hops.
    "zero++": {"gather": {"network": "int8"}, "reduce": {"node": "int4"}},
    # Deltas are encoded once by their owner, so passing them on inside the node costs no accuracy.
    "low": {
        "gather": {"second": "delta4"},
        "reduce": {"second": "int8", "network": "int4"},
    },
}
"""Formats by where they begin (`_starts`), from there outwards; inside, the computing type."""


def choose_wires(
    config: WiresConfig,
    placement: Placement,
    levels: Levels,
    precision: str,
    prefix: str = "partition",
) -> Wires:
    """The wires of a configuration. Raises UserError with the key that cannot be, which begins with
    `prefix`."""
    gather = _formats(config, "gather", levels, precision, prefix)
    reduce = _formats(config, "reduce", levels, precision, prefix)
    _check_precision(config, precision, prefix)
    _check_use(config.gather, placement, levels, prefix)
    _settle_deltas(gather, config.gather, placement, levels, prefix)
    rotates = config.preset == "low" if config.rotation is None else config.rotation
    wires = Wires(
        tuple(make_wire(name) for name in gather),
        tuple(make_wire(name, rotates) for name in reduce),
    )
    if config.rotation and not any(wire.codec.is_quantized for wire in wires.reduce):
        raise UserError(
            f"{prefix}.wires.rotation: true, but no level reduces gradients in int8 or int4; "
            "leave it out"
        )
    return wires


NOT_CROSSED = {
    "activations": "neither parallel.tensor, context nor pipeline crosses",
    "tokens": "parallel.expert does not cross",
}
"""Why activations or tokens do not go over a level."""


def work_wires(moved: str, chosen: Mapping[str, str], levels: Levels, precision: str) -> WorkWires:
    """The formats of activations or of tokens (`moved`).

    chosen: `partition.wires.activations` or `tokens`. levels: the machine's, with the sizes of the
        splits that exchange them. Raises UserError for a level or a format that does not fit.
    """
    crossed = [name for name, size in zip(levels.names, levels.sizes, strict=True) if size > 1]
    for name, wire in chosen.items():
        key = f"partition.wires.{moved}.{name}"
        if name not in crossed:
            fits = f"need one of {', '.join(crossed)}" if crossed else "leave it out"
            raise UserError(f"{key}: {wire}, but {NOT_CROSSED[moved]} such a level; {fits}")
        if wire == "fp32" != precision:
            raise UserError(
                f"{key}: fp32, but train.precision is {precision}, and {moved} hold no more; "
                f"need {precision} or int8"
            )
        if wire == "fp16" != precision:
            raise UserError(
                f"{key}: fp16, but train.precision is {precision}, whose range fp16 lacks; need "
                "bf16 or int8"
            )
    return WorkWires(
        tuple(
            make_wire(chosen[name]).codec if chosen.get(name, precision) != precision else None
            for name in levels.names
        )
    )


def auto_activations(borders: Mapping[str, float | None]) -> dict[str, str]:
    """The formats that `partition.wires.activations: auto` stands for.

    The slowest border between stages sends the fewest bits, as in FusionLLM (arXiv:2410.12707).

    borders: GB/s of one rank over each level that a pipeline crosses; None: not known. Raises
        UserError if a pipeline crosses no level, or a rate is not known.
    """
    key = "partition.wires.activations"
    need(len(borders) > 0, key, "auto", "need parallel.pipeline")
    unknown = [name for name, rate in borders.items() if rate is None]
    fits = f"need machine.levels.{', '.join(unknown)}.gigabytes_per_second"
    need(not unknown, key, "auto", f"{fits}; `megafrontier probe --write FILE` measures it")
    slowest = min(rate for rate in borders.values() if rate is not None)
    return {name: "int8" for name, rate in borders.items() if rate == slowest}


def has_error_feedback(
    config: PartitionConfig, wires: Wires, placement: Placement, levels: Levels
) -> bool:
    """Whether gradient messages have error feedback. By default they do with `low`, if its memory
    is no more than a shard.

    Raises UserError if it is chosen and no message is quantised.
    """

    def has_errors(placement: Placement) -> bool:
        levels = placement.error_feedback_levels
        return any(wires.reduce[level].codec.is_quantized for level in levels)

    if config.error_feedback and not has_errors(placement):
        raise UserError(
            "partition.error_feedback: true, but no level within partition.optimizer reduces "
            "gradients in int8 or int4; leave it out"
        )
    here = placement.on(levels)
    if config.error_feedback is None:
        return config.wires.preset == "low" and here.gradients < here.optimizer and has_errors(here)
    return config.error_feedback and has_errors(here)


def _formats(
    config: WiresConfig, move: str, levels: Levels, precision: str, prefix: str
) -> list[str]:
    """One format for each level, fastest first."""
    count = len(levels.names)
    formats = [precision] * count
    starts = _starts(levels)
    for start, wire in PRESETS[config.preset][move].items():
        formats[starts[start] :] = [wire] * (count - starts[start])
    for name, wire in getattr(config, move).items():
        if name not in levels.names:
            known = ", ".join(levels.names)
            raise UserError(f"{prefix}.wires.{move}.{name}: no such level, need one of {known}")
        formats[levels.names.index(name)] = wire
    return formats


def _starts(levels: Levels) -> dict[str, int]:
    """The level where a format of a preset begins."""
    last = len(levels.names) - 1
    # The first level between nodes; the last level, if all levels lie within a node.
    network = min(node_depth(levels), last)
    return {"second": min(1, last), "node": max(network - 1, 0), "network": network}


def _check_precision(config: WiresConfig, precision: str, prefix: str) -> None:
    """Refuse fp16 for values that may exceed its range, and fp32 for weights of fewer bits."""
    for move, chosen in (("gather", config.gather), ("reduce", config.reduce)):
        for name, wire in chosen.items():
            key = f"{prefix}.wires.{move}.{name}: {wire}, but train.precision is {precision}"
            if wire == "fp16" != precision:
                raise UserError(f"{key}, whose range fp16 lacks; need bf16 or int8")
            if move == "gather" and wire == "fp32" != precision:
                raise UserError(f"{key}, and weights hold no more; need {precision}")


def _check_use(chosen: dict[str, str], placement: Placement, levels: Levels, prefix: str) -> None:
    for name, wire in chosen.items():
        if levels.names.index(name) >= placement.optimizer:
            raise UserError(
                f"{prefix}.wires.gather.{name}: {wire}, but weights are not sent over that level "
                "with this placement; leave it out"
            )


def _settle_deltas(
    gather: list[str], chosen: dict[str, str], placement: Placement, levels: Levels, prefix: str
) -> None:
    """Refuse chosen deltas that cannot work, and turn a preset's own into int8.

    A delta is passed on from the slowest level inwards. Once a level has sent whole weights, the
    levels inside it have no delta to pass on.
    """
    sends_weights = False
    for level in reversed(range(len(gather))):
        name, is_delta = levels.names[level], make_wire(gather[level]).is_delta
        # Only weights that are sent once per step, into copies that are kept, can be deltas.
        publishes = placement.backward_weights <= level < placement.optimizer
        if is_delta and (sends_weights or not publishes):
            if name in chosen:
                reason = (
                    "but a slower level has no delta; need one there too, or int8"
                    if publishes
                    else "but this placement does not publish weights over that level; need int8, "
                    "bf16 or fp32"
                )
                raise UserError(f"{prefix}.wires.gather.{name}: {gather[level]}, {reason}")
            gather[level] = "int8"
        sends_weights = sends_weights or (publishes and not is_delta and levels.sizes[level] > 1)
