"""What benchmarks and tests ask the system and the process they run in."""

import argparse
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = "MEGAFRONTIER_BENCHMARK_PACKAGES"
"""Environment variable: a folder with other frameworks, made by `pip install --target`."""


def free_port() -> int:
    """A port of this host on which nobody listens. The system gives it to nobody who asks for any:
    those begin at 32,768."""
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def use_packages() -> None:
    """Let the frameworks in that folder be imported, after all that is installed."""
    folder = os.environ.get(PACKAGES)
    if folder and folder not in sys.path:
        sys.path.append(folder)


def make_parser(doc: str | None, program: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help shows a module's docstring as it is written."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=program, description=doc, formatter_class=form)


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """For argparse's `type`: a number of this kind, finite and not below `least`."""

    def number(word: str) -> float:
        try:
            value = kind(word)
        except ValueError:
            value = float("nan")
        if not isfinite(value) or value < least:
            raise argparse.ArgumentTypeError(f"{word}, need a number, at least {least:g}")
        return value

    return number


def in_a_folder(word: str) -> Path:
    """For argparse's `type`: a file to write, which is known to have a folder before the work."""
    if not Path(word).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{word}: {Path(word).parent} is no folder")
    return Path(word)


def code_version() -> str:
    """The commit that is measured, with a + where files differ from it; unknown outside of git."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout
            for words in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + "+" * bool(changes.strip())


def describe_cpu() -> dict[str, str | int]:
    """What figures of ranks on this machine hold for."""
    cores, kernel = len(os.sched_getaffinity(0)), platform.release()
    return {"cpu": cpu_name(), "cores": cores, "kernel": kernel, "torch": torch.__version__}


def listed(values: Mapping[str, object]) -> str:
    """The values by name, in a line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def resident_bytes(field: str = "VmRSS") -> int:
    """Memory of this process now (VmRSS), or its peak (VmHWM); allocated: VmSize and VmPeak.

    Not ru_maxrss, which begins at the peak of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
