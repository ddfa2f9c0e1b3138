"""Configs, models, machine files and Slurm files of the package, found from any folder."""

import re
import shutil
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path
from textwrap import shorten

from megafrontier.common.errors import UserError, need
from megafrontier.common.files import search_folder_hint


@cache
def shipped_folder() -> Path:
    """The folder that holds `configs` and `slurm`: the repository, or where pip installs data.

    pip puts data into `share` of the environment, of the user's folder or of `--target`, each of
    which is a parent of the package. Raises UserError if there is none.
    """
    above = Path(__file__).resolve().parents[2:]
    for folder in (above[0], *(parent / "share" / "megafrontier" for parent in above)):
        if (folder / "configs" / "machines").is_dir():
            return folder
    raise UserError("configs: not found, need an installation of megafrontier with its data files")


def shipped_files() -> dict[str, Path]:
    """Each config by its name, each published model as `models/NAME`, each machine file as
    `machines/NAME`, and the folder `slurm`."""
    folder = shipped_folder()
    found = {path.stem: path for path in sorted((folder / "configs").glob("*.yaml"))}
    for kind in ("models", "machines"):
        paths = sorted((folder / "configs" / kind).glob("*.yaml"))
        found |= {f"{kind}/{path.stem}": path for path in paths}
    return found | {"slurm": folder / "slurm"}


def find_config(path: str | Path) -> Path:
    """`path`, or the config that comes with the package if `path` is its name alone. Raises
    UserError if there is neither."""
    given = Path(path)
    if given.exists() and not given.is_dir():
        return given
    files = shipped_files()
    if str(path) not in files:
        need(
            not given.is_dir(),
            str(path),
            "a folder",
            "need a YAML file, such as a run's config.yaml",
        )
        names = [name for name in files if "/" not in name and name != "slurm"]
        line = f"{path}: cannot read the config: No such file{search_folder_hint(path)}"
        raise UserError(f"{line}, need a YAML file or {a_name_like(str(path), names)}")
    return files[str(path)]


def a_name_like(given: str, names: Iterable[str]) -> str:
    """What an error says instead of all `names`: the three that are nearest to the given one."""
    stem = Path(given).name.removesuffix(".yaml")
    nearest = get_close_matches(stem, sorted(names), n=3, cutoff=0)
    return f"a name that `megafrontier configs` lists, such as {', '.join(nearest)}"


def describe_shipped() -> list[str]:
    """A line of at most 100 columns for each file: its name, and how it describes itself."""
    lines = []
    for name, path in shipped_files().items():
        about = "batch files for Slurm clusters, as a folder"
        if path.is_file():
            about = _first_sentence(path.read_text(encoding="utf-8"))
        lines.append(f"{name:28} {shorten(about, 71, placeholder=' …')}")
    return lines


def _first_sentence(text: str) -> str:
    """Of the comment at the head of a file, without its last period."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<!al)\.(?: |$)", comment)[0]  # not after `et al.`


def copy_shipped(name: str, out: Path | None = None) -> Path:
    """Copy a file, or the folder `slurm`, into the working directory, or to `out`. Returns the
    copy. Raises UserError for an unknown name, and if something has the copy's name already."""
    files = shipped_files()
    need(name in files, "--copy", name, f"need one of {', '.join(files)}")
    source = files[name]
    copy = out or Path(source.name)
    need(not copy.exists(), "--copy", copy, "exists, need another folder or --out")
    if source.is_dir():
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, copy)
    return copy
