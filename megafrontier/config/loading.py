"""Reading and writing: YAML with inheritance, `key=value` overrides, machine files."""

import re
import sysconfig
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megafrontier.common.errors import UserError, as_fatal_error
from megafrontier.common.files import looked_in, write_whole
from megafrontier.config.checks import check, check_machine
from megafrontier.config.fitting import MISSING, check_fit, missing_key
from megafrontier.config.schema import Config, MachineConfig, RunConfig
from megafrontier.config.spelling import as_spelled, kind_at

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
    """The Config saved by `config_to_dict`, with overrides; `origin` names its file in errors.

    Raises UserError as `load_config`.
    """
    created = OmegaConf.create(values)
    assert isinstance(created, DictConfig)
    return _resolve(created, overrides, origin)


def _resolve(values: DictConfig, overrides: Sequence[str], origin: str) -> Config:
    _spell_out(values)
    _leave_out_default_directory(values)
    as_saved = deepcopy(values) if overrides else values
    for override in overrides:
        _apply_override(values, override)
        _spell_out(values)
    try:
        config: Config = _structure(Config, values)
    except UserError as error:
        # The file is to blame for what is wrong without the overrides, too.
        is_files = _problem(as_saved) == str(error)
        raise UserError(f"{origin}: {error}" if is_files else str(error)) from error
    for key, text in _texts("", config_to_dict(config)):
        if "${" in text:  # saved as it is, and taken for a reference when it is read again
            raise UserError(f"{key}: {text}, need it without ${{")
    check(config)
    return config


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """All texts in a value, each with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            inner = f"{key}[{name}]" if isinstance(value, list) else f"{key}.{name}".lstrip(".")
            yield from _texts(inner, part)


def _spell_out(values: DictConfig) -> None:
    """Write the short form `wires: low` as what it stands for, so that single wires can follow."""
    preset = _select(values, "partition.wires")
    if isinstance(preset, str):
        OmegaConf.update(values, "partition.wires", {"preset": preset}, merge=False)


def _leave_out_default_directory(values: DictConfig) -> None:
    """A run's config.yaml spells its folder out, which is not that of a run with another name."""
    name, directory = _select(values, "run.name"), _select(values, "run.directory")
    if isinstance(name, str) and directory == RunConfig().directory.replace("${run.name}", name):
        del values.run["directory"]


def _spell_out_machine(values: DictConfig) -> None:
    """Write a machine's name as what its file holds, so that single values can follow."""
    machine = _select(values, "machine")
    if isinstance(machine, str):
        values["machine"] = _read_yaml(_machine_file(machine), MachineConfig)


def _select(values: DictConfig, key: str) -> Any:
    # What a reference that cannot be resolved yet stands for is `_structure`'s to refuse.
    return OmegaConf.select(values, key, throw_on_resolution_failure=False)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain containers that YAML and JSON can hold."""
    return asdict(config)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as YAML. Raises OSError."""
    write_whole(path, OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config))))


def load_machine(machine: Any) -> MachineConfig:
    """The machine that `config.machine` names, points to or spells out.

    Raises UserError when there is no such file or it does not describe levels and a device.
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


def _machine_file(name: str) -> Path:
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in _MACHINES)):
        if path.is_file():
            return path
    known = sorted({path.stem for folder in _MACHINES for path in folder.glob("*.yaml")})
    said = f": no such file{looked_in(name)}" if name.endswith(".yaml") else ""
    raise UserError(f"machine: {name}{said}, need the path of a machine file or one of {known}")


def _read_yaml(path: Path, schema: type, children: tuple[Path, ...] = ()) -> DictConfig:
    """One file merged over the one that its `defaults` key names, relative to it."""
    asked = f" (the defaults of {children[-1]})" if children else ""
    if path.resolve() in [child.resolve() for child in children]:
        raise UserError(f"{path}{asked}: the files inherit from each other in a circle")
    values = _parse_yaml(path, schema, asked)
    parent = _parent_of(path, values)
    if parent is None:
        return values
    below = _read_yaml(path.parent / parent, schema, (*children, path))
    try:
        return _merge(below, values)
    except (OmegaConfBaseException, TypeError) as error:  # a list over a mapping, for instance
        raise UserError(f"{path}: over {parent}: {str(error).splitlines()[0]}") from error


def _parse_yaml(path: Path, schema: type, asked: str) -> DictConfig:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        where = looked_in(path) if isinstance(error, FileNotFoundError) else ""
        line = f"{path}{asked}: cannot read the config: {error.strerror}{where}"
        raise as_fatal_error(error, line) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}{asked}: not valid YAML: {error}") from error
    try:
        values = OmegaConf.load(StringIO(text))
        plain = OmegaConf.to_container(values, resolve=False)
        values = OmegaConf.create(as_spelled(schema, plain, text))
    except UserError as error:
        raise UserError(f"{path}{asked}: {error}") from error
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(f"{path}{asked}: not valid YAML: {error}") from error
    except OSError:  # OmegaConf's word for a single value
        values = ListConfig([])
    if not isinstance(values, DictConfig):
        raise UserError(f"{path}{asked}: a list or a single value, need keys and values at the top")
    _need_value(plain, "", f"{path}{asked}: ")
    return values


def _need_value(values: Any, key: str, origin: str) -> None:
    """Raises UserError for a mark of a missing value at `key` or below."""
    missing = missing_key(values, key)
    if missing is not None:
        raise UserError(f"{origin}{missing}: {MISSING}, need a value")


def _parent_of(path: Path, values: DictConfig) -> str | None:
    """The file that `defaults`, which is taken out of the values, names."""
    try:
        parent = values.pop("defaults", None)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: defaults: {str(error).splitlines()[0]}") from error
    if parent is None or isinstance(parent, str):
        return parent
    raise UserError(f"{path}: defaults: {parent}, need the path of one file")


def _merge(parent: DictConfig, child: DictConfig) -> DictConfig:
    """A file's values over its parent's."""
    _spell_out(parent)
    if isinstance(_select(child, "machine"), DictConfig):
        _spell_out_machine(parent)
    merged = OmegaConf.merge(parent, child)
    assert isinstance(merged, DictConfig)
    _reorder_levels(merged, _select(child, "machine.levels"))
    return merged


def _reorder_levels(values: DictConfig, given: Any) -> None:
    """Levels keep the order of what they were merged over, which says nothing of those that only
    the later ones have: where these name all, theirs counts."""
    levels = _select(values, "machine.levels")
    if isinstance(given, dict | DictConfig) and set(given) == set(levels):
        values.machine.levels = {level: levels[level] for level in given}


def _apply_override(values: DictConfig, override: str) -> None:
    """Set one `key=value` in place; lists, defaults too, are reached by index, as in
    data.train[0].weight=2."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: expected key=value, as in train.steps=100")
    if key.startswith("machine."):
        if _select(values, "machine") is None:
            values["machine"] = Config().machine
        _spell_out_machine(values)
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(parsed, dict)
        value = as_spelled(kind_at(Config, key), parsed["value"], text, key)
        _need_value(value, key, f"override {override!r}: ")
        _have_list(values, key)
        # A machine given whole replaces the file's, as a name does; its parts are merged.
        OmegaConf.update(values, key, value, merge=key != "machine")
        if key == "machine.levels":
            _reorder_levels(values, value)
    except YAMLError as error:
        raise UserError(f"override {override!r}: not valid YAML after the '=': {error}") from error
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"override {override!r}: no such place in the config: {reason}") from error


def _have_list(values: DictConfig, key: str) -> None:
    """Write the default of a list that a key reaches into, for the values to have what it names.

    Raises ValueError for an item that a list does not have.
    """
    for index in re.finditer(r"\[(\d+)\]", key):
        name = key[: index.start()]
        if _select(values, name) is None:
            default = _select(OmegaConf.create(config_to_dict(Config())), name)
            if isinstance(default, Sequence) and not isinstance(default, str):
                OmegaConf.update(values, name, list(default))
        found = _select(values, name)
        if isinstance(found, ListConfig) and int(index[1]) >= len(found):
            items = f"{len(found)} item{'s' * (len(found) != 1)}"
            raise ValueError(f"{name} has {items}, need one of them or {name}=[…]")


def _problem(values: DictConfig) -> str | None:
    """What is wrong with the values of a config, if anything."""
    try:
        _structure(Config, values)
    except UserError as error:
        return str(error)
    return None


def _structure(schema: type, values: Any) -> Any:
    """`values` as `schema`. Raises UserError where they are not."""
    try:
        check_fit(schema, OmegaConf.to_container(values, resolve=False))
        merged = OmegaConf.merge(_defaults(schema), values)
        structured: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # what is left are interpolations
        key = getattr(error, "full_key", None)
        reason = str(error).split("\n")[0]
        raise UserError(f"{f'{key}: ' if key else ''}{reason}") from error
    check_fit(schema, asdict(structured))  # what the references stand for, too
    return structured


@cache
def _defaults(schema: type) -> Any:
    """The defaults of a schema, which nobody may change."""
    return OmegaConf.structured(schema)
