"""What every contender of one_device trains: a GPT in Llama's style, a corpus of random ids."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megafrontier.config import ModelConfig, MoEConfig
from megafrontier.data.corpus.indexed import IndexedDataset, token_dtype
from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter
from scripts.benchmarks.shared.child import Clock, Finished
from scripts.benchmarks.shared.measuring import at_least

LR, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
CORPUS_TOKENS = 1 << 24
_DOCUMENT_TOKENS = 1 << 10


@dataclass(frozen=True)
class Preset:
    """A size of model, and the sequences of a step that keep a device busy with it."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    sequence_length: int
    batch: int
    experts: int = 0
    """Of each block, 2 of which are active; 0: no mixture."""


PRESETS = {
    "1M": Preset(2, 128, 2, 2048, 64, 2),
    "10M": Preset(6, 320, 5, 4096, 256, 4),
    "50M": Preset(13, 512, 8, 8192, 256, 4),
    "125M": Preset(12, 768, 12, 32000, 2048, 16),
    "350M": Preset(24, 1024, 16, 32000, 2048, 16),
    "1.3B": Preset(24, 2048, 16, 32000, 2048, 8),
    "7B-block": Preset(2, 4096, 32, 32000, 4096, 4),  # a model of 7B has 32 such blocks
    "mixture": Preset(12, 1024, 16, 32000, 2048, 8, experts=8),
    "3B": Preset(26, 3072, 24, 32000, 2048, 4),
    "7B": Preset(32, 4096, 32, 32000, 2048, 4),
    "10B": Preset(48, 4096, 32, 32000, 2048, 4),
    "13B": Preset(40, 5120, 40, 32000, 2048, 4),
}


@dataclass(frozen=True)
class Setting:
    """One comparison."""

    preset: str
    precision: str
    """fp32, or bf16: computation in bf16, masters and AdamW's moments in fp32."""
    batch: int
    """Sequences of a step, all in one micro-batch."""
    sequence_length: int
    warm_up: int
    steps: int
    corpus: str
    """Prefix of the corpus."""

    @property
    def model(self) -> ModelConfig:
        """Llama's parts: RMSNorm, SwiGLU, rotary positions, no biases."""
        size = PRESETS[self.preset]
        return ModelConfig(
            layers=size.layers,
            hidden=size.hidden,
            heads=size.heads,
            vocab_size=size.vocab_size,
            sequence_length=self.sequence_length,
            norm="rmsnorm",
            activation="swiglu",
            position="rotary",
            bias=False,
            moe=MoEConfig(experts=size.experts) if size.experts else None,
        )

    @property
    def group(self) -> str:
        """What rows that are compared with each other have in common."""
        return f"{self.preset}, {self.precision}, {self.batch} × {self.sequence_length} tokens"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.sequence_length

    @property
    def mixed(self) -> bool:
        """Whether computation has another type than the masters."""
        return self.precision != "fp32"


def make_setting(
    out: Path,
    preset: str,
    precision: str,
    warm_up: int,
    steps: int,
    batch: int | None = None,
    sequence_length: int | None = None,
) -> Setting:
    """A setting whose corpus is in `out`, with the preset's own sizes where none are given."""
    size = PRESETS[preset]
    return Setting(
        preset,
        precision,
        batch or size.batch,
        sequence_length or size.sequence_length,
        warm_up,
        steps,
        str((out / f"corpus-{size.vocab_size}").resolve()),
    )


def add_setting_options(parser: argparse.ArgumentParser, presets: Sequence[str]) -> None:
    """The options of `chosen_settings`. `presets`: by default on a GPU; on a CPU 10M."""
    on_gpu = torch.cuda.is_available()
    default = presets if on_gpu else ["10M"]
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=default)
    parser.add_argument("--warm-up", type=at_least(1), default=5, help="steps that are not timed")
    parser.add_argument("--steps", type=at_least(1), default=20 if on_gpu else 4, help="timed")


def chosen_settings(arguments: argparse.Namespace) -> list[Setting]:
    """The settings that the command line asks for, whose corpora are written: in bf16 on a GPU, in
    fp32 on a CPU."""
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    settings = [
        make_setting(arguments.out, name, precision, arguments.warm_up, arguments.steps)
        for name in arguments.presets
    ]
    write_corpora(settings)
    return settings


def write_corpora(settings: Iterable[Setting]) -> None:
    """Write the corpora that are not there yet."""
    for setting in settings:
        write_corpus(Path(setting.corpus), setting.model.vocab_size)


def write_corpus(prefix: Path, vocab_size: int) -> None:
    """16 Mi seeded ids, small ones more often as in language; nothing if it is there already."""

    write_tokenizer(tokenizer_of(str(prefix)), vocab_size)
    if prefix.with_name(f"{prefix.name}.idx").is_file():
        return
    dtype = token_dtype(vocab_size)
    ids = np.random.default_rng(0).random(CORPUS_TOKENS, np.float32) ** 3 * vocab_size
    sizes = np.full(CORPUS_TOKENS // _DOCUMENT_TOKENS, _DOCUMENT_TOKENS, np.int32)
    yes = np.ones(len(sizes), bool)
    with CorpusWriter(prefix, dtype) as corpus:
        DocumentWriter(corpus).write_chunks(ids.astype(dtype), sizes, yes, ~yes)
        corpus.publish()


def tokenizer_of(corpus: str) -> str:
    """The file of the tokenizer beside a corpus."""
    return f"{corpus}-tokenizer.json"


def write_tokenizer(path: str, vocab_size: int) -> None:
    """One of so many words, numbers, without which no ids are taken for a corpus'."""
    from tokenizers import Tokenizer, models

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    words = {"<|endoftext|>": 0} | {str(number): number for number in range(1, vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>")).save(path)


class Rows(torch.utils.data.Dataset):
    """The corpus as a user of another framework would cut it: row i is its i-th window."""

    def __init__(self, setting: Setting, ahead: int = 0) -> None:
        """`ahead` tokens of the next window are added to each row, to be targets."""
        self._tokens: NDArray = IndexedDataset(setting.corpus).tokens
        self._length, self._ahead = setting.sequence_length, ahead

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, row: int) -> torch.Tensor:
        start = row * self._length
        window = self._tokens[start : start + self._length + self._ahead]
        return torch.from_numpy(window.astype(np.int64))


class Feed(torch.utils.data.IterableDataset):
    """Batches [batch, s + 1] without end. When the next is asked for, a step has ended; the loop is
    ended from here when all were timed."""

    def __init__(self, setting: Setting, clock: Clock) -> None:
        self._loader = torch.utils.data.DataLoader(Rows(setting, 1), setting.batch, drop_last=True)
        self._clock = clock

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self._loader:
            yield batch
            self._clock.tick()
            if self._clock.done:
                raise Finished
