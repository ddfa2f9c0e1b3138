"""Reading and writing: YAML with inheritance, `key=value` overrides, machine files."""

import re
import sysconfig
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megafrontier.common.errors import UserError, as_fatal_error
from megafrontier.common.files import search_folder_hint, write_atomically
from megafrontier.config import validation
from megafrontier.config.schema import Config, MachineConfig, RunConfig
from megafrontier.config.validation import MISSING, check, check_machine, key_of, leaves, path_of

_MACHINES = (
    Path("configs/machines"),
    Path(__file__).resolve().parents[2] / "configs" / "machines",  # of the repository
    Path(sysconfig.get_path("data"), "share", "megafrontier", "machines"),  # of a wheel
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, the files it inherits from, and `key=value` overrides into a Config.

    Raises UserError for a missing file, broken YAML, unknown keys, wrong types, and values that
    do not fit each other.
    """
    return _resolve(_read_yaml(Path(path), Config), overrides, str(path))


def config_from_dict(values: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Config:
    """The Config saved by `config_to_dict`, with overrides. `origin` names its file in errors.

    Raises UserError as `load_config`.
    """
    created = OmegaConf.create(values)
    assert isinstance(created, DictConfig)
    return _resolve(created, overrides, origin)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain containers that YAML and JSON can hold."""
    return asdict(config)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as YAML. Raises OSError."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config))))


def load_machine(machine: Any) -> MachineConfig:
    """The machine of `config.machine`: a name, a path, or levels and device inline.

    Raises UserError if there is no such file or it does not describe levels and a device.
    """
    if isinstance(machine, dict):
        values, origin = OmegaConf.create(machine), "machine"
    else:
        path = _machine_file(str(machine))
        values, origin = _read_yaml(path, MachineConfig), str(path)
    try:
        structured: MachineConfig = _structure(MachineConfig, values)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error
    check_machine(structured, origin)
    return structured


def _resolve(values: DictConfig, overrides: Sequence[str], origin: str) -> Config:
    _expand_wires(values)
    _drop_default_directory(values)
    without_overrides = deepcopy(values) if overrides else values
    for override in overrides:
        _apply_override(values, override)
        _expand_wires(values)
    try:
        config: Config = _structure(Config, values)
    except UserError as error:
        # Blame the file for an error that it has without the overrides, too.
        is_files = _problem(without_overrides) == str(error)
        raise UserError(f"{origin}: {error}" if is_files else str(error)) from error
    check(config)
    return config


def _problem(values: DictConfig) -> str | None:
    try:
        _structure(Config, values)
    except UserError as error:
        return str(error)
    return None


def _structure(schema: type, values: Any) -> Any:
    """`values` as an instance of `schema`. Raises UserError if they do not fit."""
    plain = OmegaConf.to_container(values, resolve=False)
    assert isinstance(plain, dict)
    # References may name keys that only the defaults have.
    filled = _fill(plain, _defaults(schema))
    references = {p for p, value in leaves(filled) if isinstance(value, str) and "${" in value}
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(filled), resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        reason = str(error).split("\n")[0]
        raise UserError(f"{f'{key}: ' if key else ''}{reason}") from error
    return validation.build(schema, resolved, references=frozenset(references))


def _fill(values: dict[Any, Any], defaults: dict[Any, Any]) -> dict[Any, Any]:
    """`values`, and the defaults of keys that they lack."""
    both = {k: v for k, v in values.items() if isinstance(v, dict)}
    both = {k: _fill(v, defaults[k]) for k, v in both.items() if isinstance(defaults.get(k), dict)}
    return defaults | values | both


@cache
def _defaults(schema: type) -> dict[str, Any]:
    return asdict(schema())


def _select(values: DictConfig, key: str) -> Any:
    # A reference that cannot be resolved yet is refused later, by `_structure`.
    return OmegaConf.select(values, key, throw_on_resolution_failure=False)


def _expand_wires(values: DictConfig) -> None:
    """Write the short form `wires: low` as a section, so that single wires can be set in it."""
    preset = _select(values, "partition.wires")
    if isinstance(preset, str):
        OmegaConf.update(values, "partition.wires", {"preset": preset}, merge=False)


def _expand_machine(values: DictConfig) -> None:
    """Replace a machine's name by the content of its file, so that single values can be set."""
    machine = _select(values, "machine")
    if isinstance(machine, str):
        values["machine"] = _read_yaml(_machine_file(machine), MachineConfig)


def _drop_default_directory(values: DictConfig) -> None:
    """A run's config.yaml holds its directory, which is not that of a run with another name."""
    name, directory = _select(values, "run.name"), _select(values, "run.directory")
    if isinstance(name, str) and directory == RunConfig().directory.replace("${run.name}", name):
        del values.run["directory"]


def _machine_file(name: str) -> Path:
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in _MACHINES)):
        if path.is_file():
            return path
    known = sorted({path.stem for folder in _MACHINES for path in folder.glob("*.yaml")})
    said = f": no such file{search_folder_hint(name)}" if name.endswith(".yaml") else ""
    raise UserError(f"machine: {name}{said}, need the path of a machine file or one of {known}")


def _read_yaml(path: Path, schema: type, children: tuple[Path, ...] = ()) -> DictConfig:
    """A file, merged over the one that its `defaults` key names, relative to it."""
    origin = f"{path} (the defaults of {children[-1]})" if children else str(path)
    if path.resolve() in [child.resolve() for child in children]:
        raise UserError(f"{origin}: the files inherit from each other in a circle")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        where = search_folder_hint(path) if isinstance(error, FileNotFoundError) else ""
        line = f"{origin}: cannot read the config: {error.strerror}{where}"
        raise as_fatal_error(error, line) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{origin}: not valid YAML: {error}") from error
    values = _parse_yaml(text, schema, origin)
    parent = _pop_defaults(path, values)
    if parent is None:
        return values
    below = _read_yaml(path.parent / parent, schema, (*children, path))
    try:
        return _merge(below, values)
    except (OmegaConfBaseException, TypeError) as error:  # a list over a mapping, for instance
        raise UserError(f"{path}: over {parent}: {str(error).splitlines()[0]}") from error


def _parse_yaml(text: str, schema: type, origin: str) -> DictConfig:
    try:
        loaded = OmegaConf.load(StringIO(text))
        plain = OmegaConf.to_container(loaded, resolve=False)
        values = OmegaConf.create(_restore_text(schema, plain, text))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not valid YAML: {error}") from error
    except OSError:  # OmegaConf raises it for a single value
        values = ListConfig([])
    if not isinstance(values, DictConfig):
        raise UserError(f"{origin}: a list or a single value, need keys and values at the top")
    _refuse_missing(values, (), f"{origin}: ")
    return values


def _restore_text(schema: Any, values: Any, text: str, path: validation.Path = ()) -> Any:
    """Undo what YAML made of numbers in `text`, whose parsed form is `values`.

    A value whose type is text becomes what was written: runs named 1.1 and 1.10 are two. Raises
    UserError for a number that YAML 1.1 reads as another one: 010 as 8 and 1:30 as 90. `path` is
    where the values stand in the schema.
    """
    root = {"": values}
    written = dict(leaves({"": yaml.load(text, yaml.BaseLoader)}))
    for inner, value in list(leaves(root)):
        word, is_number = written.get(inner), isinstance(value, int | float)
        if isinstance(value, bool) or not is_number or not isinstance(word, str):
            continue
        where = (*path, *inner[1:])
        kind = validation.type_at(schema, where)
        if kind in (int, float) and re.match(r"[-+]?(0[0-9_]+$|[^:]*:)", word):
            fits = f"need a decimal number; YAML would read {value}"
            raise UserError(f"{key_of(where)}: {word}, {fits}")
        if kind is str:
            container: Any = root
            for part in inner[:-1]:
                container = container[part]
            container[inner[-1]] = word
    return root[""]


def _refuse_missing(values: Any, path: validation.Path, origin: str) -> None:
    """Raise UserError for OmegaConf's mark of a missing value, which merging would ignore."""
    plain = OmegaConf.to_container(values, resolve=False) if OmegaConf.is_config(values) else values
    for inner, value in leaves(plain, path):
        if value == MISSING:
            raise UserError(f"{origin}{key_of(inner)}: {MISSING}, need a value")


def _pop_defaults(path: Path, values: DictConfig) -> str | None:
    """The file that `defaults` names, after removing that key."""
    try:
        parent = values.pop("defaults", None)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: defaults: {str(error).splitlines()[0]}") from error
    if parent is None or isinstance(parent, str):
        return parent
    raise UserError(f"{path}: defaults: {parent}, need the path of one file")


def _merge(parent: DictConfig, child: DictConfig) -> DictConfig:
    _expand_wires(parent)
    if isinstance(_select(child, "machine"), DictConfig):
        _expand_machine(parent)
    merged = OmegaConf.merge(parent, child)
    assert isinstance(merged, DictConfig)
    _reorder_levels(merged, _select(child, "machine.levels"))
    return merged


def _reorder_levels(values: DictConfig, given: Any) -> None:
    """Use the order of the levels `given` if they are all levels: a merge keeps the old order."""
    levels = _select(values, "machine.levels")
    if isinstance(given, dict | DictConfig) and set(given) == set(levels):
        values.machine.levels = {level: levels[level] for level in given}


def _apply_override(values: DictConfig, override: str) -> None:
    """Set one `key=value` in place. Lists are reached by index: data.train[0].weight=2."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: expected key=value, as in train.steps=100")
    if key.startswith("machine."):
        if _select(values, "machine") is None:
            values["machine"] = Config().machine
        _expand_machine(values)
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(parsed, dict)
        value = _restore_text(Config, parsed["value"], text, path_of(key))
        _refuse_missing(value, path_of(key), f"override {override!r}: ")
        _create_list(values, key)
        # A machine given as a whole replaces the file's. Single values of it are merged.
        OmegaConf.update(values, key, value, merge=key != "machine")
        if key == "machine.levels":
            _reorder_levels(values, value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: not valid YAML after the '=': {error}") from error
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"override {override!r}: no such place in the config: {reason}") from error


def _create_list(values: DictConfig, key: str) -> None:
    """Write out the defaults of lists that a key indexes, because an update needs their items.

    Raises ValueError for an index beyond the end.
    """
    for index in re.finditer(r"\[(\d+)\]", key):
        name = key[: index.start()]
        if _select(values, name) is None:
            default = _select(OmegaConf.create(_defaults(Config)), name)
            if isinstance(default, Sequence) and not isinstance(default, str):
                OmegaConf.update(values, name, list(default))
        found = _select(values, name)
        if isinstance(found, ListConfig) and int(index[1]) >= len(found):
            items = f"{len(found)} item{'s' * (len(found) != 1)}"
            raise ValueError(f"{name} has {items}, need one of them or {name}=[…]")
