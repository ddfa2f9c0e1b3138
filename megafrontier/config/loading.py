"""Reading and writing: YAML with inheritance, `key=value` overrides, machine files."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megafrontier.common.errors import UserError, as_fatal_error, need
from megafrontier.common.files import search_folder_hint, write_atomically
from megafrontier.common.parsing import LARGEST_YAML, parse_yaml, read_text
from megafrontier.config.building import build
from megafrontier.config.machine import MachineConfig
from megafrontier.config.model.gpt import ModelConfig
from megafrontier.config.model.saved import FROM_CHECKPOINT, read_saved_model
from megafrontier.config.schema import CheckpointConfig, Config, RunConfig
from megafrontier.config.shipped import (
    a_name_like,
    find_config,
    shipped_files,
    shipped_folder,
)
from megafrontier.config.validation import check, check_machine

_SHORT = {"wires": "preset", "parallel": "tensor"}
"""Sections that a word may stand for: `wires: low`, `parallel: auto`. It is the value of this
key."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, the files it inherits from, and `key=value` overrides into a Config.

    path: of a file, or the name of a config that comes with the package.

    Raises UserError for a missing file, broken YAML, unknown keys, wrong types, and values that
    do not fit each other.
    """
    return _with_overrides(_read_yaml(find_config(path)), overrides, str(path))


def config_from_dict(values: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Config:
    """The Config saved by `config_to_dict`, with overrides. `origin` names its file in errors.

    The values are data: what looks like a reference in them is a text, because they may come from
    elsewhere, and `${oc.env:NAME}` would read the environment.

    Raises UserError as `load_config`.
    """
    return _with_overrides(_escaped(values), overrides, origin)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain containers that YAML and JSON can hold."""
    return asdict(config)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as YAML. Raises OSError."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(_escaped(config_to_dict(config)))))


def load_machine(machine: Any) -> MachineConfig:
    """The machine of `config.machine`: a name, a path, levels and device inline, or one that is
    loaded.

    Raises UserError if there is no such file or it does not describe levels and a device.
    """
    if isinstance(machine, MachineConfig):
        return machine
    if isinstance(machine, dict):
        origin, values = "machine", machine  # references are resolved
    else:
        path = _machine_file(str(machine))
        origin, values = str(path), _resolved(_read_yaml(path))
    try:
        built: MachineConfig = build(MachineConfig, values)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error
    check_machine(built, origin)
    return built


def _with_overrides(values: dict[str, Any], overrides: Sequence[str], origin: str) -> Config:
    defaults = asdict(Config())
    if "machine" in values:
        del defaults["machine"]  # Levels of the default are not levels of the file's machine.
    from_file = _merged(defaults, _without_default_directory(values))
    filled = from_file
    for override in overrides:
        filled = _apply_override(filled, override)
    saved = _find_saved_model(filled)
    try:
        config = _build_config(filled, saved)
    except UserError:
        try:  # blame the file for an error that it has without the overrides, too
            _build_config(from_file, saved)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from error
        raise
    check(config)
    return config


def _find_saved_model(values: dict[str, Any]) -> dict[str, Any] | None:
    """The model of the checkpoint that the run begins with, if `values` ask for it. Raises
    UserError if there is none."""
    if not _asks_for_saved_model(values):
        return None
    values = _resolved(values)
    run: RunConfig = build(RunConfig, values["run"], "run")
    checkpoint: CheckpointConfig = build(CheckpointConfig, values["checkpoint"], "checkpoint")
    return asdict(ModelConfig()) | read_saved_model(run.directory, checkpoint.resume)


def _asks_for_saved_model(values: dict[str, Any]) -> bool:
    model = values["model"]
    return isinstance(model, dict) and model.get("preset") == FROM_CHECKPOINT


def _build_config(values: dict[str, Any], saved_model: dict[str, Any] | None) -> Config:
    is_asked = _asks_for_saved_model(values)
    values = _resolved(values)
    if is_asked:
        rest = {key: value for key, value in values["model"].items() if key != "preset"}
        values["model"] = _merged(saved_model or asdict(ModelConfig()), rest)
    config: Config = build(Config, values)
    if isinstance(config.machine, dict):
        whole = asdict(build(MachineConfig, config.machine, "machine"))
        config.machine = _given(whole, config.machine)
    return config


def _given(whole: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The values of a machine that `keys` names."""
    return {
        name: _given(whole[name], inner) if isinstance(inner, dict) else whole[name]
        for name, inner in keys.items()
    }


def _escaped(value: Any) -> Any:
    """`value` with all texts such that `_resolved` leaves them as they are."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str):
        # Backslashes before a reference are doubled, and one more makes it a text.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _resolved(values: dict[str, Any]) -> Any:
    """`values` with every reference replaced. Raises UserError for one that stands for nothing."""
    try:
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{error.full_key or 'config'}: {reason}") from error
    except RecursionError:
        raise UserError("config: references nested too deeply, need fewer") from None


def _merged(below: Any, above: Any, name: str = "") -> Any:
    """`above` over `below`, the value of `name`: mappings are merged, all else is replaced."""
    if name == "model" and isinstance(above, str):
        above = {"preset": above}
    if not isinstance(above, dict):
        is_short = name in _SHORT and isinstance(above, str)
        return {_SHORT[name]: above} if is_short else above
    if name == "model" and "preset" in above:
        above = dict(above)
        name_of_model = above.pop("preset")
        # The checkpoint is known once all keys are: until then the section has this key.
        is_saved = name_of_model == FROM_CHECKPOINT
        below = {"preset": FROM_CHECKPOINT} if is_saved else _preset(name_of_model)
    section = _section(below, name)
    merged = {key: _merged(section.get(key), value, key) for key, value in above.items()}
    # A mapping that names all levels of a machine also says their order.
    return merged if section.keys() <= merged.keys() else section | merged


def _section(value: Any, name: str) -> dict[str, Any]:
    """The mapping `value`, or the one that it is short for, so that single values can be set."""
    if isinstance(value, str) and name in _SHORT:
        return {_SHORT[name]: value}
    if isinstance(value, str) and name == "machine":
        return _read_yaml(_machine_file(value))
    return value if isinstance(value, dict) else {}


def _preset(name: Any) -> dict[str, Any]:
    """The section `model` of a published model, with defaults for all that it leaves open."""
    path = _named_file("models", str(name), "model.preset")
    found: dict[str, Any] = _merged(asdict(ModelConfig()), _read_yaml(path))
    return found


def _without_default_directory(values: dict[str, Any]) -> dict[str, Any]:
    """A run's config.yaml holds its directory, which is not that of a run with another name."""
    run = values.get("run")
    if not isinstance(run, dict):
        return values
    default = RunConfig().directory.replace("${run.name}", str(run.get("name")))
    kept = {k: v for k, v in run.items() if (k, v) != ("directory", default)}
    return values | {"run": kept}


def _machine_file(name: str) -> Path:
    path = Path(name)
    return path if path.is_file() else _named_file("machines", name, "machine")


def _named_file(kind: str, name: str, key: str) -> Path:
    """The file of this name in configs/KIND, here or among those that come with the package."""
    folders = [Path("configs") / kind, shipped_folder() / "configs" / kind]
    for path in (folder / f"{name}.yaml" for folder in folders):
        if path.is_file():
            return path
    known = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    said = f": no such file{search_folder_hint(name)}" if name.endswith(".yaml") else ""
    whole = "" if kind == "models" else "the path of a machine file or "
    raise UserError(f"{key}: {name}{said}, need {whole}{a_name_like(name, known)}")


def _read_yaml(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file, merged over the one that its `defaults` key names (`_parent_file`)."""
    origin = f"{path} (the defaults of {children[-1]})" if children else str(path)
    if path.resolve() in [child.resolve() for child in children]:
        raise UserError(f"{origin}: the files inherit from each other in a circle")
    try:
        values = parse_yaml(read_text(path, LARGEST_YAML)) or {}
    except OSError as error:
        where = search_folder_hint(path) if isinstance(error, FileNotFoundError) else ""
        line = f"{origin}: cannot read the config: {error.strerror}{where}"
        raise as_fatal_error(error, line) from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{origin}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{origin}: a list or a single value, need keys and values at the top")
    parent = values.pop("defaults", None)
    if parent is None:
        return values
    need(isinstance(parent, str), f"{path}: defaults", parent, "need the path of one file")
    parent = _resolved({"defaults": parent})["defaults"]
    above = _read_yaml(_parent_file(path, parent), (*children, path))
    inherited: dict[str, Any] = _merged(above, values)
    return inherited


def _parent_file(path: Path, parent: str) -> Path:
    """The file `parent` of `path`'s `defaults`, relative to `path`, or the file of that name among
    those that come with the package."""
    given = path.parent / parent
    if given.exists() or Path(parent).name != parent:
        return given
    name, files = parent.removesuffix(".yaml"), shipped_files()
    # A model that was copied out of configs/models inherits from another model there.
    return files.get(name) or files.get(f"models/{name}") or files.get(f"machines/{name}") or given


def _apply_override(values: dict[str, Any], override: str) -> Any:
    """`values` with one `key=value`. Lists are reached by index: data.train[0].weight=2."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: expected key=value, as in train.steps=100")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: not valid YAML after the '=': {error}") from error
    if key == "machine":  # given as a whole, it replaces the file's
        return values | {"machine": value}
    return _set(values, re.findall(r"[^.\[\]]+", key), value, f"override {override!r}")


def _set(below: Any, parts: Sequence[str], value: Any, origin: str, name: str = "") -> Any:
    """`below`, the value of `name`, with `value` merged into the place that `parts` lead to."""
    if not parts:
        return _merged(below, value, name)
    part, *rest = parts
    if isinstance(below, list | tuple):
        if not part.isdecimal() or int(part) >= len(below):
            found = f"{name} has {len(below)} items, need the index of one of them"
            raise UserError(f"{origin}: {found}")
        items = list(below)
        items[int(part)] = _set(items[int(part)], rest, value, origin, part)
        return items
    if (name, part) == ("model", "preset"):
        return _merged(below, {part: value}, name)
    section = _section(below, name)
    return section | {part: _set(section.get(part), rest, value, origin, part)}
