"""Fields of dataclasses with bounds, which `validation.py` checks."""

from dataclasses import field
from typing import Any


def bounded(default: Any, **bounds: float) -> Any:
    """A field of numbers with bounds: `at_least`, `above`, `at_most`, `below`."""
    return field(default=default, metadata=bounds)


def count(default: int | None) -> Any:
    """A field that counts something, from 1 to what libraries with 32-bit integers accept."""
    return bounded(default, at_least=1, below=2**31)
