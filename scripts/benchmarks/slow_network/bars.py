"""The bars of the slow network: ratios within one run, reached or missed, and by how much."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scripts.benchmarks.slow_network.report import ALONE, Figures, Row

POLICIES = ("full", "safe")
SLOWEST_ASKED = 16.0
"""Times slower than Frontier: the slowest link for which there are bars."""


@dataclass(frozen=True)
class Bar:
    """A ratio that was measured and the value it has to reach (`least`) or keep within.

    Without a limit the ratio is only to be stated.
    """

    what: str
    value: float
    limit: float | None
    least: bool = True

    @property
    def reached(self) -> bool:
        """Whether the limit, if any, is kept."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.least else self.value <= self.limit

    def line(self) -> str:
        """A line of the table."""
        if self.limit is None:
            return f"| {self.what} | {self.value:.3f} | – | |"
        sign = "≥" if self.least else "≤"
        short = abs(self.value / self.limit - 1) * 100
        word = "reached" if self.reached else f"missed by {short:.1f} %"
        return f"| {self.what} | {self.value:.3f} | {sign} {self.limit:g} | {word} |"


def bars(figures: Figures) -> str:
    """Markdown of every bar for which there are rows."""
    lines = ["### Bars\n", "| ratio | measured | bar | |", "|---|---:|---:|---|"]
    lines += [bar.line() for bar in all_bars(figures)]
    return "\n".join(lines)


def all_bars(figures: Figures) -> Iterator[Bar]:
    """In the order of the issue."""
    multi = [row for row in figures.rows if row.nodes > 1 and not row.skipped]
    if not multi:
        return
    nodes = max(r.nodes for r in multi)
    for group in sorted({r.group for r in multi if r.nodes == nodes}, key=lambda g: (-g[2], g[1])):
        yield from _speed(figures, *group)
    yield from _against_hybrid(figures, multi)
    yield from _memory(figures)
    yield from _efficiency(figures, nodes)
    yield from _bytes(multi)
    yield from _overlap(figures, multi)


def best(figures: Figures, name: str, nodes: int, slower: float, accumulation: int) -> Row | None:
    """One of the engine's strategies with the overlap it would be used with."""
    for full_name in (*(f"{name}, {policy} overlap" for policy in POLICIES), name):
        row = figures.find(full_name, nodes, slower, accumulation)
        if row is not None:
            return row
    return None


def _times(fast: Row | None, slow: Row | None) -> float | None:
    """How many times faster `fast` is."""
    if fast is None or slow is None:
        return None
    return slow.median_seconds / fast.median_seconds


def _speed(figures: Figures, nodes: int, slower: float, accumulation: int) -> Iterator[Bar]:
    where = f"{nodes} nodes, {slower:g} × slower, accumulation {accumulation}"
    key = (nodes, slower, accumulation)
    low, alone = best(figures, "topo low", *key), figures.find(ALONE, *key)
    limits = (("hpz + zero++", 4, 1.71), ("zero3", 4, 2.40), ("FSDP2 hybrid", 1, 1.5))
    for name, at, limit in limits:
        rival = best(figures, name, *key)
        times = _times(low, rival)
        if times is None or rival is None:
            continue
        asked = accumulation == at and _communication_dominates(figures, rival)
        yield Bar(f"topo low over {name}: {where}", times, limit if asked else None)
    times = _times(low, alone)
    if times is not None and accumulation == 4:
        limit = 1.15 if slower == SLOWEST_ASKED else None
        yield Bar(f"topo low step over computing alone: {where}", 1 / times, limit, least=False)


def _communication_dominates(figures: Figures, rival: Row) -> bool:
    """Whether what a rival sends takes longer than all computing."""
    compute = figures.compute(rival)
    return compute is not None and figures.link_seconds(rival) > compute


def _beside_hybrid(figures: Figures, rows: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    """(topo exact, FSDP2 hybrid) of each group that has both."""
    for row in rows:
        exact = best(figures, "topo exact", *row.group)
        if row.strategy == "FSDP2 hybrid" and exact is not None:
            yield exact, row


def _against_hybrid(figures: Figures, rows: Iterable[Row]) -> Iterator[Bar]:
    for exact, hybrid in _beside_hybrid(figures, rows):
        times = hybrid.median_seconds / exact.median_seconds
        yield Bar(f"topo exact over FSDP2 hybrid: {_where(hybrid)}", times, 1.0)


def _memory(figures: Figures) -> Iterator[Bar]:
    found = [
        (exact.memory_bytes / hybrid.memory_bytes, hybrid)
        for exact, hybrid in _beside_hybrid(figures, figures.rows)
        if hybrid.memory_bytes
    ]
    if found:
        value, row = max(found, key=lambda pair: pair[0])
        what = f"peak memory of topo exact over FSDP2 hybrid's, worst ({_where(row)})"
        yield Bar(what, value, 1.0, least=False)


def _where(row: Row) -> str:
    return f"{row.nodes} nodes, {row.slower:g} ×, accumulation {row.accumulation}"


def _efficiency(figures: Figures, nodes: int) -> Iterator[Bar]:
    for accumulation in sorted({r.accumulation for r in figures.rows}):
        for name in ("topo exact", "topo low"):
            row = best(figures, name, nodes, 1.0, accumulation)
            value = figures.efficiency(row) if row else None
            if row is not None and value is not None:
                where = f"1 to {nodes} nodes, accumulation {accumulation}"
                yield Bar(f"scaling efficiency of {row.strategy}: {where}", value, 0.94)


def _bytes(rows: Iterable[Row]) -> Iterator[Bar]:
    off = [(abs(r.excess), r) for r in rows if r.ledger_bytes is not None and r.excess is not None]
    if off:
        value, row = max(off, key=lambda pair: pair[0])
        where = f"{row.strategy}, {row.nodes} nodes, accumulation {row.accumulation}"
        what = f"NIC bytes without protocol off the formula, worst of ours ({where})"
        yield Bar(what, value, 0.03, least=False)


def _overlap(figures: Figures, rows: Iterable[Row]) -> Iterator[Bar]:
    full = [(figures.over_bound(r), r) for r in rows if r.strategy.endswith("full overlap")]
    known = [(value, row) for value, row in full if value is not None]
    if known:
        value, row = max(known, key=lambda pair: pair[0])
        what = f"step over its bound, worst with full overlap ({row.strategy}, {_where(row)})"
        yield Bar(what, value, 1.15, least=False)
