"""Find the levels of a machine in what was measured, and compare them with its machine file."""

from collections.abc import Iterator, Sequence

from megafrontier.config import DeviceConfig, LevelConfig, MachineConfig
from megafrontier.parallel.hierarchy import Levels
from megafrontier.probe.links import Link

ALIKE = 0.7
"""Distances belong to one level if the bandwidth at the longer one is at least this share of that
at the shorter one."""
FAR_OFF = 0.7, 1.5
"""A rate below or above these shares of the expected one is a surprise."""
BEYOND = 1.1
"""And so is one above this share of the line rate."""


def cluster(levels: Levels, rates: Sequence[float], per_host: int) -> Levels:
    """Join neighbouring levels with similar bandwidth.

    rates: of each level, in bytes a second. The levels within a host and those beyond it are never
    joined, because a run cannot mix them.
    """
    sizes: list[int] = []
    base, inside = 0.0, 1
    for size, rate in zip(levels.sizes, rates, strict=True):
        is_first_outside = inside == per_host
        if sizes and not is_first_outside and rate >= ALIKE * base:
            sizes[-1] *= size
        else:
            sizes.append(size)
            base = rate
        inside *= size
    return Levels(_names(sizes, per_host), tuple(sizes))


def _names(sizes: Sequence[int], per_host: int) -> tuple[str, ...]:
    """`node` for the level that completes a host, `world` for the last one."""
    names, total, numbers = [], 1, iter(range(1, len(sizes) + 1))
    for place, size in enumerate(sizes):
        total *= size
        if place == len(sizes) - 1 and (total > per_host or place == 0):
            names.append("world")
        elif total == per_host:
            names.append("node")
        elif place == 0:
            names.append("pair")
        else:
            names.append(f"level{next(numbers)}")
    return tuple(names)


def machine_of(
    levels: Levels,
    links: Sequence[Link],
    losses: Sequence[float],
    device: DeviceConfig,
    stated: MachineConfig | None,
) -> MachineConfig:
    """The measured levels, and `device`. The last level's size is left open. Line rates and the
    storage are those of the machine file.

    losses: of computing beside a collective of each level (`measure_contention`).
    """
    stated = stated or MachineConfig()
    found = {}
    for place, (name, size, link) in enumerate(zip(levels.names, levels.sizes, links, strict=True)):
        is_last = place == len(levels.names) - 1
        found[name] = LevelConfig(
            None if is_last else size,
            float(f"{link.bytes_per_second / 1e9:.4g}"),
            stated.levels.get(name, LevelConfig()).line_gigabytes_per_second,
            float(f"{link.latency_seconds * 1e6:.3g}"),
            float(f"{losses[place]:.2g}"),
        )
    return MachineConfig(found, device, stated.storage)


def surprises(
    strides: Levels,
    pairs: Sequence[Sequence[float]],
    found: Levels,
    rates: Sequence[float],
    stated: MachineConfig | None,
) -> Iterator[str]:
    """One line for each rank whose link is slower than its like, and for each level that the
    machine file states otherwise.

    pairs: bytes a second of each rank at each stride; rates: of each level that was found.
    """
    for level, stride in enumerate(strides.strides):
        usual = sorted(row[level] for row in pairs)[len(pairs) // 2]
        for rank, row in enumerate(pairs):
            if row[level] < FAR_OFF[0] * usual:
                yield (
                    f"rank {rank} at distance {stride}: {row[level] / 1e9:.3g} GB/s, "
                    f"others {usual / 1e9:.3g}"
                )
    if stated is None:
        return
    sizes = {name: level.size for name, level in stated.levels.items()}
    for name, size, rate in zip(found.names, found.sizes, rates, strict=True):
        if name not in stated.levels:
            yield f"level {name} of {size}: the machine file has {_listed(sizes)}"
            continue
        expected = stated.levels[name]
        if expected.size not in (None, size):
            yield f"level {name}: {size} ranks measured, the machine file says {expected.size}"
        line = expected.line_gigabytes_per_second
        if line is not None and rate / 1e9 > BEYOND * line:
            yield f"level {name}: {rate / 1e9:.3g} GB/s measured, more than its line rate {line:g}"
        elif expected.gigabytes_per_second is not None:
            share = rate / 1e9 / expected.gigabytes_per_second
            if not FAR_OFF[0] <= share <= FAR_OFF[1]:
                yield (
                    f"level {name}: {rate / 1e9:.3g} GB/s measured, the machine file says "
                    f"{expected.gigabytes_per_second:g}"
                )


def _listed(sizes: dict[str, int | None]) -> str:
    return ", ".join(f"{name} {'?' if size is None else size}" for name, size in sizes.items())
