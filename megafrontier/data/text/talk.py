"""A chat with a model: its tokens, turn by turn, as `prepare --chat` would write them."""

import re
from collections.abc import Sequence

from megafrontier.data.text.chats import Template, simple_prompt
from megafrontier.data.text.encode import encode_parts
from megafrontier.data.text.templates import ChatTemplate, Message, TextPart
from megafrontier.data.tokenizers.base import Tokenizer


class Talk:
    """The turns of a chat so far, and their tokens, which end where the model's reply begins.

    The tokens that the model has read and written stay, and a turn appends to them. So a model
    that keeps keys, values and states reads only what is new. They are made anew if the template
    writes earlier turns differently, as Qwen3's drops reasoning, and after `forget`.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, system: str = "") -> None:
        """Raises UserError if the template refuses a chat of two turns."""
        self.tokens: list[int] = []
        self._tokenizer, self._is_simple = tokenizer, template == "simple"
        self._turns: list[Message] = [{"role": "system", "content": system}] if system else []
        self._text = ""
        """With the tokenizer's template, the text of `tokens`."""
        self._stop: int | None = None
        self._pieces = re.compile(tokenizer.markers)
        ends = () if self._is_simple else ChatTemplate(tokenizer).end_pieces()
        ids = (tokenizer.encode(piece) for piece in ends)
        self.stops = {tokenizer.eod, *(piece[0] for piece in ids if len(piece) == 1)}
        """The tokens that end a reply."""

    def ask(self, text: str) -> None:
        """Append a turn of the user. Raises UserError if the template refuses it."""
        self._turns.append({"role": "user", "content": text})
        self._extend()

    def reply(self, text: str, ids: Sequence[int], stop: int | None) -> None:
        """Append the model's turn: its text, its tokens, and the one of `stops` after them, if
        any."""
        self._turns.append({"role": "assistant", "content": self._content(text)})
        self.tokens += ids
        self._text += text
        self._stop = stop

    def forget(self) -> bool:
        """Drop the user's oldest turn and the reply to it. Returns whether there was one."""
        first = next(i for i, turn in enumerate(self._turns) if turn["role"] == "user")
        if first + 1 >= len(self._turns):
            return False
        del self._turns[first : first + 2]
        self.tokens = []
        self._extend()
        return True

    def _extend(self) -> None:
        if self._is_simple:
            self._extend_simply()
        else:
            self._extend_by_template()
        self._stop = None

    def _extend_simply(self) -> None:
        parts = simple_prompt(self._turns)
        if not self.tokens:
            self.tokens = self._encode(parts)
        else:
            self.tokens += [self._tokenizer.eod, *self._encode(parts[-1:], is_later=True)]

    def _extend_by_template(self) -> None:
        prompt = self._tokenizer.render_chat(self._turns, asks=True)
        if self._stop is not None:
            end = self._pieces.match(prompt, len(self._text))
            if end and end[0].strip() == self._tokenizer.decode([self._stop]).strip():
                self.tokens.append(self._stop)
                self._text += end[0]
        if self.tokens and prompt.startswith(self._text):
            rest = TextPart(prompt[len(self._text) :], False)
            self.tokens += self._encode([rest], is_later=True)
        else:
            self.tokens = self._encode([TextPart(prompt, False)])
        self._text = prompt

    def _content(self, text: str) -> str:
        """The content of a turn that the template writes as the reply `text`: templates put white
        space around it, or strip it."""
        if self._is_simple:
            return text
        for content in (text, text.strip()):
            turn = {"role": "assistant", "content": content}
            written = self._tokenizer.render_chat([*self._turns, turn])
            if written.startswith(self._text + text):
                return content
        return text.strip()

    def _encode(self, parts: Sequence[TextPart], is_later: bool = False) -> list[int]:
        texts = [(part.text, is_later or i > 0) for i, part in enumerate(parts)]
        chunks = zip(parts, encode_parts(self._tokenizer, texts), strict=True)
        return [i for part, ids in chunks for i in [*ids, *[self._tokenizer.eod] * part.has_end]]
