"""Chats become tokens, and a mask of the tokens that are trained on: the assistant's turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import token_dtype
from megafrontier.data.text.encode import EncodedBatch, Encoder
from megafrontier.data.text.reader import BadText, TextRange, check_text, read_values, refuse_bad

Template = Literal["tokenizer", "simple"]
"""tokenizer: the chat template that comes with the tokenizer. simple: `<|ROLE|>`, a new line and
the text of each turn, and the end token after each of the assistant's."""


Message = Mapping[str, str]
"""One turn of a chat: its `role` and `content`."""


class Part(NamedTuple):
    """A text that is tokenised by itself, because the model begins or ends to speak there."""

    text: str
    is_trained: bool
    has_end: bool = False
    """Whether the end token follows."""


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Tokenises batches of chats in a worker."""

    template: Template = "simple"

    def __post_init__(self) -> None:
        """Raises UserError if the tokenizer has no template and `template` asks for it."""
        if self.template == "tokenizer" and not self.tokenizer.has_chat_template:
            raise UserError("--chat: tokenizer, but it has no chat template, need simple")

    def encode(self, ranges: Sequence[TextRange]) -> EncodedBatch:
        """Tokenise a batch. Raises UserError at the first bad chat, unless `skip_bad`."""
        chats = [chat for r in ranges for chat in read_values(r, self.key, self._render)]
        bad = [chat for chat in chats if isinstance(chat, BadText)]
        if bad and not self.skip_bad:
            raise refuse_bad(bad[0])
        good = [[] if isinstance(chat, BadText) else chat for chat in chats]
        encoded = iter(
            self.encode_parts([(part.text, i > 0) for chat in good for i, part in enumerate(chat)])
        )
        ids: list[int] = []
        mask: list[bool] = []
        sizes = []
        for chat in good:
            start = len(ids)
            for part in chat:
                chunk = next(encoded) + [self.tokenizer.eod] * part.has_end
                ids += chunk
                mask += [part.is_trained] * len(chunk)
            if self.append_eod and chat:
                ids.append(self.tokenizer.eod)
                mask.append(False)
            sizes.append(len(ids) - start)
        return EncodedBatch(
            np.array(ids, token_dtype(self.tokenizer.vocab_size)),
            np.array(sizes, np.int32),
            np.ones(len(sizes), bool),
            np.array([isinstance(chat, BadText) for chat in chats], bool),
            ids.count(self.tokenizer.unk),
            [chat.message for chat in bad],
            sum(len(part.text.encode()) for chat in good for part in chat),
            np.array(mask, np.uint8),
        )

    def _render(self, value: Any, place: str) -> list[Part] | BadText:
        """The parts of a chat, up to the assistant's last turn."""
        chat = _check_chat(value, place)
        if isinstance(chat, BadText):
            return chat
        try:
            parts = list(_simple(chat) if self.template == "simple" else self._templated(chat))
        except UserError as error:
            return BadText(f"{place}: {error}")
        return parts or BadText(f"{place}: no turn of the assistant, need one to train on")

    def _templated(self, chat: Sequence[Message]) -> Iterator[Part]:
        before = ""
        for number, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            prompt = self.tokenizer.render_chat(chat[:number], asks=True)
            whole = self.tokenizer.render_chat(chat[: number + 1])
            if not (prompt.startswith(before) and whole.startswith(prompt)):
                raise UserError("the chat template rewrites earlier turns, need --chat simple")
            yield Part(prompt[len(before) :], False)
            yield Part(whole[len(prompt) :], True)
            before = whole


def _simple(chat: Sequence[Message]) -> Iterator[Part]:
    before = ""
    for message in chat:
        header = f"{before}<|{message['role']}|>\n"
        if message["role"] == "assistant":
            yield Part(header, False)
            yield Part(message["content"], True, has_end=True)
            before = "\n"
        else:
            before = f"{header}{message['content']}\n"


def _check_chat(value: Any, place: str) -> list[Message] | BadText:
    if not isinstance(value, list) or not value:
        return BadText(f"{place} is {type(value).__name__}, need a list of turns")
    for number, message in enumerate(value):
        at = f"{place}: turn {number}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return BadText(f"{at}: need the keys role and content")
        for key in ("role", "content"):
            text = check_text(message[key], f"{at}: {key!r}")
            if isinstance(text, BadText):
                return text
    return value
