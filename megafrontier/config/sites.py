"""The options of training one model at several sites."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Literal

from megafrontier.common.errors import UserError, need
from megafrontier.config.fields import bounded


@dataclass
class OuterOptimizerConfig:
    """SGD on the change of the weights since the last exchange."""

    name: Literal["nesterov", "sgd"] = "nesterov"
    """The kind of momentum."""
    lr: float = bounded(0.7, above=0)
    """Learning rate. 1 without momentum averages the weights of the sites."""
    momentum: float = bounded(0.9, at_least=0, below=1)
    """Momentum; 0: none."""


@dataclass
class SitesConfig:
    """One model, trained by several jobs that exchange the change of their weights every some steps
    (DiLoCo, Douillard et al. 2023, arXiv:2311.08105). See `docs/sites.md`."""

    addresses: list[str] = field(default_factory=list)
    """HOST:PORT of the first rank of each site, in the order of their numbers. An IPv6 address is
    in brackets: `[fd00::1]:7001`."""
    listen: str = ""
    """Address on which every rank of this site listens. Default: the address that other sites are
    told. 0.0.0.0 (all addresses of a host) is needed if other sites reach a forwarded address."""
    number: int = bounded(0, at_least=0)
    """Which of `addresses` this job is."""
    global_batches: list[int] = field(default_factory=list)
    """The `train.global_batch` of each site. Default: that of this one."""
    secret: str = ""
    """File with the secret that all sites share, at least 16 bytes. Messages are authenticated with
    it, and not encrypted."""
    every: int = bounded(30, at_least=0)
    """Steps between two exchanges of a parameter; 0: only after the last step."""
    fragments: int = bounded(1, at_least=1)
    """Parts of the model that are exchanged one after the other, `every` / `fragments` steps apart
    (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). Must divide `every`."""
    delay: int = bounded(0, at_least=0)
    """Steps that an exchange may take beside training. Less than `every`."""
    mixing: float = bounded(0.0, at_least=0, below=1)
    """Share of this site's own weights that remains in its weights after an exchange."""
    wire: Literal["fp32", "bf16", "int8", "int4", "topk"] = "int4"
    """Format of the changes. All but fp32 and bf16 have error feedback. topk: the 64 largest of
    4,096 elements, in 2 bits each."""
    optimizer: OuterOptimizerConfig = field(default_factory=OuterOptimizerConfig)
    """Optimizer of the weights that all sites agree on."""
    gigabytes_per_second: float | None = bounded(None, above=0)
    """Bandwidth of one rank towards all other sites, for `plan`. null: an exchange takes no time
    there."""
    deadline_seconds: float = bounded(60.0, above=0)
    """A site that is this much later than the first one is left out of an exchange; less than half
    of the sites wait half as long again. After half of it, a slow site sends what it has."""

    @property
    def spacing(self) -> int:
        """Steps between two exchanges of any parameters; 0: only after the last step."""
        return self.every // self.fragments

    @property
    def state_itemsize(self) -> int:
        """Bytes that a rank holds for each element of its masters."""
        return 12 if self.wire in ("fp32", "bf16") else 14

    def batches(self, global_batch: int) -> list[int]:
        """Samples of a step at each site; `global_batch` is that of this one."""
        return self.global_batches or [global_batch] * len(self.addresses)


def check_sites(sites: SitesConfig, global_batch: int, hang_seconds: float) -> None:
    """Check how the values fit each other. Raises UserError with key, value and fix."""
    count, key = len(sites.addresses), "sites"
    need(count > 0, f"{key}.addresses", "empty", "need HOST:PORT of each site")
    _check_addresses(sites.addresses)
    fits = f"need less than the number of sites.addresses ({count})"
    need(sites.number < count, f"{key}.number", sites.number, fits)
    given, own = sites.batches(global_batch), f"{key}.global_batches"
    need(len(given) == count, own, given, f"need one for each of {count} sites.addresses")
    need(min(given) > 0, own, given, "need at least 1 for each site")
    fits = f"need train.global_batch ({global_batch}) for site {sites.number}"
    need(given[sites.number] == global_batch, own, given, fits)
    fits = f"must divide sites.every ({sites.every})"
    need(sites.every % sites.fragments == 0, f"{key}.fragments", sites.fragments, fits)
    is_short = sites.delay < sites.every or sites.delay == 0
    fits = f"need less than sites.every ({sites.every})"
    need(is_short, f"{key}.delay", sites.delay, fits)
    need(sites.secret != "", f"{key}.secret", "empty", "need the path of a file, the same text")
    is_late = hang_seconds == 0 or sites.deadline_seconds < hang_seconds
    fits = f"need less than train.hang_seconds ({hang_seconds})"
    need(is_late, f"{key}.deadline_seconds", sites.deadline_seconds, fits)


def _check_addresses(addresses: Sequence[str]) -> None:
    earlier, key = set[tuple[str, int]](), "sites.addresses"
    for text in addresses:
        try:
            address = split_address(text)
        except ValueError as error:
            raise UserError(f"{key}: {text}, need HOST:PORT or [IPv6]:PORT") from error
        need(address not in earlier, key, text, "given twice, need another one for each site")
        earlier.add(address)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT. Raises ValueError for another form."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(text)
    if host.startswith("[") and host.endswith("]"):
        return str(IPv6Address(host[1:-1])), int(port)
    if not host or set(host) & set("[]:"):
        raise ValueError(text)
    return host.lower(), int(port)
