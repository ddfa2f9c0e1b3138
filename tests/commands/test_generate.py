"""Text comes out a token at a time, the same as without a cache, from the right distribution."""

import pytest
import torch

from megafrontier.cli import main
from megafrontier.commands import generate as generate_module
from megafrontier.commands.generate import (
    generate,
    next_token_probabilities,
    stream_text,
)
from megafrontier.common.errors import UserError
from megafrontier.config import load_config
from megafrontier.data.tokenizers.tokenizer import ByteTokenizer, SentencePieceTokenizer
from megafrontier.families.hf_io import export_model
from megafrontier.model.attention.kinds import KVCache
from tests.commands.helpers import run_command
from tests.model.small_models import DELTA, LATENT_QUERIES, small_config

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("pieces", [[24], [1] * 24, [5, 1, 1, 7, 10]])
def test_cached_logits_are_the_uncached_ones(shape, pieces, make_model, tokens):
    assert_cached(shape, pieces, make_model, tokens)


def test_latent_attention_expands_cached_keys_and_values_once(make_model, tokens):
    assert_cached(small_config(**LATENT_QUERIES), [5, 1, 1, 17], make_model, tokens)


def test_delta_attention_goes_on_from_its_states_and_the_last_tokens(make_model, tokens):
    assert_cached(small_config(**DELTA), [5, 1, 1, 17], make_model, tokens)


def assert_cached(config, pieces, make_model, tokens):
    model, cache = make_model(config), KVCache(config, batch=2)
    with torch.no_grad():
        logits = torch.cat([model(part, cache=cache) for part in tokens.split(pieces, 1)], 1)
        torch.testing.assert_close(logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_greedy_text_is_that_of_transformers(shape, make_model, tmp_path):
    import transformers

    model = make_model(shape)
    export_model(shape, model.state_dict(), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=15, do_sample=False)
    found = list(generate(model, PROMPT, max_new_tokens=15, temperature=0))
    assert found == expected[0, len(PROMPT) :].tolist()


def test_no_logits_are_computed_that_nobody_reads(shape, make_model):
    """Of a long prompt they would take more memory than all else."""
    model = make_model(shape)
    rows = []
    model.head.register_forward_pre_hook(lambda _, arguments: rows.append(arguments[0].shape[1]))
    assert len(list(generate(model, PROMPT, max_new_tokens=4, temperature=0))) == len(rows) == 4
    assert rows == [1] * 4


def test_a_seed_gives_the_same_text_and_another_seed_another(make_config, make_model):
    model = make_model(make_config())

    def text(seed):
        return list(generate(model, PROMPT, max_new_tokens=15, seed=seed))

    assert text(1) == text(1) != text(2)
    assert len({tuple(text(None)) for _ in range(3)}) > 1


def test_stops_at_the_sequence_length_the_count_and_the_stop_token(make_config, make_model):
    model = make_model(make_config())
    greedy = list(generate(model, PROMPT, max_new_tokens=1000, temperature=0))
    assert len(PROMPT) + len(greedy) == model.config.sequence_length
    assert list(generate(model, PROMPT, max_new_tokens=3, temperature=0)) == greedy[:3]
    stop = greedy[4]
    stopped = list(generate(model, PROMPT, max_new_tokens=1000, temperature=0, stop=stop))
    assert stopped == greedy[: greedy.index(stop)]


@pytest.mark.parametrize("temperature", [0, 2.0])
def test_tokens_beyond_the_vocabulary_never_follow(temperature, make_config, make_model):
    model = make_model(make_config())
    sampling = {"max_new_tokens": 15, "temperature": temperature, "seed": 1}
    assert max(generate(model, PROMPT, **sampling)) >= 6
    assert max(generate(model, PROMPT, **sampling, vocab_size=6)) < 6


def test_probabilities_keep_just_the_likeliest():
    base = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1])
    logits = base.log() + 3

    def close(found, expected):
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-7
        )

    close(next_token_probabilities(logits), base.tolist())
    close(next_token_probabilities(logits, top_k=2), [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0])
    close(next_token_probabilities(logits, top_k=9), base.tolist())
    close(next_token_probabilities(logits, top_p=0.6), [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0])
    close(next_token_probabilities(logits, top_p=0.7), [0, 0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0])
    close(next_token_probabilities(logits, top_p=0.01), [0, 1, 0, 0, 0])
    close(next_token_probabilities(logits, top_k=2, top_p=0.61), [0, 1, 0, 0, 0])
    squared = (base**2 / (base**2).sum()).tolist()
    close(next_token_probabilities(logits, temperature=0.5), squared)
    close(next_token_probabilities(logits, temperature=5e-324), [0, 1, 0, 0, 0])


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_whose_output_is_not_finite_is_refused(make_config, make_model, temperature):
    model = make_model(make_config())
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    tokens = generate(model, PROMPT, max_new_tokens=3, temperature=temperature, seed=0)
    with pytest.raises(
        UserError, match="logits of the next token are not finite, need other weights"
    ):
        next(tokens)


def test_sampled_tokens_follow_the_probabilities(make_config, make_model):
    """1000 first tokens against their exact distribution: chi-square below its 99.9 % point."""
    model = make_model(make_config(vocab_size=6, vocab_multiple=1))
    with torch.no_grad():
        exact = next_token_probabilities(model(torch.tensor([[3, 1]]))[0, -1], 2.0, 4)
    draws = torch.tensor(
        [
            next(generate(model, [3, 1], max_new_tokens=1, temperature=2.0, top_k=4, seed=i))
            for i in range(1000)
        ]
    )
    counts = torch.bincount(draws, minlength=6)
    kept = exact > 0
    assert kept.sum() == 4
    assert not counts[~kept].any()
    expected = exact[kept] * 1000
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 16.27


@pytest.mark.parametrize(
    ("raw", "prompt", "shown"),
    [
        ("naïve 🎉 日本".encode(), b"", list("naïve 🎉 日本")),
        (b" c  d", b" a b", list(" c  d")),
        (b"ab\xf0\x9f", b"", ["a", "b", "\ufffd"]),  # never becomes a character
        (b"a\xf0\x9fb", b"", ["a", "\ufffdb"]),
    ],
)
def test_streamed_text_is_whole_characters_and_keeps_its_space(raw, prompt, shown):
    def decode(tokens):  # leaves out the first space, as Llama's does
        return bytes(tokens).decode(errors="replace").removeprefix(" ")

    assert list(stream_text(iter(raw), decode, prompt)) == shown


def test_generated_text_keeps_its_space_behind_the_prompt(life, capfd, monkeypatch):
    decode = SentencePieceTokenizer.decode
    monkeypatch.setattr(  # as Llama's does
        SentencePieceTokenizer, "decode", lambda *a: decode(*a).removeprefix(" ")
    )
    tokens = SentencePieceTokenizer(life / "tokenizer" / "tokenizer.model").encode(" ist breit")
    sampled = []
    monkeypatch.setattr(
        generate_module, "generate", lambda *_, **options: sampled.append(options) or iter(tokens)
    )
    text = run_command(capfd, "generate", life / "run", "--prompt", "Der Fluß")
    assert text.rstrip("\n") == "Der Fluß ist breit"
    assert sampled[0]["vocab_size"] == 300


def test_a_context_that_is_too_short_for_all_new_tokens_is_noted(life, capfd):
    words = ["generate", str(life / "run"), "--prompt", "Der Fluß", "--temperature", "0"]
    length = load_config(life / "config.yaml").model.sequence_length
    for count in (3, length):
        assert main([*words, "--max-new-tokens", str(count)]) == 0
        is_noted = "fit model.sequence_length\n" in capfd.readouterr().err
        assert is_noted == (count == length)


def test_an_empty_prompt_is_refused_where_no_model_learns_how_a_document_begins(
    life, capfd, monkeypatch
):
    saved = generate_module.saved_config

    def masked(checkpoint):
        config = saved(checkpoint)
        config.data.document_mask = True
        return config

    words = ["generate", str(life / "run"), "--prompt", "", "--max-new-tokens", "1"]
    assert main(words) == 0
    capfd.readouterr()
    monkeypatch.setattr(generate_module, "saved_config", masked)
    assert main(words) == 2
    assert capfd.readouterr().err.startswith("megafrontier: --prompt: empty, but with data.")


def test_generate_keeps_to_the_processors_where_the_machine_says_so(life, capfd, monkeypatch):
    """As train and evaluate do, whatever else there is."""
    load_model, saved_config = generate_module.load_model, generate_module.saved_config
    devices = []

    def load(path, config, device, weights):
        devices.append(device.type)
        return load_model(path, config, torch.device("cpu"), weights)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(generate_module, "load_model", load)
    words = ("generate", life / "run", "--prompt", "D", "--max-new-tokens", 1)
    for override in ("machine.device.name=any", "machine.device.name=cpu"):
        monkeypatch.setattr(
            generate_module, "saved_config", lambda path, o=override: saved_config(path, [o])
        )
        run_command(capfd, *words)
    monkeypatch.setattr(generate_module, "saved_config", saved_config)
    run_command(capfd, *words, "--device", "cpu")
    assert devices == ["cuda", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--temperature", "-1", "--temperature: -1.0, need 0 or more"),
        ("--max-new-tokens", "-1", "--max-new-tokens: -1, need 0 or more"),
        ("--prompt", "D" * 999, "--prompt: 999 tokens, need at most "),
        ("--top-p", "0", "--top-p: 0.0, need more than 0"),
        ("--top-k", "-1", "--top-k: -1"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_the_model_is_loaded(
    life, capfd, monkeypatch, option, value, problem
):
    monkeypatch.setattr(generate_module, "load_model", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr(generate_module, "load_tokenizer", lambda _: ByteTokenizer())
    assert main(["generate", str(life / "run"), "--prompt", "D", option, value]) == 2
    said = capfd.readouterr()
    assert said.err.startswith(f"megafrontier: {problem}")
    assert said.out == ""


def test_greedy_text_is_the_same_each_time_and_a_seed_repeats_the_rest(life, capfd):
    def text(*more):
        words = ("generate", life / "run", "--prompt", "Der Fl", "--max-new-tokens", 8, *more)
        return run_command(capfd, *words)

    greedy = text("--temperature", 0)
    assert greedy == text("--temperature", 0)
    assert greedy.startswith("Der Fl")
    assert len(greedy) > len("Der Fl") + 2
    assert text("--seed", 3) == text("--seed", 3)
    assert text("--seed", 3, "--top-k", 1) == greedy
