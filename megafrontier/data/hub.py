"""Lookups of names in Hugging Face's hub."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

PROBE_SECONDS = 3.0


@contextmanager
def hub_lookup(name: str) -> Iterator[None]:
    """Run the body, in which a library of the hub looks up `name`, a path or a name in the hub.

    The library's warnings are silenced: without a network it logs some twenty attempts per rank. If
    the hub does not answer, only the local cache is searched, because the attempts take a minute.
    """
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with nullcontext() if Path(name).exists() or _is_reachable() else _offline():
            yield
    finally:
        logging.set_verbosity(before)


def _is_reachable() -> bool:
    """Return whether the hub accepts a connection. True if there is a proxy, which decides."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return True
    where = urlsplit(constants.ENDPOINT)
    port = where.port or (80 if where.scheme == "http" else 443)
    try:
        socket.create_connection((where.hostname or "", port), PROBE_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def _offline() -> Iterator[None]:
    """Have the effect of HF_HUB_OFFLINE=1, which the libraries read only at import."""
    from huggingface_hub import constants

    configs: list[Any] = [constants]
    if "datasets" in sys.modules:
        configs.append(sys.modules["datasets"].config)
    before = [config.HF_HUB_OFFLINE for config in configs]
    for config in configs:
        config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.HF_HUB_OFFLINE = value
