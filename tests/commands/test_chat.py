"""A talk reads each token once, and says what a model says that reads all of it anew."""

import io
import re

import pytest

from megafrontier.cli import main
from megafrontier.commands.chat import Session
from megafrontier.commands.generate import Sampler, generate
from megafrontier.common.errors import UserError
from megafrontier.data.text.talk import Talk
from megafrontier.data.tokenizers.tokenizer import ByteTokenizer
from tests.model.small_models import DELTA_WINDOWS, LATENT_QUERIES, SHAPES, filled, small_config

KINDS = {"llama": SHAPES["llama"], "latent": LATENT_QUERIES, "delta, windows": DELTA_WINDOWS}
WORDS = ("Hi?", "More?", "And?")


def begin(shape, room=160, most=8):
    config = small_config(**{**shape, "vocab_size": 257, "sequence_length": 160})
    tokenizer = ByteTokenizer()
    talk = Talk(tokenizer, "simple")
    return Session(filled(config), tokenizer, talk, Sampler(temperature=0), room, most)


@pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS)
def test_a_turn_reads_only_what_is_new_and_gets_the_reply_of_a_fresh_model(shape):
    session = begin(shape)
    model, read = session._model, []
    model.embedding.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
    known = 0
    for word in WORDS:
        assert not session.ask(word)
        prompt = list(session.talk.tokens)
        read.clear()
        session.answer(lambda _: None)
        reply = session.talk.tokens[len(prompt) :]
        assert read[0] == len(prompt) - known
        known += sum(read)
        session_model_only = list(
            generate(model, prompt, max_new_tokens=8, temperature=0, stop=256)
        )
        assert reply == session_model_only
    assert known <= len(session.talk.tokens)


def test_after_another_talk_or_an_interrupt_the_cache_begins_empty(monkeypatch):
    session = begin(DELTA_WINDOWS)
    session.ask("Hi?")
    session.answer(lambda _: None)
    session.talk = Talk(ByteTokenizer(), "simple")
    session.ask("Well?")
    expected = list(generate(session._model, session.talk.tokens, max_new_tokens=8, temperature=0))
    prompt = list(session.talk.tokens)
    session.answer(lambda _: None)
    assert session.talk.tokens[len(prompt) :] == expected

    def interrupt(_):
        raise KeyboardInterrupt

    session.ask("So?")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(KeyboardInterrupt):  # which ends the command, unless on a terminal
        session.answer(interrupt)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    session.answer(interrupt)
    session.ask("So?")
    prompt = list(session.talk.tokens)
    expected = list(generate(session._model, prompt, max_new_tokens=8, temperature=0, stop=256))
    session.answer(lambda _: None)
    assert session.talk.tokens[len(prompt) :] == expected


def test_the_oldest_turns_are_dropped_when_the_context_is_full():
    session = begin(SHAPES["llama"], room=80)
    dropped = []
    for word in WORDS:
        dropped.append(session.ask(word))
        session.answer(lambda _: None)
        assert len(session.talk.tokens) <= 80
    assert dropped == [False, False, True]
    with pytest.raises(UserError, match=r"^turn: \d+ tokens, need at most 79$"):
        session.ask("x" * 80)


def talk(run, text, monkeypatch, capfd, *words):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    given = ["chat", str(run), "--temperature", "0", "--max-new-tokens", "6", *words]
    code = main(given)
    said = capfd.readouterr()
    return code, said.out, said.err


def test_each_line_of_the_input_is_a_turn_until_it_ends(my_hf, monkeypatch, capfd):
    assert main(["import", "my-hf", "--out", "run"]) == 0
    capfd.readouterr()
    code, once, err = talk("run", "Hi?\n", monkeypatch, capfd)
    assert (code, err) == (0, "")
    assert once.endswith("\n")
    twice = "Hi?\n\n/reset\nHi?\n/exit\nMore?\n"
    assert talk("run", twice, monkeypatch, capfd)[1] == 2 * once
    code, out, err = talk("run", "Hi?\n", monkeypatch, capfd, "--context", "999")
    assert (code, out) == (2, "")
    assert err.startswith("megafrontier: --context: 999, need 2 to 96 ")


def test_a_chat_that_the_model_cannot_have_is_refused_in_one_line(my_hf, monkeypatch, capfd):
    assert main(["import", "my-hf", "--out", "run", "--tokenizer", "bytes"]) == 0
    capfd.readouterr()
    code, _, err = talk("run", "Hi?\n", monkeypatch, capfd, "--chat", "tokenizer")
    assert code == 2
    assert err == "megafrontier: --chat: tokenizer, but it has no chat template, need simple\n"
    code, _, err = talk("run", "x" * 99, monkeypatch, capfd)
    assert code == 2
    assert re.fullmatch(r"megafrontier: turn: \d+ tokens, need at most 95\n", err)
