"""Sites as jobs of their own on this host, or together in this process."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megafrontier.parallel.mesh import Mesh
from megafrontier.sites.exchange import SiteExchange
from megafrontier.training.callbacks.base import Callback
from megafrontier.training.trainer import Trainer
from scripts.benchmarks.shared.measuring import free_port
from tests import runs
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


def call_both(method, *arguments) -> None:
    """Call a method of both sites at the same time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(method, *arguments))


@contextmanager
def met_sites(
    folder: Path, mesh: Mesh, *keys: str, options: Sequence[str] = ()
) -> Iterator[tuple[list[SiteExchange], list[Trainer]]]:
    """Two sites of one rank in this process that have met, and their trainers. keys: of `sites`."""
    config_file, numbers = runs.make_config_file(folder), ports(2)
    all_options = [site_options(folder, numbers, number, *keys) for number in range(2)]
    configs = [runs.load(config_file, *runs.ONE, *own, *options) for own in all_options]
    with ExitStack() as stack:
        trainers = [stack.enter_context(runs.open_trainer(config, mesh)) for config in configs]
        sites = []
        for trainer in trainers:
            assert trainer.config.sites is not None
            sites.append(SiteExchange(trainer, trainer.config.sites))
        call_both(SiteExchange.at_start, sites, trainers)
        yield sites, trainers
        for site in sites:
            site._endpoint.close()


class Hold(Callback):
    """Waits before step N while a file `hold-N` is beside the run directory."""

    def before_step(self, trainer: Trainer) -> None:
        folder = Path(trainer.config.run.directory).parent
        files = [(path, int(path.name.removeprefix("hold-"))) for path in folder.glob("hold-*")]
        while any(trainer.step >= step and path.exists() for path, step in files):
            time.sleep(0.02)
