"""Converts SentencePiece models to fast tokenizers of `transformers`."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_PROBE = "Two  spaces,\n a\ttab, é, ﬁ, Ａ, 12 and a quick brown fox jumps over the dog's back. "
_PROBES = ("", " ", "\n", "\tone", " one", "  one two", "one  ", " \n one", _PROBE)


def save_fast_tokenizer(model: Any, bos: int, eod: int, lossless: bool, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a SentencePieceProcessor into `folder`.

    `lossless` says that the model has the rules of `megafrontier tokenizer`. Of other models, those
    like Llama's can be converted. If the ids of a probe differ, neither file is written.
    """
    special = {"eos_token": model.id_to_piece(eod)}
    if not lossless:
        special |= {
            "bos_token": model.id_to_piece(bos),
            "unk_token": model.id_to_piece(model.unk_id()),
        }
    fast = _fast_tokenizer(model, lossless, special.values())
    for text in _PROBES:
        if fast.encode(text, add_special_tokens=False).ids != model.encode(text):
            return
    fast.save(str(folder / "tokenizer.json"))
    config = {
        **special,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _fast_tokenizer(model: Any, lossless: bool, special: Iterable[str]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    has_prefix = model.normalize("a") == "▁a"  # Llama's models put a space before a text
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast = Tokenizer(_fast_model(model))
    space = normalizers.Replace(" ", "▁")
    fast.normalizer = space
    if has_prefix:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    if lossless:
        user_defined = Regex("\n|\t")
        fast.pre_tokenizer = pre_tokenizers.Split(user_defined, "isolated")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    fast.add_special_tokens([AddedToken(p, special=True, normalized=False) for p in special])
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
