"""Makes general-16k.model from text that is part of every installation of megafrontier.

Half of the text is English prose: docstrings of the standard library and of some dependencies. The
other half is code: sources of the standard library.

    python tokenizers/make_general.py [OUT.model]
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
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "dist-packages"}


def library_files() -> list[Path]:
    """Return the sources of the standard library, without its tests."""
    found = sorted(path.relative_to(LIBRARY) for path in LIBRARY.rglob("*.py"))
    return [LIBRARY / path for path in found if not LEFT_OUT & set(path.parts)]


def package_files() -> Iterator[Path]:
    """Yield the sources of the packages, without their tests."""
    packages = Path(sysconfig.get_path("purelib"))
    for name in PACKAGES:
        for path in sorted((packages / name).rglob("*.py")):
            if not {"test", "tests"} & set(path.relative_to(packages).parts):
                yield path


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, and of its classes and functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def main() -> None:
    """Train, and keep only the model, because `save` makes the other files from it."""
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "general-16k.model")
    with tempfile.TemporaryDirectory() as folder:
        prose, code = Path(folder, "prose.jsonl"), Path(folder, "code.jsonl")
        files = [*library_files(), *package_files()]
        texts = dict.fromkeys(text for path in files for text in docstrings(path))
        prose.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources = (path.read_bytes().decode(errors="ignore") for path in library_files())
        code.write_text("".join(json.dumps({"text": text}) + "\n" for text in sources))
        size, _ = train_tokenizer([str(prose), str(code)], 16384, Path(folder, "trained"))
        shutil.copyfile(Path(folder, "trained", "tokenizer.model"), out)
    print(f"{out}: {out.stat().st_size} bytes, from {size / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
