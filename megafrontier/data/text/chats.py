"""Chats become tokens, and a mask of the tokens that are trained on: the assistant's turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import token_dtype
from megafrontier.data.text.encode import EncodedBatch, Encoder, encode_parts
from megafrontier.data.text.reader import (
    BadText,
    TextRange,
    check_text,
    parse_json,
    read_values,
    refuse_bad,
)
from megafrontier.data.text.templates import (
    REASONING_KEYS,
    TOOL_KEYS,
    ChatTemplate,
    Message,
    TextPart,
)
from megafrontier.data.tokenizers.base import Tokenizer

Template = Literal["tokenizer", "simple"]
"""tokenizer: the chat template that comes with the tokenizer. simple: `<|ROLE|>`, a new line and
the text of each turn, and the end token after each of the assistant's."""

CHAT_COLUMNS = ("tools", "functions", "chat_template_kwargs")
"""What a line or row may hold besides the turns of the chat."""

_UNREAD_COLUMNS = CHAT_COLUMNS[1:]
_SHOWN_CHARACTERS = 300
"""At each end of a long part of a sample."""
_WEIGHT_KEYS = ("weight", "train")


class _Chat(NamedTuple):
    turns: list[Message]
    trained: list[int]
    """The turns that are trained on, in order."""
    tools: list[Any] | None


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """Tokenises batches of chats in a worker."""

    template: Template = "simple"

    def __post_init__(self) -> None:
        """Raises UserError if `template` asks for the tokenizer's template, and it has none, or
        one that ends no turn, without `append_eod`."""
        if self.template == "simple":
            return
        if not self.tokenizer.has_chat_template:
            raise UserError("--chat: tokenizer, but it has no chat template, need simple")
        try:
            has_end = self._templated.has_end
        except UserError as error:
            raise UserError(f"--chat: tokenizer, but {error}, need simple") from error
        if not has_end and not self.append_eod:
            raise UserError(
                "--chat: tokenizer, but its chat template writes no token that ends a turn, "
                "need --append-eod, or simple"
            )

    @cached_property
    def _templated(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def encode(self, ranges: Sequence[TextRange]) -> EncodedBatch:
        """Tokenise a batch. Raises UserError at the first bad chat, unless `skip_bad`."""
        chats = [chat for r in ranges for chat in read_values(r, self.key, self._render, True)]
        bad = [chat for chat in chats if isinstance(chat, BadText)]
        if bad and not self.skip_bad:
            raise refuse_bad(bad[0])
        good = [[] if isinstance(chat, BadText) else chat for chat in chats]
        parts = [(part.text, i > 0) for chat in good for i, part in enumerate(chat)]
        encoded = iter(encode_parts(self.tokenizer, parts))
        # The model stops at this eod if its template writes no other end.
        is_eod_trained = self.template == "tokenizer" and not self._templated.has_end
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
                mask.append(is_eod_trained)
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

    def _render(self, record: Any, place: str) -> list[TextPart] | BadText:
        """The parts of the chat in a line or row, up to the last turn that is trained on."""
        try:
            chat = _read_chat(record, self.key)
            if self.template == "simple":
                return list(_simple(chat))
            self._templated.check_written(*chat)
            return list(self._templated.parts(*chat))
        except UserError as error:
            return BadText(f"{place}: {error}")


def _simple(chat: _Chat) -> Iterator[TextPart]:
    if chat.tools:
        raise UserError("has 'tools', which --chat simple does not write")
    before = ""
    for turn, message in enumerate(chat.turns[: chat.trained[-1] + 1]):
        extra = [key for key in (*TOOL_KEYS, *REASONING_KEYS) if message.get(key)]
        if extra:
            raise UserError(f"turn {turn}: {extra[0]!r}, which --chat simple does not write")
        header = f"{before}<|{message['role']}|>\n"
        if message["role"] == "assistant":
            yield TextPart(header, False)
            yield TextPart(message["content"], turn in chat.trained, has_end=True)
            before = "\n"
        else:
            before = f"{header}{message['content']}\n"


def shown_chat(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int]) -> str:
    """The text of a chat's tokens, with what is trained on between ▶ and ◀. A long part is
    shortened in its middle, and an end token without a text is `<eod>`."""
    shown = []
    for is_trained, group in groupby(zip(ids, mask, strict=True), lambda pair: bool(pair[1])):
        run = [token for token, _ in group]
        text = tokenizer.decode(run)
        if run[-1] == tokenizer.eod and not tokenizer.decode(run[-1:]):
            text += "<eod>"
        if len(text) > 2 * _SHOWN_CHARACTERS:
            text = f"{text[:_SHOWN_CHARACTERS]} … {text[-_SHOWN_CHARACTERS:]}"
        shown.append(f"▶{text}◀" if is_trained else text)
    return "".join(shown)


def simple_prompt(turns: Sequence[Message]) -> list[TextPart]:
    """The parts of a chat up to where the assistant's next turn begins. The last part has all since
    the assistant's last turn."""
    asked = _Chat([*turns, {"role": "assistant", "content": ""}], [len(turns)], None)
    return list(_simple(asked))[:-1]


def _read_chat(record: Mapping[str, Any], key: str) -> _Chat:
    """The chat of a line or row. Raises UserError for one that cannot be read."""
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise UserError(f"{type(value).__name__}, need a list of turns")
    for column in _UNREAD_COLUMNS:
        if record.get(column):
            raise UserError(f"{column!r} beside it, which is not read, need tools, or none")
    turns = [_read_turn(message, f"turn {turn}") for turn, message in enumerate(value)]
    weights = [_weight(message, f"turn {turn}") for turn, message in enumerate(value)]
    trained = [turn for turn, weight in enumerate(weights) if weight]
    if not trained:
        raise UserError("no turn of the assistant, need one to train on")
    return _Chat(turns, trained, _read_tools(record.get("tools")))


def _read_turn(message: Any, place: str) -> Message:
    if isinstance(message, dict) and message.get("tool_calls"):
        # OpenAI leaves out the content of a turn that only calls tools, or writes null.
        message = {"content": None, **message}
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise UserError(f"{place}: need the keys role and content")
    for key in ("role", "content"):
        if key == "role" or message[key] is not None or not message.get("tool_calls"):
            text = check_text(message[key], f"{place}: {key!r}")
            if isinstance(text, BadText):
                raise UserError(text.message)
    return {key: value for key, value in message.items() if key not in _WEIGHT_KEYS}


def _weight(message: Mapping[str, Any], place: str) -> bool:
    """Whether a turn is trained on: OpenAI's `weight`, Axolotl's `train`."""
    is_assistant = message["role"] == "assistant"
    weights = [(key, message[key]) for key in _WEIGHT_KEYS if message.get(key) is not None]
    for key, weight in weights:
        if weight not in (0, 1):
            raise UserError(f"{place}: {key}: {weight!r}, need 0 or 1")
        if weight and not is_assistant:
            raise UserError(f"{place}: {key}: {weight!r}, need 0: only the assistant is trained")
    return is_assistant and all(weight for _, weight in weights)


def _read_tools(value: Any) -> list[Any] | None:
    """The functions that the assistant may call, in JSON or, as many datasets have it, its text."""
    if isinstance(value, str | bytes):
        text = check_text(value, "'tools'")
        value = parse_json(text, "'tools'") if isinstance(text, str) else text
    if isinstance(value, BadText):
        raise UserError(value.message)
    if value is not None and not isinstance(value, list):
        raise UserError(f"'tools' is {type(value).__name__}, need a list")
    return value or None
