"""Text that YAML takes for a number: `1.10`, `0012`, `12:30`, `2024_01_15`, `12e4567`."""

import re
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin

import yaml

from megafrontier.config.fitting import field_kinds, without_none


def as_spelled(kind: Any, values: Any, text: str) -> Any:
    """What YAML made of `text` (plain containers), with the words themselves wherever the type
    `kind` wants text: two runs named 1.1 and 1.10 are two. Not what a merge key (`<<`) brings."""
    return _restored(kind, values, yaml.load(text, yaml.BaseLoader))


def kind_at(kind: Any, key: str) -> Any:
    """The type of the value at `key`, as in data.train[0].path; Any for a key that is not known."""
    for part in re.findall(r"[^.\[\]]+", key):
        kind = _kind_of_part(without_none(kind), part)
    return kind


def _restored(kind: Any, value: Any, spelled: Any) -> Any:
    kind = without_none(kind)
    if isinstance(value, dict) and isinstance(spelled, dict):
        return {
            name: _restored(_kind_of_part(kind, name), part, spelled.get(str(name)))
            for name, part in value.items()
        }
    if isinstance(value, list) and isinstance(spelled, list) and len(value) == len(spelled):
        pairs = enumerate(zip(value, spelled, strict=True))
        return [_restored(_kind_of_part(kind, i), part, word) for i, (part, word) in pairs]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return spelled if kind is str and is_number and isinstance(spelled, str) else value


def _kind_of_part(kind: Any, part: Any) -> Any:
    if is_dataclass(kind):
        return field_kinds(kind).get(part, Any)
    container, parts = get_origin(kind), get_args(kind)
    if container is dict:
        return parts[1]
    return parts[0] if container in (list, tuple) else Any
