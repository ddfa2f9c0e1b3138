"""Chat templates of tokenizers: which part of a chat's text the assistant writes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megafrontier.common.errors import UserError
from megafrontier.data.tokenizers.base import Tokenizer

Message = Mapping[str, Any]
"""One turn of a chat: its `role`, its `content`, and what else the template reads."""

TOOL_KEYS = ("tool_calls", "function_call")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

_PROBE = "Probe"
_USER = {"role": "user", "content": "Hi"}
_LONGEST_PIECE = 200  # characters


class TextPart(NamedTuple):
    """A text that is tokenised by itself, because the model begins or ends to speak there."""

    text: str
    is_trained: bool
    has_end: bool = False
    """Whether the end token follows."""


class _Ends(NamedTuple):
    """What a template writes after the assistant's turn."""

    always: str
    """After each turn, for example `<|im_end|>`."""
    at_last: str
    """After `always`, if the chat ends with the turn."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Note [End of a turn]
    A model that is not trained on the token that ends its turn never stops. Templates write this
    token in one of these places:
    1. after every turn of the assistant, as `<|im_end|>` of ChatML,
    2. after the chat's last turn only, as an eos token,
    3. before the next turn: GLM's `<|user|>` begins a turn and ends the one before,
    4. nowhere. Then the eod of `--append-eod` ends the last turn, and no other turn has an end.
    `_ends` finds 1 and 2 in a chat of two turns, rendered with and without a turn after it.
    """

    tokenizer: Tokenizer

    @cached_property
    def has_end(self) -> bool:
        """Whether the template ends the last turn of a chat.

        Raises UserError if the template refuses a chat of two turns.
        """
        chat = [_USER, {"role": "assistant", "content": _PROBE}]
        whole = self._render(chat)
        return self._with_end(chat, whole, None) is not None

    def parts(
        self, chat: Sequence[Message], trained: Sequence[int], tools: Any
    ) -> Iterator[TextPart]:
        """Yield the text of a chat up to the last of the `trained` turns, and its end.

        Raises UserError for a chat that cannot be trained on with this template.
        """
        last, before = trained[-1], 0
        whole = self._render(chat[: last + 1], tools)
        full = self._with_end(chat[: last + 2], whole, tools, last)
        if full is None and self.has_end:
            raise UserError(_no_end(last))
        full = full or whole
        for turn in trained:
            start = self._start(chat, turn, full, tools)
            end = self._end(chat, turn, full, start, tools) if turn < last else len(full)
            yield TextPart(full[before:start], False)
            yield TextPart(full[start:end], True)
            before = end

    def end_pieces(self) -> set[str]:
        """The pieces that the template writes right after a turn of the assistant: those that end
        it, or begin the next turn (Note [End of a turn]).

        Raises UserError if the template refuses a chat of two turns.
        """
        chat = [_USER, {"role": "assistant", "content": _PROBE}]
        roles = ("user", "tool")
        after = [self._try([*chat, {**_USER, "role": role}], None) or "" for role in roles]
        tails = [text.rpartition(_PROBE)[2] for text in (self._render(chat), *after)]
        ends = [(tail, self._marker_end(tail, 0)) for tail in tails]
        return {tail[:end].strip() for tail, end in ends if end is not None}

    def check_written(self, chat: Sequence[Message], trained: Sequence[int], tools: Any) -> None:
        """Raise UserError for tools, tool calls or reasoning that the template leaves out.

        Also raises it if the template refuses the tools.
        """
        upto = chat[: trained[-1] + 1]
        if tools and self._render(upto, tools) == self._try(upto, None):
            raise UserError("the chat template does not write 'tools', need a chat without")
        for turn, message in enumerate(upto):
            # Templates leave out the reasoning of earlier turns by intention.
            for keys in (TOOL_KEYS, REASONING_KEYS if turn in trained else ()):
                named = [key for key in keys if message.get(key)]
                rest = {key: value for key, value in message.items() if key not in named}
                if named and self._is_same(chat[:turn], message, rest, tools):
                    raise UserError(f"turn {turn}: the chat template does not write {named[0]!r}")

    def _is_same(self, before: Sequence[Message], a: Message, b: Message, tools: Any) -> bool:
        text = self._try([*before, a], tools)
        return text is not None and text == self._try([*before, b], tools)

    @cached_property
    def _ends(self) -> _Ends:
        chat = [_USER, {"role": "assistant", "content": _PROBE}]
        _, probe, tail = self._render(chat).rpartition(_PROBE)
        if not probe:
            raise UserError("the chat template does not write the assistant's turn")
        followed = self._try([*chat, _USER], None)
        if followed is None:  # it takes chats of two turns only
            return _Ends(tail, "")
        at = self._shared(tail, followed.rpartition(_PROBE)[2])
        return _Ends(tail[:at], tail[at:])

    @cached_property
    def _pieces(self) -> re.Pattern[str]:
        return re.compile(self.tokenizer.markers)

    def _with_end(
        self, chat: Sequence[Message], whole: str, tools: Any, last: int = 1
    ) -> str | None:
        """The text `whole` of a chat up to turn `last`, with this turn's end; None without one."""
        if "".join(self._ends).strip():
            is_closed = whole.rstrip().endswith("".join(self._ends).rstrip())
            return whole if is_closed or self._ends_with_piece(whole) else None
        after = chat[last + 1 :]
        if not after or after[0]["role"] == "assistant":
            # Tools answer a call, and the user answers a text.
            role = "tool" if chat[last].get("tool_calls") else "user"
            after = [{**_USER, "role": role}]
        followed = self._try([*chat[: last + 1], *after], tools) or ""
        at = self._shared(whole, followed)
        end = self._marker_end(followed, at)
        return None if end is None or whole[at:].strip() else followed[:end]

    def _start(self, chat: Sequence[Message], turn: int, full: str, tools: Any) -> int:
        """Where turn `turn` begins in the text `full` of the chat: behind the prompt for it."""
        prompt = self._render(chat[:turn], tools, asks=True)
        if full.startswith(prompt):
            return len(prompt)
        if turn == 0:
            raise UserError(_NO_FIRST)
        at = self._shared(prompt, full)
        whole = self._render(chat[: turn + 1], tools)
        history = self._shared(self._render(chat[:turn], tools), prompt)
        if at < history or at < self._shared(prompt, whole):
            raise UserError(_rewritten(turn))
        raise UserError(
            f"turn {turn}: the chat template asks for it with {prompt[at:]!r}, but does not write "
            f"this before the turn, need --chat simple"
        )

    def _end(self, chat: Sequence[Message], turn: int, full: str, start: int, tools: Any) -> int:
        """Where turn `turn` ends in `full`, with the token that ends it. It is not the last."""
        whole = self._render(chat[: turn + 1], tools)
        at = self._shared(whole, full)
        if at < start or whole[at:].strip() != self._ends.at_last.strip():
            raise UserError(_rewritten(turn))
        closing = self._ends.always.rstrip()
        if closing:
            text = full[start:at]
            end = at if text.rstrip().endswith(closing) or self._ends_with_piece(text) else None
        else:
            end = self._marker_end(full, at)
        if end is None:
            raise UserError(_no_end(turn))
        return end

    def _marker_end(self, text: str, at: int) -> int | None:
        """Where the marker ends that begins the next turn at `at`; None if there is no marker."""
        space = re.compile(r"\s*").match(text, at)
        match = self._pieces.match(text, space.end() if space else at)
        return match.end() if match else None

    def _ends_with_piece(self, text: str) -> bool:
        ends = [m.end() for m in self._pieces.finditer(text, max(0, len(text) - _LONGEST_PIECE))]
        return bool(ends) and ends[-1] >= len(text.rstrip())

    def _shared(self, a: str, b: str) -> int:
        """How many characters both texts begin with, without a part of a marker."""
        at, most = 0, min(len(a), len(b))
        while at < most:
            middle = (at + most + 1) // 2
            at, most = (middle, most) if a[:middle] == b[:middle] else (at, middle - 1)
        if at in (len(a), len(b)):
            return at
        for text in (a, b):
            for match in self._pieces.finditer(text, max(0, at - _LONGEST_PIECE)):
                if match.start() < at < match.end() and text[at : match.end()].strip():
                    return match.start()
                if match.start() >= at:
                    break
        return at

    def _try(self, chat: Sequence[Message], tools: Any) -> str | None:
        try:
            return self.tokenizer.render_chat(chat, tools=tools)
        except UserError:
            return None

    def _render(self, chat: Sequence[Message], tools: Any = None, asks: bool = False) -> str:
        try:
            return self.tokenizer.render_chat(chat, asks, tools)
        except UserError as error:
            if not chat or chat[0]["role"] == "assistant":
                raise UserError(_NO_FIRST) from error
            raise


_NO_FIRST = "turn 0 is the assistant's, and the chat template needs another turn before it"


def _no_end(turn: int) -> str:
    return (
        f"turn {turn}: the chat template writes no token that ends it, need weight 0 for the "
        f"turn, or --chat simple"
    )


def _rewritten(turn: int) -> str:
    return (
        f"turn {turn}: the chat template rewrites it when more turns follow, need weight 0 for "
        f"the turn, or --chat simple"
    )
