"""Probe ranks whose links are shaped to known rates, and print what was found beside them.

    python -m scripts.benchmarks.probing --sizes 2 2 2 --rates 40 16 6

Each rank lives in a network namespace of its own, and what it sends to another rank is shaped by
the level between the two. Needs root and Debian's iproute2.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megafrontier.launch.local import fork_ranks
from megafrontier.probe.command import probe_command
from scripts.benchmarks.shared.links import NIC, Links, Unable, links

CLONE_NEWNET = 0x40000000
PORT = "3442"


def probe_shaped(
    sizes: Sequence[int], rates: Sequence[float], per_host: int, machine: Path
) -> dict[str, Any]:
    """What `probe --json` prints on ranks whose levels have these sizes and rates.

    rates: in bytes a second; per_host: ranks that are told that they share a host; machine: gets
    the machine file. Raises Unable where no links can be made.
    """
    with links(math.prod(sizes)) as made, tempfile.TemporaryDirectory() as folder:
        made.shape_levels(sizes, rates)
        answer = Path(folder, "answer.json")
        code = fork_ranks(math.prod(sizes), partial(_probe, made, per_host, machine, answer))
        if code:
            raise RuntimeError(f"a rank of the probe ended with code {code}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def _probe(made: Links, per_host: int, machine: Path, answer: Path) -> int:
    rank, ranks = map(int, os.environ["MEGAFRONTIER_LOCAL"].split("/"))
    for name in ("MEGAFRONTIER_LOCAL", "MEGAFRONTIER_PORT", "MEGAFRONTIER_SOCKET"):
        os.environ.pop(name, None)
    _enter(made.namespaces[rank])
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": made.address(0),
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": NIC,
    }
    printed = answer if rank == 0 else Path(os.devnull)
    with printed.open("w") as out, contextlib.redirect_stdout(out):
        return probe_command(None, None, machine, as_json=True)


def _enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(file)


def main() -> None:
    """Probe once, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 2, 2], help="of the levels")
    parser.add_argument("--rates", type=float, nargs="+", default=[40, 16, 6], help="in MB/s")
    parser.add_argument("--per-host", type=int, help="default: all ranks but the last level's")
    options = parser.parse_args()
    per_host = options.per_host or math.prod(options.sizes[:-1])
    with tempfile.TemporaryDirectory() as folder:
        rates = [rate * 1e6 for rate in options.rates]
        try:
            found = probe_shaped(options.sizes, rates, per_host, Path(folder, "machine.yaml"))
        except Unable as reason:
            print(f"no links: {reason}", file=sys.stderr)
            raise SystemExit(2) from reason
    print(f"shaped: sizes {options.sizes}, MB/s {options.rates}")
    for name, level in found["levels"].items():
        print(f"{name}: size {level['size']}, {level['gigabytes_per_second'] * 1e3:.2f} MB/s")
    print("\n".join(found["surprises"]))


if __name__ == "__main__":
    main()
