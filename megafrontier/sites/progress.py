"""Where a site is among the exchanges, and what it trains."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from megafrontier.config import Config
from megafrontier.partition.unit import Unit


@dataclass
class Offer:
    """An exchange that has begun here."""

    event: int
    step: int
    """After this optimizer step."""
    tokens: float
    """That the change comes from; 0: this site sends nothing."""
    checksum: int | None = None
    """Of the weights that the sites agreed on before. None: not computed yet."""
    holds: tuple[int, ...] = ()
    """Sites whose messages all ranks hold, this one included, as far as others were told."""
    refuses: tuple[int, ...] = ()
    """Sites whose message some rank refuses, as far as others were told."""


@dataclass
class SiteProgress:
    """Where a site is among the exchanges. A site that comes back takes it from another one."""

    next_event: int
    last_step: int
    """The step after which the newest exchange began."""
    versions: list[int]
    """Exchanges of each fragment that are over."""
    exchanged_at: list[int]
    """The step of the last one of each fragment, the same at all sites."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "SiteProgress":
        """From `asdict`, among other values."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def fingerprint(config: Config, units: Sequence[Unit]) -> str:
    """The same for sites that can train together."""
    assert config.sites is not None
    shared = asdict(config.sites)
    for own in ("number", "listen", "secret", "deadline_seconds", "global_batches"):
        del shared[own]
    splits = asdict(config.parallel)
    layouts = [(unit.name, unit.layout.entries) for unit in units]
    text = repr((asdict(config.model), splits, shared, layouts, config.train.steps))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
