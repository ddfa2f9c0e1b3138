"""Which format each level gets: presets, single choices over them, and what cannot be."""

from megafrontier.common.errors import UserError
from megafrontier.config import PartitionConfig, WiresConfig
from megafrontier.parallel.hierarchy import Levels
from megafrontier.partition.placement import Placement, node_depth
from megafrontier.partition.wires.wire import Wires, make_wire

Formats = list[str]
"""One format a level, fastest first."""


def choose_wires(
    config: WiresConfig, placement: Placement, levels: Levels, precision: str
) -> Wires:
    """The wires that a configuration asks for. Raises UserError naming the level that cannot."""
    gather, reduce = _PRESETS[config.preset](placement, levels, precision)
    _override(gather, config.gather, levels, "gather")
    _override(reduce, config.reduce, levels, "reduce")
    _check_precision(config, precision)
    _check_use(config.gather, placement, levels)
    _settle_deltas(gather, config.gather, placement, levels)
    rotates = _unless_chosen(config.rotation, config)
    wires = Wires(
        tuple(make_wire(name) for name in gather),
        tuple(make_wire(name, rotates) for name in reduce),
    )
    if config.rotation and not any(wire.codec.is_quantized for wire in wires.reduce):
        raise UserError(
            "partition.wires.rotation: true, but no level has a wire of few bits for gradients; "
            "leave it out"
        )
    return wires


def has_error_feedback(
    config: PartitionConfig, wires: Wires, placement: Placement, levels: Levels
) -> bool:
    """Whether gradient messages carry the quantisation error of earlier ones: as chosen, else with
    `low` where it takes but a shard's memory. Raises UserError where they are to, and none has
    any."""

    def has_errors(placement: Placement) -> bool:
        return any(
            wires.reduce[level].codec.is_quantized for level in placement.error_feedback_levels
        )

    if config.error_feedback and not has_errors(placement):
        raise UserError(
            "partition.error_feedback: true, but no level that gradients cross within "
            "partition.optimizer has a wire of few bits; leave it out"
        )
    here = placement.on(levels)
    if config.error_feedback is None and here.gradients == here.optimizer:
        return False
    return has_errors(here) and _unless_chosen(config.error_feedback, config.wires)


def _unless_chosen(choice: bool | None, wires: WiresConfig) -> bool:
    return wires.preset == "low" if choice is None else choice


def _exact(_placement: Placement, levels: Levels, precision: str) -> tuple[Formats, Formats]:
    count = len(levels.names)
    return [precision] * count, [precision] * count


def _zero_plus_plus(
    placement: Placement, levels: Levels, precision: str
) -> tuple[Formats, Formats]:
    """ZeRO++ (arXiv:2306.10209): weights in int8 between nodes; gradients in int4 in two hops,
    over the node and between nodes. A level inside the node's fastest link stays as it is."""
    gather, reduce = _exact(placement, levels, precision)
    network = _first_between_nodes(levels)
    for level in range(network, len(gather)):
        gather[level] = "int8"
    for level in range(max(network - 1, 0), len(reduce)):
        reduce[level] = "int4"
    return gather, reduce


def _low(placement: Placement, levels: Levels, precision: str) -> tuple[Formats, Formats]:
    """Exact inside the fastest level, gradients int8 in the node and int4 beyond, both rotated.

    Weights are published as 4-bit changes, encoded once by their owner: passing the same codes on
    inside the node costs no further error. Where they are gathered in every micro-batch instead,
    there is no last copy to change, and they go as int8.
    """
    gather, reduce = _exact(placement, levels, precision)
    for level in range(min(1, len(gather) - 1), len(gather)):
        gather[level] = "delta4" if _publishes(placement, level) else "int8"
        reduce[level] = "int4" if level >= _first_between_nodes(levels) else "int8"
    return gather, reduce


def _first_between_nodes(levels: Levels) -> int:
    """The first level that joins nodes; the last one, where all of them lie within a node."""
    return min(node_depth(levels), len(levels.names) - 1)


_PRESETS = {"exact": _exact, "zero++": _zero_plus_plus, "low": _low}


def _publishes(placement: Placement, level: int) -> bool:
    """Whether weights cross a level once per step, into copies that persist."""
    return placement.backward_weights <= level < placement.optimizer


def _override(formats: Formats, chosen: dict[str, str], levels: Levels, move: str) -> None:
    for name, wire in chosen.items():
        if name not in levels.names:
            known = ", ".join(levels.names)
            raise UserError(f"partition.wires.{move}.{name}: no such level, need one of {known}")
        formats[levels.names.index(name)] = wire


def _check_precision(config: WiresConfig, precision: str) -> None:
    """Refuse fp16 where values may leave its range, and fp32 for weights that are not."""
    for move, chosen in (("gather", config.gather), ("reduce", config.reduce)):
        for name, wire in chosen.items():
            key = f"partition.wires.{move}.{name}: {wire}, but train.precision is {precision}"
            if wire == "fp16" != precision:
                raise UserError(f"{key}, whose range fp16 lacks; need bf16 or int8")
            if move == "gather" and wire == "fp32" != precision:
                raise UserError(
                    f"{key}, and weights hold no more; need {precision}, or leave it out"
                )


def _check_use(chosen: dict[str, str], placement: Placement, levels: Levels) -> None:
    for name, wire in chosen.items():
        if levels.names.index(name) >= placement.optimizer:
            raise UserError(
                f"partition.wires.gather.{name}: {wire}, but this placement has all of the weights "
                "within that level; leave it out"
            )


def _settle_deltas(
    gather: Formats, chosen: dict[str, str], placement: Placement, levels: Levels
) -> None:
    """Refuse deltas that cannot be; a preset's own give way to what was chosen for a slower level.

    Deltas come from the slowest levels inwards: each goes on with the change that the one before
    has brought, and where that brought values there is none.
    """
    has_values = False
    for level in reversed(range(len(gather))):
        name, is_delta = levels.names[level], gather[level].startswith("delta")
        publishes = _publishes(placement, level)
        key = f"partition.wires.gather.{name}: {gather[level]}"
        if is_delta and not publishes:
            raise UserError(
                f"{key}, but this placement does not publish weights over that level: need int8, "
                "bf16 or fp32"
            )
        if is_delta and has_values:
            if name in chosen:
                raise UserError(
                    f"{key}, but a slower level has no delta: need one there too, or int8"
                )
            gather[level] = "int8"
        has_values = has_values or (publishes and not is_delta and levels.sizes[level] > 1)
