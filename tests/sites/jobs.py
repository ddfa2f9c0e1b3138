"""Sites as jobs of their own on this host."""

import time
from collections.abc import Sequence
from pathlib import Path

from megafrontier.training.callbacks.base import Callback
from megafrontier.training.trainer import Trainer
from scripts.benchmarks.shared.measuring import free_port
from tests.processes import COMMAND, Forked


def site_options(folder: Path, ports: Sequence[int], number: int, *more: str) -> list[str]:
    """The overrides of one of several sites."""
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "secret"
    secret.write_text("a secret of the test's own\n")
    addresses = ", ".join(f"127.0.0.1:{port}" for port in ports)
    own = ", ".join([f"addresses: [{addresses}]", f"number: {number}", f"secret: {secret}", *more])
    return [f"run.directory={folder}/site{number}", f"sites={{{own}}}"]


def start_site(config: Path, ranks: int, options: Sequence[str]) -> Forked:
    """Start the job of a site."""
    arguments = ["train", str(config), "--nproc", str(ranks), "preflight.enabled=false", *options]
    return Forked(COMMAND, arguments)


def ports(count: int) -> list[int]:
    """Free ports."""
    return [free_port() for _ in range(count)]


class Hold(Callback):
    """Waits before step N while a file `hold-N` is beside the run directory."""

    def before_step(self, trainer: Trainer) -> None:
        folder = Path(trainer.config.run.directory).parent
        files = [(path, int(path.name.removeprefix("hold-"))) for path in folder.glob("hold-*")]
        while any(trainer.step >= step and path.exists() for path, step in files):
            time.sleep(0.02)
