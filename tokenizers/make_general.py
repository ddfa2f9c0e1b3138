"""Makes general-16k.model from text that every installation of megafrontier brings along.

Half of it is English prose, the docstrings of Python's standard library and of some dependencies;
half is code, the standard library's sources. Usage: python tokenizers/make_general.py [OUT.model]
"""

import ast
import json
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from megafrontier.data.tokenizers.train import train_tokenizer

PACKAGES = ("datasets", "matplotlib", "numpy", "pandas", "sympy", "torch", "transformers")
LIBRARY = Path(sysconfig.get_path("stdlib"))
NO_PROSE = {"site-packages", "test", "tests", "idle_test", "lib2to3", "dist-packages"}


def library_files() -> list[Path]:
    """The standard library's own sources, without its tests."""
    found = sorted(path.relative_to(LIBRARY) for path in LIBRARY.rglob("*.py"))
    return [LIBRARY / path for path in found if not NO_PROSE & set(path.parts)]


def package_files() -> Iterator[Path]:
    """The sources of the packages, without their tests."""
    packages = Path(sysconfig.get_path("purelib"))
    for name in PACKAGES:
        for path in sorted((packages / name).rglob("*.py")):
            if not {"test", "tests"} & set(path.relative_to(packages).parts):
                yield path


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a module, and of its classes and functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def main() -> None:
    """Collect, train, and keep the model alone: `save` makes the other files from it."""
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "general-16k.model")
    with tempfile.TemporaryDirectory() as folder:
        prose, code = Path(folder, "prose.jsonl"), Path(folder, "code.jsonl")
        files = [*library_files(), *package_files()]
        texts = dict.fromkeys(text for path in files for text in docstrings(path))
        prose.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources = (path.read_bytes().decode(errors="ignore") for path in library_files())
        code.write_text("".join(json.dumps({"text": text}) + "\n" for text in sources))
        sample = train_tokenizer([str(prose), str(code)], 16384, Path(folder, "trained"))
        shutil.copyfile(Path(folder, "trained", "tokenizer.model"), out)
    print(f"{out}: {out.stat().st_size} bytes, from {sample.text_bytes / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
