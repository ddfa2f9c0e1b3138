"""The command `generate`: sample tokens one at a time, and stream complete characters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafrontier.commands.checkpoints import device_name, load_model, saved_config
from megafrontier.common.checkpoints import of_newest
from megafrontier.common.errors import UserError, need
from megafrontier.config import Config, ModelConfig
from megafrontier.data.tokenizers.base import Tokenizer
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.launch.device import uses_accelerator
from megafrontier.model.attention.kinds import KVCache
from megafrontier.model.gpt import GPT
from megafrontier.training.device import explain_out_of_memory


def generate_command(
    path: Path,
    prompt: str,
    show: Callable[[str], Any],
    device: str = "any",
    weights: str = "weight",
    **sampling: Any,
) -> str | None:
    """Continue `prompt` with the model of a checkpoint, and pass each piece of text to `show`.

    device: `cpu`, or `any` for a GPU if there is one and the model was not trained on the CPU.
    weights: `weight`, or `ema` for their moving average.
    sampling: arguments of `generate`.

    Returns a note for the user if not all new tokens fit the model's context. Raises UserError for
    a bad checkpoint or value, and OutOfMemory.
    """
    open_it = partial(_open, prompt=prompt, device=device, weights=weights, sampling=sampling)
    model, tokenizer, tokens = of_newest(path, open_it)
    room = model.config.sequence_length - len(tokens)
    with explain_lack_of_memory(next(model.parameters()).device):
        show(prompt)
        sampling |= {"stop": tokenizer.eod, "vocab_size": tokenizer.vocab_size}
        made = generate(model, tokens, **sampling)
        for text in stream_text(made, tokenizer.decode, tokens):
            show(text)
    if sampling["max_new_tokens"] > room:
        return f"--max-new-tokens: {room} fit model.sequence_length"
    return None


def _open(
    checkpoint: Path, prompt: str, device: str, weights: str, sampling: Mapping[str, Any]
) -> tuple[GPT, Tokenizer, list[int]]:
    """Check the request, then load the model. Returns it with the tokens of the prompt."""
    config = saved_config(checkpoint)
    tokenizer = load_tokenizer(config.tokenizer)
    tokens = tokenizer.encode(prompt)
    if not tokens and config.data.document_mask:
        raise UserError(
            "--prompt: empty, but with data.document_mask no model learns how a document begins; "
            "need some text"
        )
    tokens = tokens or [tokenizer.eod]  # an empty prompt continues the end of a document
    check_request(config.model, tokens, **sampling)
    return load_on(device, checkpoint, config, weights), tokenizer, tokens


def load_on(device: str, checkpoint: Path, config: Config, weights: str) -> GPT:
    """The model of a checkpoint with this config. `device`, `weights`: as for `generate_command`.
    Raises UserError, and OutOfMemory."""
    name = device_name(config) if device == "any" else device
    where = torch.device("cuda" if uses_accelerator(name) else "cpu")
    with explain_lack_of_memory(where):
        return load_model(checkpoint, config, where, weights)


def check_request(
    model: ModelConfig,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None = None,
) -> None:
    """Raise UserError for a prompt or an option that the command cannot use."""
    limit, vocab_size = model.sequence_length - 1, model.vocab_size
    fits = f"need at most {limit} (model.sequence_length - 1)"
    need(len(prompt) <= limit, "--prompt", f"{len(prompt)} tokens", fits)
    unknown = next((t for t in prompt if not 0 <= t < vocab_size), None)
    need(unknown is None, "--prompt", f"token {unknown}", f"need 0 to {vocab_size - 1}")
    need(max_new_tokens >= 0, "--max-new-tokens", max_new_tokens, "need 0 or more")
    need(temperature >= 0, "--temperature", temperature, "need 0 or more")
    need(top_k >= 0, "--top-k", top_k, "need 0 (all tokens) or more")
    need(0 < top_p <= 1, "--top-p", top_p, "need more than 0, at most 1")


def explain_lack_of_memory(where: torch.device) -> AbstractContextManager[None]:
    """Raise OutOfMemory, with what to change, if the body needs more than the device has."""
    return explain_out_of_memory(str(where), "--device cpu, or a shorter text")


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
    """Yield the tokens that follow `prompt`, each as soon as it is sampled.

    Ends after `max_new_tokens`, when prompt and text fill the model's sequence length, or before
    the token `stop`. For sampling see `next_token_probabilities`. The same `seed` gives the same
    tokens, and None a different seed each time. Only tokens below `vocab_size` are sampled (None:
    all). The prompt needs at least one token, and room for another.

    Raises UserError if the model's output is not finite.
    """
    sampler = Sampler(temperature, top_k, top_p, seed, vocab_size)
    length = min(len(prompt) + max_new_tokens, model.config.sequence_length)
    cache = make_cache(model, length)
    for token in islice(continue_text(model, cache, prompt, sampler), length - len(prompt)):
        if token == stop:
            return
        yield token


class Sampler:
    """Chooses a token, given its logits. The arguments are those of `generate`."""

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.vocab_size = vocab_size
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """The next token, given its logits [vocab] on the CPU. Raises UserError if they are not
        finite."""
        logits = logits[: self.vocab_size]
        if not logits.isfinite().all():
            raise UserError(
                "model: the logits of the next token are not finite, need other weights"
            )
        if self.temperature == 0:
            return int(logits.argmax())
        rule = self.temperature, self.top_k, self.top_p
        probabilities = next_token_probabilities(logits, *rule)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def make_cache(model: GPT, capacity: int) -> KVCache:
    """An empty cache for one text of up to `capacity` tokens."""
    weight = next(model.parameters())
    return KVCache(model.config, capacity=capacity, dtype=weight.dtype, device=weight.device)


def continue_text(
    model: GPT, cache: KVCache, new: Sequence[int], sampler: Sampler
) -> Iterator[int]:
    """Yield the tokens that follow those in the cache and the `new` ones, at least one, without
    end. The caller stops before the cache is full. It takes the new tokens, and each yielded one
    when the next is asked for."""
    device = next(model.parameters()).device
    model.eval()
    while True:
        logits = _last_logits(model, torch.tensor([list(new)], device=device), cache)
        token = sampler.choose(logits)
        yield token
        new = [token]


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """The fp32 probabilities [vocab] to sample from, given logits [vocab].

    Logits are divided by the temperature (above 0). Then only the `top_k` most likely tokens are
    kept (0: all), and of these the smallest set of most likely ones whose probability reaches
    `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
    """
    logits = logits.double()
    # Subtract the maximum first, so that a tiny temperature does not give infinity.
    scaled = (logits - logits.max()) / temperature
    probabilities, tokens = scaled.softmax(-1).float().sort(descending=True, stable=True)
    if top_k > 0:
        probabilities[top_k:] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities[1:][before[1:] >= top_p] = 0  # always keeps the most likely token
        probabilities /= probabilities.sum()
    return torch.zeros_like(probabilities).scatter_(0, tokens, probabilities)


def stream_text(
    tokens: Iterator[int], decode: Callable[[list[int]], str], prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of the tokens that follow `prompt` as it grows, in complete characters.

    The prompt is decoded too, because Llama's tokenizers drop a space at the start of a text. A
    character may consist of several byte tokens. Until it is complete, `decode` ends in U+FFFD,
    which is held back. An incomplete character at the very end is yielded as it is.
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
                # Keep only the last tokens as context: decoding all of them each time is slow.
                context, fresh = fresh, []
                text = decode(context)
                shown = len(text)
    if len(text) > shown:
        yield text[shown:]


@torch.no_grad()
def _last_logits(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """Logits [vocab_size] on the CPU after tokens [1, s].

    `no_grad` is here and not around a `yield`, where it would hold for the caller, too.
    """
    logits: Tensor = model(tokens, cache=cache, last_only=True)[0, -1]
    return logits.cpu()
