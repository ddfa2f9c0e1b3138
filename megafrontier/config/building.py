"""Plain values become dataclasses."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from math import isfinite
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from megafrontier.common.errors import UserError, need
from megafrontier.config.fields import section_class


def build(kind: Any, value: Any, key: str = "") -> Any:
    """`value` (plain containers, in which numbers may be text) as an instance of the type `kind`.

    `key` is its place. Raises UserError for the first value that does not fit.
    """
    if kind is Any:
        return value
    if get_origin(kind) in (Union, UnionType):
        return _build_union(get_args(kind), value, key)
    if is_dataclass(kind):
        return _build_fields(kind, value, key)
    if get_origin(kind) in (list, tuple, dict):
        return _build_container(kind, value, key)
    converted = _converted(kind, value)
    need(converted is not None, key, shown(value), f"need {_described(kind)}")
    return converted


def known_values(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the dataclass `kind` has, in all sections: another version may have saved
    others."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in values:
            value, inner = values[field.name], section_class(field.type)
            is_section = inner is not None and isinstance(value, Mapping)
            found[field.name] = known_values(inner, value) if is_section else value
    return found


def _build_union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    """`value` as the first type that it fits, or null."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return build(kinds[0], value, key)
    containers = {get_origin(kind): kind for kind in kinds if get_origin(kind) in (list, dict)}
    if type(value) in containers:
        return _build_container(containers[type(value)], value, key)
    single = [kind for kind in kinds if kind not in containers.values()]
    found = [part for kind in single if (part := _converted(kind, value)) is not None]
    need(found != [], key, shown(value), f"need {' or '.join(map(_described, kinds))}")
    return found[0]


def _build_fields(kind: Any, value: Any, key: str) -> Any:
    types = {f.name: f.type for f in fields(kind)}
    known = ", ".join(types)
    if not isinstance(value, dict):
        raise UserError(f"{key or 'config'}: {shown(value)}, need keys among {known}")
    keys = {name: f"{key}.{name}".removeprefix(".") for name in value}
    for name in value:
        if name not in types:
            near = get_close_matches(str(name), types, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            fits = f"no such key; {meant}known keys: {known}"
            raise UserError(f"{keys[name]}: {shown(value[name])}, {fits}")
    return kind(**{name: build(types[name], v, keys[name]) for name, v in value.items()})


def _build_container(kind: Any, value: Any, key: str) -> Any:
    container, parts = get_origin(kind), get_args(kind)
    fits = isinstance(value, dict if container is dict else list | tuple)
    fits = fits and (container is not tuple or len(value) == len(parts))
    need(fits, key, shown(value), f"need {_described(kind)}")
    if container is dict:
        return {name: build(parts[1], v, f"{key}.{name}") for name, v in value.items()}
    return container(build(parts[0], v, f"{key}[{i}]") for i, v in enumerate(value))


_FLAGS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)


def _converted(kind: Any, value: Any) -> Any:
    """A single value as text, number, flag or choice; None if it is none of that kind."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if value is None or isinstance(value, dict | list):
        return None
    if kind is bool or isinstance(value, bool):
        return _FLAGS.get(str(value).lower()) if kind is bool else None
    try:
        # With base 0, 0x10 is read, and 010 is refused.
        found = int(value, 0) if kind is int and isinstance(value, str) else kind(value)
    except (ValueError, OverflowError):
        return None
    if kind is int and (isinstance(value, float) or abs(found) >= 2**63):
        return None
    return None if kind is float and not isfinite(found) else found


def _described(kind: Any) -> str:
    parts = get_args(kind)
    words = {
        bool: "true or false",
        int: "an integer",
        float: "a finite number",
        str: "text",
        list: "a list",
        tuple: f"a list of {len(parts)}",
        dict: "keys and values, as in {KEY: VALUE}",
        Literal: f"one of {', '.join(map(str, parts))}",
    }
    return words[get_origin(kind) or kind]


def shown(value: Any) -> str:
    """A value in an error."""
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
