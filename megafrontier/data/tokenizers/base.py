"""The interface of all tokenizers, and the names that they share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODEL_FILE = "tokenizer.model"
EOD_PIECES = ("<|endoftext|>", "</s>", "<eod>")
"""Pieces that end a document, for a tokenizer that does not define its end of text."""


class Tokenizer(ABC):
    """The interface of all tokenizers. They can be used in forked processes."""

    vocab_size: int
    """Number of ids. Every id is smaller."""
    min_vocab_size: int
    """Smallest vocabulary of a model; 0 without a tokenizer. Ids above are special tokens that were
    added later, for example `<pad>`, and occur only in texts that spell them out."""
    eod: int
    """Id that ends a document."""
    bos: int
    """Id that starts a text for models that expect one; `eod` if the tokenizer has none."""
    unk: int = -1
    """Id for characters without a piece; -1 if there is none."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special ids at its ends."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. Raises UserError for the tokenizer `none`."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Unknown ids, and the eod of SentencePiece and bytes, have none.

        Raises UserError for the tokenizer `none`.
        """

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be called."""
        return False

    @property
    def markers(self) -> str:
        """Regular expression of the pieces that a text is split at before it is tokenised."""
        return "(?!)"

    def render_chat(
        self, chat: Sequence[Mapping[str, Any]], asks: bool = False, tools: Any = None
    ) -> str:
        """Return the text of a chat, as the tokenizer's own template writes it; with `asks`, up to
        where the assistant's next turn begins. Each turn has a `role` and a `content`. `tools`
        describes the functions that the assistant may call.

        Raises UserError if the template refuses the chat.
        """
        raise NotImplementedError

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write into `folder` what `load_tokenizer(folder)` reads.

        Except for `bytes` and `none`, `transformers.AutoTokenizer` reads it, too.
        """
