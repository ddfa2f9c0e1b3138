"""The number of sequences in each step, a pure function of the configuration and the step."""

from dataclasses import dataclass

from megafrontier.common.errors import UserError
from megafrontier.config import BatchWarmupConfig, TrainConfig


@dataclass(frozen=True)
class SiteShare:
    """Which samples one of several sites reads: of the `of_all` samples that all sites read in a
    step, its own from number `first` on."""

    first: int
    of_all: int


@dataclass(frozen=True)
class BatchSizes:
    """The global batch of each data step: `full`, or during the warm-up a smaller one."""

    full: int
    warmup: BatchWarmupConfig | None = None

    @staticmethod
    def of(train: TrainConfig) -> "BatchSizes":
        """Those of a configuration."""
        return BatchSizes(train.global_batch, train.batch_warmup)

    @property
    def _increments(self) -> int:
        assert self.warmup is not None
        return (self.full - self.warmup.start) // self.warmup.step_by

    def size(self, step: int) -> int:
        """The sequences of a data step."""
        warmup = self.warmup
        if warmup is None or step >= warmup.until:
            return self.full
        return warmup.start + warmup.step_by * (step * self._increments // warmup.until)

    def before(self, step: int) -> int:
        """The sequences of all data steps before one."""
        warmup = self.warmup
        if warmup is None:
            return step * self.full
        # Each increment is missing from the steps before it comes.
        number, until = self._increments, warmup.until
        missing = sum(
            min(step, -(-(i * until) // number)) * warmup.step_by for i in range(1, number + 1)
        )
        return step * self.full - missing

    def divides(self, count: int) -> bool:
        """Whether the batch of every step is a multiple of `count`."""
        return all(size % count == 0 for size in self._multiples.values())

    @property
    def _multiples(self) -> dict[str, int]:
        """By key, the sizes that all batches are sums of multiples of."""
        found = {"train.global_batch": self.full}
        if self.warmup is not None:
            found["train.batch_warmup.start"] = self.warmup.start
            found["train.batch_warmup.step_by"] = self.warmup.step_by
        return found

    def check(self, micro_batch: int, data_size: int) -> None:
        """Raises UserError if a step does not divide into micro-batches on all ranks."""
        at_a_time = micro_batch * data_size
        for key, size in self._multiples.items():
            if size % at_a_time:
                raise UserError(
                    f"{key}: {size}, need a multiple of {at_a_time} (train.micro_batch "
                    f"{micro_batch} x {data_size} data-parallel ranks)"
                )
