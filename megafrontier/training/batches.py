"""Which samples and loaders a configuration means."""

from typing import Literal

import torch

from megafrontier.common.errors import RankError, UserError
from megafrontier.config import Config
from megafrontier.data.sampling.loader import Loader
from megafrontier.data.sampling.samples import Batch, Samples, open_samples
from megafrontier.data.tokenizers.tokenizer import kept_tokenizer

Part = Literal["train", "valid"]
PARTS: tuple[Part, ...] = ("train", "valid")


def open_part(config: Config, part: Part) -> Samples | None:
    """The training or validation samples; None where nothing is kept for validation.

    Raises UserError for a corpus that cannot be read.
    """
    # A special token that was added to the tokenizer alone has no row in the model.
    ids = min(kept_tokenizer(config.tokenizer).vocab_size, config.model.vocab_size)
    return open_samples(config.data, config.model.sequence_length, config.run.seed, ids, part)


def make_loader(
    config: Config,
    samples: Samples,
    part: Part,
    rank: int,
    ranks: int,
    device: torch.device | str = "cpu",
) -> Loader:
    """One rank's micro-batches of `samples`. Raises UserError when the batch does not divide."""
    skip = config.data.skip if part == "train" else []
    train = config.train
    return Loader(samples, train.global_batch, train.micro_batch, rank, ranks, skip, device)


def read_step(loader: Loader, step: int, rank: int) -> list[Batch]:
    """A rank's micro-batches of a step. Raises RankError for data that cannot be used: no other
    rank reads it."""
    try:
        return loader.step(step)
    except UserError as error:
        raise RankError(f"rank {rank}: {error}") from error
