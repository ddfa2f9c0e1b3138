"""Tables in Markdown, and how figures stand in their cells."""

import statistics
from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A table, its first columns text and the others numbers."""
    sides = "---|" * text_columns + "---:|" * (len(head) - text_columns)
    lines = [f"| {' | '.join(head)} |", f"|{sides}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median, smallest and largest."""
    if not values:
        return ""
    middle = f"{statistics.median(values):{form}}"
    return f"{middle} ({min(values):{form}} – {max(values):{form}})"


def middle_of(values: Sequence[float], form: str) -> str:
    """The median, or nothing where there are none."""
    return f"{statistics.median(values):{form}}" if values else ""


def gib(values: Sequence[float]) -> str:
    """The median of bytes, in GiB."""
    return middle_of([value / 2**30 for value in values], ".2f")


def number(value: float | None) -> str:
    """Three digits, or nothing where there is none."""
    return "" if value is None else f"{value:.3f}"
