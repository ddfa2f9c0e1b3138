"""Hugging Face's hub, as far as something is looked up there by name."""

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
    """Meanwhile `name`, a path or a name of the hub's, is looked up by one of the hub's libraries.

    It says nothing of its attempts to reach the hub: there are twenty of them where no internet is,
    on each rank, and what came of them is told in one line. Where the hub does not answer they are
    left out, for they take a minute; what has been downloaded before is found all the same.
    """
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with nullcontext() if Path(name).exists() or _answers() else _offline():
            yield
    finally:
        logging.set_verbosity(before)


def _answers() -> bool:
    """Whether the hub's host takes a connection; taken for granted where a proxy is to be asked."""
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
    """As HF_HUB_OFFLINE=1 would have it, which the libraries read when they are imported."""
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
