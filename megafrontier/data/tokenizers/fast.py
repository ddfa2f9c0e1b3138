"""Converts SentencePiece models to fast tokenizers of `transformers`."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megafrontier.common.errors import UserError

_PROBE = "Two  spaces,\n a\ttab, é, ﬁ, Ａ, 12 and a quick brown fox jumps over the dog's back. "
_PROBES = ("", " ", "\n", "\tone", " one", "  one two", "one  ", " \n one", _PROBE)


def save_fast_tokenizer(model: Any, bos: int, eod: int, lossless: bool, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a SentencePieceProcessor into `folder`.

    `lossless` says that the model has the rules of `megafrontier tokenizer`. `transformers` itself
    converts other models, from the tokenizer.model in the folder; that is correct for models like
    Llama's. If the ids of a probe differ from the model's, neither file is written.
    """
    from tokenizers import AddedToken

    config: dict[str, Any] = {"eos_token": model.id_to_piece(eod)}
    path = folder / "tokenizer_config.json"
    config["clean_up_tokenization_spaces"] = False
    config["tokenizer_class"] = "PreTrainedTokenizerFast" if lossless else "LlamaTokenizer"
    if not lossless:  # without these, the class would use Llama's and put a bos before each text
        config |= {"bos_token": model.id_to_piece(bos), "add_bos_token": False}
        config |= {"unk_token": model.id_to_piece(model.unk_id()), "add_eos_token": False}
    path.write_text(json.dumps(config, indent=2) + "\n")
    if not lossless:
        _convert(folder, model.get_piece_size())
        return
    fast = _fast_tokenizer(model)
    fast.add_special_tokens([AddedToken(config["eos_token"], special=True, normalized=False)])
    if fast.encode(_PROBE, add_special_tokens=False).ids == model.encode(_PROBE):
        fast.save(str(folder / "tokenizer.json"))
    else:
        path.unlink()


def _convert(folder: Path, size: int) -> None:
    """Have `transformers` convert the saved model of `size` pieces.

    Writes nothing if it cannot read the model, adds pieces, or gives other ids.
    """
    from transformers import AutoTokenizer

    try:
        converted = with_rules_of(folder / "tokenizer.model", AutoTokenizer.from_pretrained(folder))
    except Exception:  # models fail in many ways, for example because a package is missing
        converted = None
    (folder / "tokenizer_config.json").unlink()
    if converted is not None and len(converted) == size:
        converted.save_pretrained(folder)


def with_rules_of(path: Path, tokenizer: Any) -> Any:
    """Give a tokenizer that `transformers` made the space rules of the model at `path`.

    Some classes of `transformers` add or drop a space before a text. Returns `tokenizer` unchanged
    if it is not a fast one, or its class has other ids. Raises UserError if the ids of texts still
    differ from those of the SentencePiece model.
    """
    import sentencepiece
    from transformers import PreTrainedTokenizerFast

    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:  # a file of tiktoken
        return tokenizer
    ids = tokenizer.get_vocab()
    is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    if not is_fast or any(ids.get(model.id_to_piece(i)) != i for i in range(len(model))):
        return tokenizer
    _set_rules(tokenizer.backend_tokenizer, has_prefix=model.normalize("a") == "▁a")
    for text in _PROBES:
        if tokenizer.encode(text, add_special_tokens=False) != model.encode(text):
            what = f"{tokenizer.name_or_path!r}: gives {text!r} other ids than its tokenizer.model"
            raise UserError(f"tokenizer {what}; need a tokenizer.json, or the .model by itself")
    with TemporaryDirectory() as folder:  # reload it as a class without rules of its own
        tokenizer.save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _set_rules(fast: Any, has_prefix: bool) -> None:
    from tokenizers import decoders, normalizers

    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    fast.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    fast.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _fast_tokenizer(model: Any) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    fast = Tokenizer(_fast_model(model))
    fast.normalizer = normalizers.Replace(" ", "▁")
    user_defined = Regex("\n|\t")
    fast.pre_tokenizer = pre_tokenizers.Split(user_defined, "isolated")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast


def _fast_model(model: Any) -> Any:
    from tokenizers import models

    pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    scores = [model.get_score(i) for i in range(len(pieces))]
    unknown = pieces[model.unk_id()]
    # The scores of BPE are minus the rank of the merge; those of unigram are log-probabilities.
    if _is_bpe(model, scores):
        ids = {piece: i for i, piece in enumerate(pieces)}
        merges = [pair for _, pair in sorted(_merges(model, ids), key=lambda merge: merge[0])]
        return models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token=unknown)
    scored = list(zip(pieces, scores, strict=True))
    return models.Unigram(scored, unk_id=model.unk_id(), byte_fallback=True)


def _is_bpe(model: Any, scores: list[float]) -> bool:
    plain = [s for i, s in enumerate(scores) if _is_plain(model, i)]
    return all(score == -rank for rank, score in enumerate(plain))


def _is_plain(model: Any, i: int) -> bool:
    special = model.is_byte(i) or model.is_control(i) or model.is_unknown(i)
    return not special and model.id_to_piece(i) not in ("\n", "\t")


def _merges(model: Any, ids: dict[str, int]) -> Iterator[tuple[tuple, tuple[str, str]]]:
    """Yield ((rank of the piece, ids of its halves), its halves) for all merges of two pieces."""
    for piece, i in ids.items():
        if not _is_plain(model, i):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                yield (-model.get_score(i), ids[left], ids[right]), (left, right)
