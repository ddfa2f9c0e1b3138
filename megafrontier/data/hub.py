"""Hugging Face's hub, as far as something is looked up there by name."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hub_quieted() -> Iterator[None]:
    """Let the library say nothing of its attempts to reach the hub: there are twenty of them where
    no internet is, on each rank, and what came of them is told in one line."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
