"""Text that YAML takes for a number: `1.10`, `0012`, `12:30`, `2024_01_15`, `12e4567`."""

import re
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin

import yaml

from megafrontier.common.errors import UserError
from megafrontier.config.fitting import field_kinds, joined, without_none


def as_spelled(kind: Any, values: Any, text: str, key: str = "") -> Any:
    """What YAML made of `text` (plain containers), with the words themselves wherever the type
    `kind` wants text: two runs named 1.1 and 1.10 are two. Not what a merge key (`<<`) brings.

    Raises UserError with the key, below `key`, of a number that reads as another one: YAML 1.1
    takes 010 for 8 and 1:30 for 90.
    """
    return _restored(kind, values, yaml.load(text, yaml.BaseLoader), key)


def kind_at(kind: Any, key: str) -> Any:
    """The type of the value at `key`, as in data.train[0].path; Any for a key that is not known."""
    for part in re.findall(r"[^.\[\]]+", key):
        kind = _kind_of_part(without_none(kind), part)
    return kind


def _restored(kind: Any, value: Any, spelled: Any, key: str) -> Any:
    kind = without_none(kind)
    if isinstance(value, dict) and isinstance(spelled, dict):
        return {
            name: _restored(
                _kind_of_part(kind, name), part, spelled.get(str(name)), joined(key, name)
            )
            for name, part in value.items()
        }
    if isinstance(value, list) and isinstance(spelled, list) and len(value) == len(spelled):
        pairs = enumerate(zip(value, spelled, strict=True))
        return [
            _restored(_kind_of_part(kind, i), part, word, f"{key}[{i}]")
            for i, (part, word) in pairs
        ]
    if not _is_number(value) or not isinstance(spelled, str):
        return value
    if kind in (int, float) and re.match(r"[-+]?(0[0-9_]+$|[^:]*:)", spelled):
        raise UserError(f"{key}: {spelled}, need a decimal number; YAML would read {value}")
    return spelled if kind is str else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind_of_part(kind: Any, part: Any) -> Any:
    if is_dataclass(kind):
        return field_kinds(kind).get(part, Any)
    container, parts = get_origin(kind), get_args(kind)
    if container is dict:
        return parts[1]
    return parts[0] if container in (list, tuple) else Any
