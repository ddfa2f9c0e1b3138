"""Read YAML and JSON of any origin: size, depth and number of nodes are bounded before more of the
text is built."""

import json
from pathlib import Path
from typing import Any

import yaml

LARGEST_YAML = 2**20
"""Bytes of a YAML file. PyYAML reads about a third of a megabyte a second."""
LARGEST_JSON = 2**26
"""Bytes of a JSON file. The index of the largest models' tensors has 10 MB."""
DEEPEST = 50
"""Mappings and lists inside each other."""
MOST_NODES = 20_000
"""Values of a YAML text, with those of an alias as often as it is used."""


class _Loader(yaml.SafeLoader):
    """Reads every value as text, and refuses a key that is given twice.

    `config.building` converts the text to the field's type. YAML would convert it by its looks:
    runs named 1.1 and 1.10 would share a folder, and 010 would be 8.
    """

    yaml_implicit_resolvers = {
        first: [found for found in resolvers if found[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    yaml_constructors = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":null", ":str", ":seq", ":map"))
    } | dict.fromkeys(
        (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float")),
        yaml.SafeLoader.construct_yaml_str,
    )

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._counts: dict[int, int] = {}
        """Nodes in each composed node, by its id."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        before = self._count
        self._count += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.YAMLError(f"nested more than {DEEPEST} deep, need less")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._counts[id(node)] = self._count - before
        elif id(node) in self._counts:
            self._count += self._counts[id(node)]
        else:
            raise yaml.YAMLError(f"the alias *{event.anchor} lies inside its own anchor")
        if self._count > MOST_NODES:
            raise yaml.YAMLError(f"more than {MOST_NODES} values, need fewer")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for name in (str(key.value) for key, _ in node.value):
            if name in names:
                problem = f"duplicate key {name}"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The containers of a YAML text, in which every value is text or null. Raises
    yaml.YAMLError."""
    return yaml.load(text, _Loader)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also if it is nested too deeply."""
    too_deep = f"nested more than {DEEPEST} deep, need less"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [inner for outer in level for inner in _items(outer)]
        if not level:
            return value
    raise ValueError(too_deep)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def read_text(path: Path, most: int) -> str:
    """The text of a file, without a byte order mark. Raises OSError, and ValueError for bytes that
    are no UTF-8 and for more than `most` of them."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes, need fewer")
    return data.decode("utf-8-sig")
