"""One node of the slow network: forks this node's ranks for each job that comes in on stdin.

    python -m scripts.benchmarks.shared.node NODE RANKS_PER_NODE

torch is imported once here, not once in every rank. A job is a line of JSON; the answer is a line
`{"code": …}` on stdout when all ranks have ended, 0 when all is well. SIGUSR1 ends the ranks of the
job; the end of stdin ends the node.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.benchmarks.shared.job import Job

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SET_PARENT_DEATH_SIGNAL = 1


def fork_rank(job: Job, node: int, local_rank: int, per_node: int) -> int:
    """Start one rank; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.dup2(2, 1)  # stdout is for the node's own answers
        rank = node * per_node + local_rank
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": job.address,
            "MASTER_PORT": str(job.port),
            "GLOO_SOCKET_IFNAME": "hsn0",
        }
        module, name = job.function.split(":")
        answer = getattr(importlib.import_module(module), name)(job)
        Path(job.folder, f"{rank}.json").write_text(json.dumps(asdict(answer)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(ranks: set[int]) -> int:
    """0 when all ranks end well; otherwise the rest is ended and 1 returned."""

    def end(*_: object) -> None:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, end)
    failed = 0
    while ranks:
        for rank in list(ranks):
            done, status = os.waitpid(rank, os.WNOHANG)
            if done:
                ranks.discard(rank)
                if status and not failed:
                    failed = 1
                    if os.WIFSIGNALED(status):  # an exception has said why, a signal says nothing
                        name = signal.Signals(os.WTERMSIG(status)).name
                        print(f"a rank was killed by {name}", file=sys.stderr, flush=True)
                    end()
        time.sleep(0.02)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return failed


def main() -> None:
    """Serve jobs until stdin ends."""
    node, per_node = int(sys.argv[1]), int(sys.argv[2])
    os.environ |= dict.fromkeys(THREADS, "1")
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone acts on Ctrl-C
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for module in ("scripts.benchmarks.shared.ranks", "torch._dynamo"):
        importlib.import_module(module)
    for line in sys.stdin:
        values: dict[str, Any] = json.loads(line)
        job = Job(**values)
        body = importlib.import_module(job.function.partition(":")[0])
        getattr(body, "prepare", lambda: None)()
        gc.freeze()  # so that the ranks' collectors leave our pages shared
        ranks = {fork_rank(job, node, local, per_node) for local in range(per_node)}
        print(json.dumps({"code": wait_for(ranks)}), flush=True)


if __name__ == "__main__":
    main()
