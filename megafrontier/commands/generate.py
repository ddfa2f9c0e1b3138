"""Text from a model, a token at a time: sampling, the cache, and streaming whole characters."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megafrontier.common.errors import UserError
from megafrontier.config import ModelConfig
from megafrontier.model.attention import KVCache
from megafrontier.model.gpt import GPT

__all__ = ["KVCache", "check_request", "generate", "next_token_probabilities", "stream_text"]


def generate(
    model: GPT,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, each as soon as it is known.

    Ends after `max_new_tokens`, when prompt and text fill the model's sequence length, or before
    the token `stop`. Sampling as in `next_token_probabilities`; the same `seed` gives the same
    tokens, None a new one every time. Only tokens below `vocab_size` follow, None: any that the
    model has. The model is in eval mode until the iterator is used up.

    Raises UserError at once for a prompt that is empty, too long or of unknown tokens, and for
    values out of range; later where the model's output is not finite.
    """
    check_request(
        model.config, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
        top_p=top_p, seed=seed,
    )  # fmt: skip
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def choose(logits: Tensor) -> int:
        logits = logits[:vocab_size]
        if not logits.isfinite().all():
            raise UserError("model: its next token's values are not finite; need sound weights")
        if temperature == 0:
            return int(logits.argmax())
        probabilities = next_token_probabilities(logits, temperature, top_k, top_p)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    room = model.config.sequence_length - len(prompt)
    return _continue(model, prompt, min(max_new_tokens, room), choose, stop)


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """What to sample from: fp32 probabilities [vocab] that sum to 1, given logits [vocab].

    Temperature (above 0) divides the logits. Then only the `top_k` likeliest tokens stay (0: all),
    and of these only the smallest set of likeliest ones whose probability reaches `top_p`
    (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
    """
    logits = logits.double()
    # The largest is taken off first, so that a tiny temperature gives 0 and not infinity.
    scaled = (logits - logits.max()) / temperature
    probabilities, tokens = scaled.softmax(-1).float().sort(descending=True, stable=True)
    if top_k > 0:
        probabilities[top_k:] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:
        likelier = probabilities.cumsum(0) - probabilities
        probabilities[1:][likelier[1:] >= top_p] = 0  # the likeliest stays, however small top_p
        probabilities /= probabilities.sum()
    return torch.zeros_like(probabilities).scatter_(0, tokens, probabilities)


def stream_text(
    tokens: Iterator[int], decode: Callable[[list[int]], str], prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of the tokens that follow `prompt` as it grows, but never half a character.

    Decoded with the prompt, because Llama's tokenizers leave out a space that comes first. A
    character may be spread over several byte tokens; until it is whole, `decode` ends in U+FFFD,
    which is held back. What is still broken at the end is yielded as it is.
    """
    context, fresh = list(prompt), list[int]()
    text = decode(context)
    shown = len(text)
    for token in tokens:
        fresh.append(token)
        text = decode(context + fresh)
        whole = len(text.rstrip("\ufffd"))
        if whole > shown:
            yield text[shown:whole]
            shown = whole
            if whole == len(text):
                # Context enough for what follows: to decode all of it for each token takes long.
                context, fresh = fresh, []
                text = decode(context)
                shown = len(text)
    if len(text) > shown:
        yield text[shown:]


def _need(condition: bool, name: str, value: object, fits: str) -> None:
    if not condition:
        raise UserError(f"{name}: {value}, {fits}")


def check_request(
    model: ModelConfig,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
) -> None:
    """Raises UserError as `generate` does, which a model of 80 GB need not be loaded for."""
    limit, vocab_size = model.sequence_length - 1, model.vocab_size
    key = "model.sequence_length - 1"
    _need(len(prompt) > 0, "prompt", "no tokens", "need at least one")
    _need(len(prompt) <= limit, "prompt", f"{len(prompt)} tokens", f"at most {limit} ({key})")
    unknown = next((t for t in prompt if not 0 <= t < vocab_size), None)
    _need(unknown is None, "prompt", f"token {unknown}", f"need 0 to {vocab_size - 1}")
    _need(max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "need 0 or more")
    _need(temperature >= 0, "temperature", temperature, "need 0 or more")
    _need(top_k >= 0, "top_k", top_k, "need 0 (all tokens) or more")
    _need(0 < top_p <= 1, "top_p", top_p, "need more than 0, at most 1")
    fits = seed is None or -(2**63) <= seed < 2**64
    _need(fits, "seed", seed, "need -2**63 to 2**64 - 1")


def _continue(
    model: GPT,
    prompt: list[int],
    count: int,
    choose: Callable[[Tensor], int],
    stop: int | None,
) -> Iterator[int]:
    """Up to `count` tokens; the model's mode is given back however the iteration ends."""
    weight = next(model.parameters())
    room = len(prompt) + count  # and not the model's whole context, which may be a million tokens
    cache = KVCache(model.config, capacity=room, dtype=weight.dtype, device=weight.device)
    training = model.training
    model.eval()
    try:
        new = prompt
        for _ in range(count):
            token = choose(_last_logits(model, torch.tensor([new], device=weight.device), cache))
            if token == stop:
                return
            yield token
            new = [token]
    finally:
        model.train(training)


@torch.no_grad()
def _last_logits(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """Logits [vocab_size] on the CPU after tokens [1, s].

    Without gradients in here only: a `no_grad` around a `yield` would hold for the caller too.
    """
    logits: Tensor = model(tokens, cache=cache, last_only=True)[0, -1]
    return logits.cpu()
