"""The command `chat`: talk with the model of a checkpoint, whose cache is kept between turns."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from megafrontier.commands.checkpoints import saved_config
from megafrontier.commands.generate import (
    Sampler,
    check_request,
    continue_text,
    explain_lack_of_memory,
    load_on,
    make_cache,
    stream_text,
)
from megafrontier.common.checkpoints import of_newest
from megafrontier.common.errors import UserError, need
from megafrontier.data.text.chats import Template
from megafrontier.data.text.talk import Talk
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.model.gpt import GPT

LONGEST_CONTEXT = 8192
"""Tokens that the cache has room for by default."""


def chat_command(
    path: Path,
    turns: Iterator[str],
    show: Callable[[str], Any],
    note: Callable[[str], Any],
    *,
    template: Template | None = None,
    system: str = "",
    context: int | None = None,
    device: str = "any",
    weights: str = "weight",
    **sampling: Any,
) -> None:
    """Answer each of the user's `turns` with the model of a checkpoint. Each piece of a reply goes
    to `show`, and what the user should know to `note`. The turn `/reset` begins another chat.

    template: as for `prepare --chat`; None: the tokenizer's if it has one, else simple.
    context: tokens of the chat that the model reads at most; the oldest turns are dropped for it.
    device, weights, sampling: as for `generate_command`.

    Raises UserError for a bad checkpoint or value, and OutOfMemory.
    """
    length = sampling.pop("max_new_tokens")
    request = partial(_check, context=context, max_new_tokens=length, sampling=sampling)
    load = partial(_open, check=request, device=device, weights=weights)
    model, tokenizer, room = of_newest(path, load)
    template = template or ("tokenizer" if tokenizer.has_chat_template else "simple")
    if template == "tokenizer" and not tokenizer.has_chat_template:
        raise UserError("--chat: tokenizer, but it has no chat template, need simple")
    begin = partial(Talk, tokenizer, template, system)
    sampler = Sampler(**sampling, vocab_size=tokenizer.vocab_size)
    session = Session(model, tokenizer, begin(), sampler, room, length)
    with explain_lack_of_memory(next(model.parameters()).device):
        for turn in turns:
            if turn.strip() == "/reset":
                session.talk = begin()
                continue
            if session.ask(turn):
                note(f"--context: {room} tokens are full, the oldest turns were dropped")
            session.answer(show)
            show("\n")


def _check(config: Any, context: int | None, max_new_tokens: int, sampling: Any) -> int:
    """The room for tokens. Raises UserError for an option that the command cannot use."""
    check_request(config, [], max_new_tokens=max_new_tokens, **sampling)
    most = config.sequence_length
    room = min(most, LONGEST_CONTEXT) if context is None else context
    need(2 <= room <= most, "--context", room, f"need 2 to {most} (model.sequence_length)")
    return room


def _open(
    checkpoint: Path, check: Callable[[Any], int], device: str, weights: str
) -> tuple[GPT, Tokenizer, int]:
    config = saved_config(checkpoint)
    room = check(config.model)
    tokenizer = load_tokenizer(config.tokenizer)
    return load_on(device, checkpoint, config, weights), tokenizer, room


class Session:
    """A chat with a model, whose cache holds the tokens of the chat that it has read.

    The cache is kept as long as the chat's tokens begin with those in it. States of delta attention
    cannot be taken back to an earlier token, so otherwise all tokens are read anew.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        talk: Talk,
        sampler: Sampler,
        room: int,
        max_new_tokens: int,
    ) -> None:
        self.talk = talk
        self._model, self._tokenizer, self._sampler = model, tokenizer, sampler
        self._room, self._max_new_tokens = room, max_new_tokens
        self._read: list[int] = []
        """The tokens in the cache."""
        self._cache = make_cache(model, room)

    def ask(self, text: str) -> bool:
        """Append a turn of the user. Returns whether the oldest turns had to be dropped. Raises
        UserError for a turn that is too long by itself."""
        self.talk.ask(text)
        wanted = min(self._max_new_tokens, self._room // 2)
        is_dropped = False
        while len(self.talk.tokens) + wanted > self._room and self.talk.forget():
            is_dropped = True
        count = len(self.talk.tokens)
        need(count < self._room, "turn", f"{count} tokens", f"need at most {self._room - 1}")
        return is_dropped

    def answer(self, show: Callable[[str], Any]) -> None:
        """Let the model reply, and pass each piece of its text to `show`. An interrupt ends the
        reply, on a terminal."""
        prompt = list(self.talk.tokens)
        self._rewind(prompt)
        ids: list[int] = []
        stops: list[int] = []
        pieces: list[str] = []
        try:
            for piece in stream_text(self._ids(prompt, ids, stops), self._tokenizer.decode, prompt):
                pieces.append(piece)
                show(piece)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            # Some blocks may have read a token that others have not.
            self._cache = make_cache(self._model, self._room)
        self.talk.reply("".join(pieces), ids, stops[0] if stops else None)
        self._read = [*prompt, *ids][: self._cache.length]

    def _ids(self, prompt: list[int], ids: list[int], stops: list[int]) -> Iterator[int]:
        """Yield the tokens of the reply, and add them to `ids`; the one that ends it to `stops`."""
        room = min(self._max_new_tokens, self._room - len(prompt))
        new = prompt[self._cache.length :]
        for token in islice(continue_text(self._model, self._cache, new, self._sampler), room):
            if token in self.talk.stops:
                stops.append(token)
                return
            ids.append(token)
            yield token

    def _rewind(self, prompt: list[int]) -> None:
        """Begin with an empty cache unless the prompt begins with what it holds."""
        count = len(self._read)
        is_kept = self._cache.length == count < len(prompt) and prompt[:count] == self._read
        if not is_kept:
            self._cache = make_cache(self._model, self._room)


def read_turns() -> Iterator[str]:
    """The user's turns, a line each, from a terminal or any other standard input. `/exit` ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (lets `input` edit lines)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line
