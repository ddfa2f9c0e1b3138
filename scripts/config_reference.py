"""Write docs/configuration.md from the dataclasses in megafrontier/config.

    python scripts/config_reference.py            write the file
    python scripts/config_reference.py --check    exit 1 if the file is stale

The source is parsed, not imported, because Python drops the docstrings under the fields.
"""

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = sorted((ROOT / "megafrontier" / "config").rglob("*.py"))
REFERENCE = ROOT / "docs" / "configuration.md"

HEAD = """\
<!-- Written by scripts/config_reference.py from megafrontier/config; do not edit. -->

# Configuration

A run is described by one YAML file and changed on the command line:

```
megafrontier train configs/quickstart.yaml --nproc 8 run.name=try train.steps=200 optimizer.lr=1e-3
```

- **Keys.** Every key below has a default, and a file names only what differs. An unknown key, a
  value of the wrong type, and values that do not fit each other are refused before any process
  starts, in one line with the key, the value and what would fit.
- **Inheritance.** `defaults: other.yaml` at the top of a file reads the other file first; the keys
  of this file win. The path is relative to this file. If there is no such file, it is the name of
  an installed one. Sections are merged, lists are replaced. The other file may inherit in turn.
- **Overrides.** `key=value` on the command line wins over every file. The value is YAML, so
  `data.skip=[[100,120]]` and `model.kv_heads=null` work (quote them for the shell). Items of a
  list are reached by index: `data.train[0].weight=2`. A mapping is merged into the file's section,
  and null removes a value: `partition={strategy: null, weights: pair, gradients: node,
  optimizer: world}` works over a file that names a strategy.
- **References.** `${run.name}` stands for another key's value, `${oc.env:SCRATCH}` for an
  environment variable.
- **Models.** `model.preset=qwen3-8b`, in a file or on the command line, is the shape of a published
  model: a name from `configs/models/` (in the current directory, then among the installed ones;
  `megafrontier configs` lists them). It replaces all of `model` that came before. Keys beside it or
  after it change it: `model: {preset: qwen3-8b, sequence_length: 4096}`. `model: qwen3-8b` is short
  for it. `model: from_checkpoint` is the model of the checkpoint that the run begins with: of its
  own newest one, or else of `checkpoint.resume`.
- **Machines.** `machine` is a name from `configs/machines/` (in the current directory, then among
  the installed ones), the path of such a file, or its content inline. Only the outermost level
  may leave its `size` open. `machine.levels.world.size=16` changes one value of a named machine,
  and so does a mapping in a file whose `defaults` name a machine. In any other file a mapping is
  the whole machine. `machine={…}` on the command line replaces the machine of the files.
- **Resuming.** A changed key of `model` is an error if the model would compute something else. A
  change of what training does, such as `optimizer` or `model.moe.bias_rate`, is a line in log.txt,
  and of which samples are next a warning. Layouts may change without a word.
- **What ran.** The run directory holds `config.yaml` with every key and every reference resolved.
  Only `machine` is saved as given: a name, or the keys that were inline.

"""


@dataclass
class Option:
    """One field of a dataclass, as source text."""

    name: str
    kind: str
    default: str
    bounds: str
    text: str


Sections = dict[str, list[Option]]


def read_schemas() -> str:
    """The source of the dataclasses."""
    return "\n".join(path.read_text(encoding="utf-8") for path in SCHEMAS)


def read_sections(source: str) -> Sections:
    """The fields of every class in `source`, with the docstring that follows each."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {node.name: _options(node) for node in classes}


def _options(node: ast.ClassDef) -> list[Option]:
    followers = [*node.body[1:], ast.Pass()]
    return [
        Option(
            name=ast.unparse(statement.target),
            kind=ast.unparse(statement.annotation),
            default=_default(statement.value),
            bounds=_bounds(statement.value),
            text=_docstring(follower),
        )
        for statement, follower in zip(node.body, followers, strict=True)
        if isinstance(statement, ast.AnnAssign)
    ]


def _docstring(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _default(value: ast.expr | None) -> str:
    """The default as YAML writes it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "section":
        return ""
    if isinstance(value, ast.Call) and value.args:  # bounded(DEFAULT, …), count or marked
        return _default(value.args[0])
    if isinstance(value, ast.Call):  # field(default_factory=…)
        factory = value.keywords[0].value
        if isinstance(factory, ast.Lambda):
            return _yaml(ast.literal_eval(factory.body))
        return {"list": "[]", "dict": "{}"}.get(ast.unparse(factory), "")
    return "" if value is None else _yaml(ast.literal_eval(value))


_BOUNDS = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}


def _bounds(value: ast.expr | None) -> str:
    """The bounds of a field, for example " ≥ 0, < 1"."""
    if not isinstance(value, ast.Call) or not value.args:
        return ""
    if ast.unparse(value.func) == "count":
        return " ≥ 1"
    bounds = [(_BOUNDS[k.arg or ""], ast.unparse(k.value)) for k in value.keywords]
    words = (f" {sign} {limit.replace(' ** ', '**')}" for sign, limit in bounds)
    return ",".join(words)


def _yaml(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_yaml(part) for part in value)}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) or '""'


def write_reference(sections: Sections) -> str:
    """The page, one table per section, in the order of `Config`."""
    options = [(option, _inner(option.kind, sections)) for option in sections["Config"]]
    top = [option for option, inner in options if option.kind != inner]
    pages = [HEAD, _table("Top level", "", top, sections)]
    pages += [_section(option.name, inner, sections) for option, inner in options if inner]
    pages.append(_section("machine", "MachineConfig", sections))
    return "\n".join(pages)


def _section(path: str, kind: str, sections: Sections) -> str:
    """The table of one class, then the tables of the classes of its fields."""
    tables = [
        _section(f"{path}.{option.name}{_index(option.kind)}", inner, sections)
        for option in sections[kind]
        if (inner := _inner(option.kind, sections))
    ]
    return "\n".join([_table(f"`{path}`", path, sections[kind], sections), *tables])


def _inner(kind: str, sections: Sections) -> str:
    """The class in a field's type, for example CorpusConfig in list[CorpusConfig]."""
    return next((name for name in re.findall(r"\w+", kind) if name in sections), "")


def _index(kind: str) -> str:
    if kind.startswith("list"):
        return "[N]"
    return ".LEVEL" if kind.startswith("dict") else ""


def _table(title: str, path: str, options: list[Option], sections: Sections) -> str:
    rows = [f"## {title}\n", "| key | type | default | |", "|---|---|---|---|"]
    for option in options:
        key = f"{path}.{option.name}" if path else option.name
        inner = _inner(option.kind, sections)
        kind = _kind(option.kind, inner, option.bounds)
        default = f"`{option.default}`" if option.default else ""
        rows.append(f"| `{key}` | {kind} | {default} | {_cell(option.text)} |")
    return "\n".join(rows) + "\n"


def _kind(kind: str, inner: str, bounds: str) -> str:
    """A Python type and its bounds, in words."""
    optional = kind.endswith(" | None")
    kind = kind.removesuffix(" | None")
    if inner == kind:
        words = "section below"
    elif inner:
        words = f"{'list' if kind.startswith('list') else 'keys'} of sections below"
    elif kind in _WORDS:
        words = _WORDS[kind] + bounds
    elif "Literal" in kind:
        single, _, listed = kind.partition(" | list[")
        choices = ast.literal_eval(f"({single[single.index('Literal[') + 8 :].rstrip(']')},)")
        words = ("list of " if kind.startswith("list") else "") + ", ".join(
            f"`{choice}`" for choice in choices
        )
        words += ", or a list" if listed else ""
    else:
        words = kind + bounds
    return f"{words} or `null`" if optional else words


_WORDS = {
    "str": "text",
    "int": "integer",
    "int | str": "level's name or integer",
    "float": "number",
    "bool": "`true`, `false`",
    "Any": "text or section below",
    "list[str]": "list of texts",
    "list[int]": "list of integers",
    "list[float]": "list of numbers",
    "list[list[int]]": "list of [from, to]",
    "float | list[list[float]]": "number or list of [step, number]",
    "tuple[float, float]": "two numbers",
    "dict[str, str]": "`{LEVEL: FORMAT}`",
    "dict[str, str] | Literal['auto']": "`{LEVEL: FORMAT}`, `auto`",
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page, or compare it with --check. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare, exit 1 if stale")
    arguments = parser.parse_args()
    page = write_reference(read_sections(read_schemas()))
    if not arguments.check:
        REFERENCE.parent.mkdir(exist_ok=True)
        REFERENCE.write_text(page, encoding="utf-8")
    elif not REFERENCE.is_file() or REFERENCE.read_text(encoding="utf-8") != page:
        name = REFERENCE.relative_to(ROOT)
        print(f"{name} is stale: run python scripts/config_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
