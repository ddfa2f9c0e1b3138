"""Fields of dataclasses with bounds, which `validation.py` checks, and with what a resume does.

Note [Changed since the checkpoint]
A field says what a resume does if its value is not that of the checkpoint:

refuse   an error, because the model computes something else
samples  a warning, because sample numbers then stand for other tokens
batch    a line in the log; as `samples` if weights of corpora change at some steps
warn     a warning
report   a line in the log, because training goes on differently
ignore   nothing

A field without a mark has that of its section. All sections of `Config` have one.
"""

from dataclasses import field, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

Resume = Literal["refuse", "samples", "batch", "warn", "report", "ignore"]
RESUME = "resume"
"""The key of a field's metadata that has its mark (Note [Changed since the checkpoint])."""


def bounded(default: Any, resume: Resume | None = None, **bounds: float) -> Any:
    """A field of numbers with bounds: `at_least`, `above`, `at_most`, `below`."""
    return field(default=default, metadata={**bounds, **({RESUME: resume} if resume else {})})


def count(default: int | None, resume: Resume | None = None, at_most: int | None = None) -> Any:
    """A field that counts something, from 1 to what libraries with 32-bit integers accept.

    at_most: beyond the sizes of any model, for sizes that take hours to build, or overflow.
    """
    most = {} if at_most is None else {"at_most": at_most}
    return bounded(default, resume, at_least=1, below=2**31, **most)


def marked(default: Any, resume: Resume) -> Any:
    """A field with a mark (Note [Changed since the checkpoint])."""
    return field(default=default, metadata={RESUME: resume})


def section(kind: type, resume: Resume) -> Any:
    """A field that is a section, with the mark of its fields."""
    return field(default_factory=kind, metadata={RESUME: resume})


def section_class(kind: Any) -> Any:
    """The dataclass of a field of type `kind` that is a section, perhaps an optional one, or
    None."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((part for part in kinds if is_dataclass(part)), None)
