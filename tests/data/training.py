"""SentencePiece's trainer, kept out of the process that forks ranks.

It leaves OpenMP threads behind. A forked rank would count on them and wait for ever, because
threads do not survive a fork.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from megafrontier.data.tokenizers import train as module


def train_tokenizer(*arguments: Any, **options: Any) -> Any:
    """`megafrontier.data.tokenizers.train.train_tokenizer` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(module.train_tokenizer, *arguments, **options).result()
