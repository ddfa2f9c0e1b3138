"""Tokenises batches of texts in a worker of `prepare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from megafrontier.data.corpus.indexed import token_dtype
from megafrontier.data.text.reader import BadText, TextRange, read_texts, refuse_bad
from megafrontier.data.tokenizers.base import Tokenizer


@dataclass
class EncodedBatch:
    """The tokens of a batch. A chunk is a document, or one part of a long document."""

    tokens: NDArray
    """Ids of all chunks [tokens]."""
    sizes: NDArray[np.int32]
    """Tokens of each chunk [chunks]."""
    ends: NDArray[np.bool_]
    """Whether the document ends with the chunk [chunks]."""
    bad: NDArray[np.bool_]
    """Whether the text of the chunk is bad, so that its document is left out [chunks]."""
    unknown: int
    """Tokens for characters without a piece."""
    messages: list[str]
    """What is wrong with each bad text."""
    text_bytes: int
    """UTF-8 bytes of all texts."""
    mask: NDArray[np.uint8] | None = None
    """Of chats: whether each token is trained on [tokens]."""


WORD = "a"


@dataclass(frozen=True)
class Encoder:
    """Tokenises batches in a worker."""

    tokenizer: Tokenizer
    key: str
    append_eod: bool
    skip_bad: bool

    def encode(self, ranges: Sequence[TextRange]) -> EncodedBatch:
        """Tokenise a batch. Raises UserError at the first bad text, unless `skip_bad`."""
        texts = [(text, r) for r in ranges for text in read_texts(r, self.key)]
        bad = [text for text, _ in texts if isinstance(text, BadText)]
        if bad and not self.skip_bad:
            raise refuse_bad(bad[0])
        good = [("" if isinstance(text, BadText) else text, r) for text, r in texts]
        chunks = encode_parts(self.tokenizer, [(text, r.is_continuation) for text, r in good])
        unknown = sum(chunk.count(self.tokenizer.unk) for chunk in chunks)
        for chunk, (_, r) in zip(chunks, good, strict=True):
            # A continuation may have no tokens; the document has some from earlier ranges.
            if self.append_eod and r.is_last and (chunk or r.is_continuation):
                chunk.append(self.tokenizer.eod)
        return EncodedBatch(
            np.array(list(chain.from_iterable(chunks)), token_dtype(self.tokenizer.vocab_size)),
            np.array([len(chunk) for chunk in chunks], np.int32),
            np.array([r.is_last for _, r in texts], bool),
            np.array([isinstance(text, BadText) for text, _ in texts], bool),
            unknown,
            [text.message for text in bad],
            sum(len(text.encode()) for text, _ in good),
        )


def encode_parts(tokenizer: Tokenizer, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
    """Ids of each text, given whether it continues a document that was split between words."""
    # Many tokenizers put a space before a text. A continuation is therefore encoded after a word,
    # and the word's ids are removed.
    chunks = tokenizer.encode_batch([WORD * later + text for text, later in texts])
    for index, (text, is_continuation) in enumerate(texts):
        if is_continuation:
            chunk, word = chunks[index], tokenizer.encode(WORD)
            is_apart = chunk[: len(word)] == word
            chunks[index] = chunk[len(word) :] if is_apart else tokenizer.encode(text)
    return chunks
