"""An extension of griffe, for the site: parameters become lists.

A docstring of ours says what parameters are in lines `name: text`, which Markdown would join into
one paragraph. mkdocs.yml names this file.
"""

import re
from typing import Any

import griffe

PARAMETERS = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


class ParameterLists(griffe.Extension):
    """Makes an item of each line that begins with names of parameters."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the docstring of a function or method."""
        if func.docstring is not None:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = with_lists(func.docstring.value, names)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Change the docstring of a class, which may say what its constructor takes."""
        if cls.docstring is not None and "__init__" in cls.members:
            parameters = cls.members["__init__"].parameters  # type: ignore[union-attr]
            names = {parameter.name for parameter in parameters}
            cls.docstring.value = with_lists(cls.docstring.value, names)


def with_lists(text: str, names: set[str]) -> str:
    """The text of a docstring, in which `names: …` begins an item of a list."""

    def item(match: re.Match[str]) -> str:
        found = match[1].split(", ")
        return f"* {', '.join(f'`{n}`' for n in found)}: " if names >= set(found) else match[0]

    return PARAMETERS.sub(item, text)
