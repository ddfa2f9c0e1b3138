"""A talk has the tokens of a prepared chat, and appends to them as long as the template lets it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megafrontier.data.text.chats import ChatEncoder
from megafrontier.data.text.reader import TextRange
from megafrontier.data.text.talk import Talk
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.text import test_chats
from tests.data.text.test_chats import TWO, with_template

folder = test_chats.folder
USER, REPLY, NEXT = (TWO[i]["content"] for i in range(3))


def prepared(tokenizer: Tokenizer, template: Any) -> tuple[list[int], list[int]]:
    """The ids and the mask of a chat of four turns."""
    line = json.dumps({"messages": TWO[:4]}).encode()
    encoder = ChatEncoder(tokenizer, "messages", False, False, template)
    batch = encoder.encode([TextRange("x.jsonl", "lines", 1, line)])
    assert batch.mask is not None
    return batch.tokens.tolist(), batch.mask.tolist()


def assert_talk_is_prepared(tokenizer: Tokenizer, template: Any) -> None:
    ids, mask = prepared(tokenizer, template)
    first = mask.index(1)
    second = first + mask[first:].index(0)
    second += mask[second:].index(1)
    talk = Talk(tokenizer, template)
    talk.ask(USER)
    assert talk.tokens == ids[:first]
    length = next(i for i, token in enumerate(ids[first:]) if token in talk.stops)
    reply = ids[first : first + length]
    talk.reply(tokenizer.decode(reply), reply, ids[first + length])
    assert talk.tokens == ids[: first + length]
    talk.ask(NEXT)
    assert talk.tokens == ids[:second]


@pytest.mark.parametrize("name", ["CHATML", "DEFAULT_SYSTEM", "LLAMA", "GLM", "PHI", "MISTRAL"])
def test_the_tokens_are_those_of_the_prepared_chat(folder: Path, name: str) -> None:
    assert_talk_is_prepared(with_template(folder, getattr(test_chats, name)), "tokenizer")


def test_the_tokens_of_the_simple_template_are_those_of_the_prepared_chat() -> None:
    assert_talk_is_prepared(ByteTokenizer(), "simple")


@pytest.mark.parametrize("template", ["tokenizer", "simple"])
def test_a_reply_that_was_cut_short_is_ended_before_the_next_turn(
    folder: Path, template: Any
) -> None:
    tokenizer = with_template(folder, test_chats.CHATML)
    talk = Talk(tokenizer, template, system="Be kind.")
    talk.ask(USER)
    before = list(talk.tokens)
    reply = tokenizer.encode(REPLY)
    talk.reply(REPLY, reply, None)
    talk.ask(NEXT)
    kept = before + reply
    assert talk.tokens[: len(kept)] == kept
    assert talk.tokens[len(kept)] in talk.stops
    assert "Be kind." in tokenizer.decode(talk.tokens)


def test_a_template_that_rewrites_earlier_turns_gives_the_tokens_that_it_writes_now(
    folder: Path,
) -> None:
    drops = test_chats.CHATML.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    tokenizer = with_template(folder, drops)
    talk = Talk(tokenizer, "tokenizer")
    talk.ask(USER)
    thought = f"<think>Hm.</think>{REPLY}"
    talk.reply(thought, tokenizer.encode(thought), None)
    talk.ask(NEXT)
    turns = [*TWO[:1], {"role": "assistant", "content": REPLY}, TWO[2]]
    assert talk.tokens == tokenizer.encode(tokenizer.render_chat(turns, asks=True))


def test_what_is_forgotten_is_the_oldest_turn_and_its_reply(folder: Path) -> None:
    tokenizer = with_template(folder, test_chats.CHATML)
    talk = Talk(tokenizer, "tokenizer", system="Be kind.")
    talk.ask(USER)
    assert not talk.forget()
    talk.reply(REPLY, tokenizer.encode(REPLY), None)
    talk.ask(NEXT)
    assert talk.forget()
    alone = Talk(tokenizer, "tokenizer", system="Be kind.")
    alone.ask(NEXT)
    assert talk.tokens == alone.tokens
