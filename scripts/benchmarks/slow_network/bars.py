"""The bars of the slow network: ratios within one run, reached or missed, and by how much."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scripts.benchmarks.shared.tables import markdown
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

    def cells(self) -> list[str]:
        """A line of the table."""
        if self.limit is None:
            return [self.what, f"{self.value:.3f}", "–", ""]
        is_reached = self.value >= self.limit if self.least else self.value <= self.limit
        short = abs(self.value / self.limit - 1) * 100
        word = "reached" if is_reached else f"missed by {short:.1f} %"
        return [
            self.what,
            f"{self.value:.3f}",
            f"{'≥' if self.least else '≤'} {self.limit:g}",
            word,
        ]


def bars(figures: Figures) -> str:
    """Markdown of every bar for which there are rows."""
    body = markdown(["ratio", "measured", "bar", ""], (bar.cells() for bar in all_bars(figures)))
    return f"### Bars\n\n{body}"


def all_bars(figures: Figures) -> Iterator[Bar]:
    """In the order of the document."""
    multi = [row for row in figures.rows if row.nodes > 1 and not row.skipped]
    if not multi:
        return
    nodes = max(r.nodes for r in multi)
    for group in sorted({r.group for r in multi if r.nodes == nodes}, key=lambda g: (-g[2], g[1])):
        yield from _speed(figures, *group)
    for exact, hybrid in _beside_hybrid(figures, multi):
        times = hybrid.median_seconds / exact.median_seconds
        yield Bar(f"topo exact over FSDP2 hybrid: {_where(hybrid)}", times, 1.0)
    yield from _worst(
        (
            (exact.memory_bytes / hybrid.memory_bytes, hybrid)
            for exact, hybrid in _beside_hybrid(figures, figures.rows)
            if hybrid.memory_bytes
        ),
        lambda row: f"peak memory of topo exact over FSDP2 hybrid's, worst ({_where(row)})",
        1.0,
    )
    yield from _efficiency(figures, nodes)
    yield from _worst(
        ((abs(row.excess or 0.0), row) for row in multi if row.ledger_bytes and row.excess),
        lambda row: (
            "NIC bytes without protocol off the formula, worst of ours "
            f"({row.strategy}, {row.nodes} nodes, accumulation {row.accumulation})"
        ),
        0.03,
    )
    yield from _worst(
        ((figures.over_bound(r), r) for r in multi if r.strategy.endswith("full overlap")),
        lambda row: f"step over its bound, worst with full overlap ({row.strategy}, {_where(row)})",
        1.15,
    )


def _worst(
    pairs: Iterable[tuple[float | None, Row]], what: Callable[[Row], str], limit: float
) -> Iterator[Bar]:
    """The largest value, which has to keep within the limit."""
    known = [(value, row) for value, row in pairs if value is not None]
    if known:
        value, row = max(known, key=lambda pair: pair[0])
        yield Bar(what(row), value, limit, least=False)


def best(figures: Figures, name: str, nodes: int, slower: float, accumulation: int) -> Row | None:
    """One of the engine's strategies with the overlap it would be used with."""
    names = (*(f"{name}, {policy} overlap" for policy in POLICIES), name)
    rows = (figures.find(each, nodes, slower, accumulation) for each in names)
    return next((row for row in rows if row is not None), None)


def _speed(figures: Figures, nodes: int, slower: float, accumulation: int) -> Iterator[Bar]:
    where = f"{nodes} nodes, {slower:g} × slower, accumulation {accumulation}"
    key = (nodes, slower, accumulation)
    low, alone = best(figures, "topo low", *key), figures.find(ALONE, *key)
    limits = (("hpz + zero++", 4, 1.71), ("zero3", 4, 2.40), ("FSDP2 hybrid", 1, 1.5))
    for name, at, limit in limits:
        rival = best(figures, name, *key)
        if low is None or rival is None:
            continue
        times = rival.median_seconds / low.median_seconds
        compute = figures.compute(rival)
        dominates = compute is not None and figures.link_seconds(rival) > compute
        asked = accumulation == at and dominates
        yield Bar(f"topo low over {name}: {where}", times, limit if asked else None)
    if low is not None and alone is not None and accumulation == 4:
        value, most = low.median_seconds / alone.median_seconds, 1.15
        asked = slower == SLOWEST_ASKED
        what = f"topo low step over computing alone: {where}"
        yield Bar(what, value, most if asked else None, least=False)


def _beside_hybrid(figures: Figures, rows: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    """(topo exact, FSDP2 hybrid) of each group that has both."""
    for row in rows:
        exact = best(figures, "topo exact", *row.group)
        if row.strategy == "FSDP2 hybrid" and exact is not None:
            yield exact, row


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
