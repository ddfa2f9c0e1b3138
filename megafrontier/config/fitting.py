"""Do plain values fit a dataclass? Says where not, and what would.

OmegaConf converts the values afterwards. It is asked second because its own errors lose the path
inside lists, and because it takes 7 for a bool and an infinite learning rate.
"""

import math
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from megafrontier.common.errors import UserError

MISSING = "???"
"""OmegaConf's mark of a missing value."""


def check_fit(kind: Any, value: Any, key: str = "") -> None:
    """Refuse a `value` (plain containers, `${…}` unresolved) that is not of the type `kind`.

    Raises UserError naming the key, the value and what would fit.
    """
    if kind is Any or (isinstance(value, str) and "${" in value):
        return
    if is_optional(kind):
        if value is not None:
            check_fit(without_none(kind), value, key)
    elif is_dataclass(kind):
        _check_fields(kind, value, key)
    elif get_origin(kind) in (list, tuple, dict):
        _check_container(kind, value, key)
    elif not _leaf_fits(kind, value):
        raise UserError(f"{key}: {_shown(value)}, need {_described(kind)}")


def is_optional(kind: Any) -> bool:
    """Whether None is of the type `kind`, as of `int | None`."""
    return get_origin(kind) in (Union, UnionType)


def without_none(kind: Any) -> Any:
    """What an optional type is of besides None; any other type itself."""
    if is_optional(kind):
        return next(k for k in get_args(kind) if k is not type(None))
    return kind


def field_kinds(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    return {f.name: f.type for f in fields(kind)}


def _check_fields(kind: Any, value: Any, key: str) -> None:
    kinds = field_kinds(kind)
    if not isinstance(value, dict):
        raise UserError(f"{key or 'config'}: {_shown(value)}, need keys among {', '.join(kinds)}")
    for name, part in value.items():
        if name not in kinds:
            near = get_close_matches(str(name), kinds, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"{joined(key, _shown(name))}: {_shown(part)}, no such key; "
                f"{meant}known keys: {', '.join(kinds)}"
            )
        check_fit(kinds[name], part, joined(key, name))


def missing_key(values: Any, key: str = "") -> str | None:
    """The first key whose value is OmegaConf's mark of a missing one, which a merge would pass
    over."""
    if values == MISSING:
        return key
    parts = values.items() if isinstance(values, dict) else ()
    return next(filter(None, (missing_key(part, joined(key, name)) for name, part in parts)), None)


def _check_container(kind: Any, value: Any, key: str) -> None:
    container, parts = get_origin(kind), get_args(kind)
    fits = isinstance(value, dict if container is dict else list | tuple)
    if not fits or (container is tuple and len(value) != len(parts)):
        raise UserError(f"{key}: {_shown(value)}, need {_described(kind)}")
    if container is dict:
        for name, part in value.items():
            check_fit(parts[1], part, joined(key, name))
    else:
        for i, part in enumerate(value):
            check_fit(parts[0], part, f"{key}[{i}]")


def _leaf_fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if value is None or value == MISSING:
        return False
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and _is_finite(value)
    if kind is int:
        return isinstance(value, int) and abs(value) < 2**63
    return isinstance(value, int | float | str) if kind is str else isinstance(value, kind)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _described(kind: Any) -> str:
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(kind) is list:
        return "a list"
    if get_origin(kind) is tuple:
        return f"a list of {len(parts)}"
    if get_origin(kind) is dict:
        return "keys and values, as in {KEY: VALUE}"
    return {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}[kind]


def _shown(value: Any) -> str:
    try:
        text = "null" if value is None else repr(value) if _is_quoted_number(value) else str(value)
    except ValueError:  # Python's, who writes no integer of more than 4,300 digits
        text = "thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _is_quoted_number(value: Any) -> bool:
    """Whether only quotes tell it from one that would fit."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def joined(key: str, name: Any) -> str:
    """The key of a part of the value at `key`."""
    return f"{key}.{name}" if key else str(name)
