"""The micro-batches of a rank for each optimizer step. The next step is read in the background."""

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import torch

from megafrontier.common.errors import need
from megafrontier.config import Config
from megafrontier.data.sampling.batches import BatchSizes, SiteShare
from megafrontier.data.sampling.order import Curriculum
from megafrontier.data.sampling.samples import Batch, OpenCorpora, Samples, open_samples
from megafrontier.data.tokenizers.tokenizer import cached_tokenizer

CorpusPart = Literal["train", "valid"]
PARTS: tuple[CorpusPart, ...] = ("train", "valid")


def data_step(steps: int, skip: Sequence[Sequence[int]], first: int = 0) -> int:
    """Return the data step that is read `steps` optimizer steps after data step `first`.

    Data steps count from 0 and include the skipped ones. Steps in the ranges [from, to) of `skip`
    are left out. Ranges may overlap; what lies before `first` has no effect.
    """
    step = first + steps
    for start, stop in sorted(map(tuple, skip)):
        start = max(start, first)
        if step < start:
            break
        step += max(0, stop - start)
        first = max(stop, first)
    return step


class Loader:
    """Reads the micro-batches of data-parallel rank `dp_rank` of `dp_size`.

    A step is divided into micro-batches, in order, and rank d reads the d-th of `dp_size` ranges of
    them. The samples of a step and their order therefore do not depend on the number of ranks or on
    the micro-batch size. If the micro-batches do not divide, the ranks with one fewer get one of
    padding. The loader's only state is its `position`, which is a function of the step while
    `sizes` and `skip` do not change.
    Raises UserError if the batch sizes do not divide, unless the run `is_elastic`.
    """

    def __init__(
        self,
        samples: Samples,
        sizes: BatchSizes,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        skip: Sequence[Sequence[int]] = (),
        device: torch.device | str = "cpu",
        share: SiteShare | None = None,
        is_elastic: bool = False,
    ) -> None:
        """sizes: of this run's batches. share: of one of several sites; default: all samples."""
        self.samples = samples
        if not is_elastic:  # with any number of ranks, a batch divides into micro-batches
            sizes.check(micro_batch, dp_size)
        self._own_sizes, self._micro_batch = sizes, micro_batch
        self._sizes = sizes if share is None else BatchSizes(share.of_all)
        self._first = 0 if share is None else share.first
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._skip = [list(pair) for pair in skip]
        self._origin = 0, 0, 0
        self._device = torch.device(device)
        self.micro_batches = -(-sizes.full // (micro_batch * dp_size))
        """Micro-batches per rank and step, after the warm-up of the batch."""
        self._thread: ThreadPoolExecutor | None = None
        self._prefetched: dict[int, Future[list[Batch]]] = {}

    def position(self, step: int) -> tuple[int, int]:
        """Return (data step, global number of its first sample at any site) of optimizer step
        `step`."""
        origin, first_step, first_sample = self._origin
        current = data_step(step - origin, self._skip, first_step)
        return current, first_sample + self._sizes.before(current) - self._sizes.before(first_step)

    def sample_range(self, step: int) -> tuple[int, int]:
        """Return the range of global sample numbers [from, to) of optimizer step `step`."""
        current, first = self.position(step)
        first += self._first
        return first, first + self._own_sizes.size(current)

    def resume_at(self, step: int, position: tuple[int, int]) -> None:
        """Make `position` the position of optimizer step `step`, and count on from there.

        The position may come from a loader with other `sizes` or another `skip`. No sample is
        left out or read twice.
        """
        self._origin = step, *position

    def data_step_of(self, sample: int) -> int:
        """Return the data step that starts with global sample `sample`."""
        _, first_step, first_sample = self._origin
        before = sample - first_sample + self._sizes.before(first_step)
        return bisect_right(range(2**48), before, key=self._sizes.before) - 1

    def step(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of optimizer step `step` (from 0), on the device.

        Steps may be read in any order; the step after this one is prefetched. Raises what reading
        raises.
        """
        future = self._prefetched.pop(step, None)
        self._prefetched.clear()
        batches = self._read(step) if future is None else future.result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "data")
        self._prefetched[step + 1] = self._thread.submit(self._read, step + 1)
        return [batch.to(self._device) for batch in batches]

    def close(self) -> None:
        """Stop the background thread. `step` would start it again."""
        if self._thread is not None:
            # Do not wait: nobody needs the prefetched step, and the storage may hang.
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread, self._prefetched = None, {}

    def _read(self, step: int) -> list[Batch]:
        first, stop = self.sample_range(step)
        size, rank, ranks = self._micro_batch, self._dp_rank, self._dp_size
        number = (stop - first) // size
        own = range(number * rank // ranks, number * (rank + 1) // ranks)
        batches = [self.samples.batch(first + i * size, size) for i in own]
        missing = -(-number // ranks) - len(own)
        batches += [self.samples.padding(stop, size) for _ in range(missing)]
        return [b.pin_memory() for b in batches] if self._device.type == "cuda" else batches


def open_loader(
    config: Config,
    part: CorpusPart,
    data_rank: int,
    data_size: int,
    device: torch.device | str = "cpu",
    opened: OpenCorpora | None = None,
    ids: int | None = None,
) -> Loader | None:
    """One rank's micro-batches of a part; None if nothing is held out for validation.

    data_rank, data_size: which of how many equal parts of a batch (`Mesh.data_rank`).
    opened: as for `open_samples`.
    ids: the number of the tokenizer's; None: it is loaded.

    Raises UserError for a corpus that cannot be read, if the batch does not divide, and if the
    epochs of all corpora are over before the last step.
    """
    # A special token that was added to the tokenizer alone has no row in the model.
    ids = cached_tokenizer(config.tokenizer).vocab_size if ids is None else ids
    ids = min(ids, config.model.vocab_size)
    length, seed = config.model.sequence_length, config.run.seed
    sizes = BatchSizes.of(config.train)
    samples = open_samples(config.data, length, seed, ids, part, sizes.before, opened)
    if samples is None:
        return None
    skip, share = config.data.skip, None
    if part == "valid":
        sizes, skip = BatchSizes(sizes.full), []
    elif config.sites is not None:
        batches, number = config.sites.batches(sizes.full), config.sites.number
        share = SiteShare(sum(batches[:number]), sum(batches))
    micro_batch = config.train.micro_batch
    elastic = config.train.elastic
    place = data_rank, data_size
    loader = Loader(samples, sizes, micro_batch, *place, skip, device, share, elastic)
    if part == "train":
        _check_end(loader, config.train.steps)
    return loader


def _check_end(loader: Loader, steps: int) -> None:
    """Raise UserError if the corpora's epochs end before the run does."""
    blend, (_, wanted) = loader.samples.blend, loader.sample_range(steps - 1)
    end = blend.end if isinstance(blend, Curriculum) else None
    fits = f"need at least {wanted}, for train.steps ({steps})"
    need(end is None or wanted <= end, "data.train: epochs", f"{end} samples", fits)


def open_named_loaders(
    config: Config,
    data_rank: int,
    data_size: int,
    device: torch.device | str = "cpu",
    opened: OpenCorpora | None = None,
    ids: int | None = None,
) -> dict[str, Loader]:
    """A loader for each name in `data.valid`, of its corpora. Arguments and errors as of
    `open_loader`."""
    found = {}
    for name in dict.fromkeys(corpus.name for corpus in config.data.valid if corpus.name):
        corpora = [corpus for corpus in config.data.valid if corpus.name == name]
        only = replace(config, data=replace(config.data, valid=corpora))
        loader = open_loader(only, "valid", data_rank, data_size, device, opened, ids)
        assert loader is not None
        found[name] = loader
    return found
