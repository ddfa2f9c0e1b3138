"""`megafrontier prepare` beside `datasets.map` with the same tokenizer, on all cores.

    python -m scripts.benchmarks.data.prepare OUT [--megabytes 64] [--rounds 5] [--workers N]

The text is this Python's own library as .jsonl, a file a line, repeated until there is enough.
Tokenizers of 16k ids are made here: a SentencePiece one by `megafrontier tokenizer` and a fast one
of Hugging Face's, byte-level BPE. Rows: ours, from .jsonl to an indexed corpus; `datasets.map` over
the same file, batched, to its own arrow files; the same and then each document added to an indexed
corpus, which is what training needs; and the tokenizer's own library alone on texts in memory in as
many processes, which nothing that uses it can pass. `datasets` gets no cache of an earlier round.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.shared.child import Span
from scripts.benchmarks.shared.measuring import at_least
from scripts.benchmarks.shared.rounds import Results, Task, add_options, markdown, measure, spread

MODULE = "scripts.benchmarks.data.prepare"

KINDS = ("sentencepiece", "hugging-face")
OURS = "megafrontier prepare"
VOCAB_SIZE = 16384


def library_texts() -> Iterator[str]:
    """The installed Python's own library, a text a file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def write_input(path: Path, megabytes: float) -> None:
    """The texts as .jsonl of at least so many MB, unless it is there."""
    if path.is_file() and path.stat().st_size >= megabytes * 1e6:
        return
    lines = [json.dumps({"text": text}) + "\n" for text in library_texts()]
    size = 0
    with path.open("w") as file:
        while size < megabytes * 1e6:
            for line in lines:
                size += file.write(line)
                if size >= megabytes * 1e6:
                    break


def make_tokenizer(kind: str, folder: Path, text: Path) -> None:
    """Train a tokenizer on the text, unless it is there."""
    if folder.is_dir():
        return
    if kind == "sentencepiece":
        command = [sys.executable, "-m", "megafrontier", "tokenizer", str(text)]
        command += ["--vocab-size", str(VOCAB_SIZE), "--out", str(folder), "--max-megabytes", "8"]
        subprocess.run(command, check=True)
        return
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    raw = ByteLevelBPETokenizer()
    lines = text.read_text().splitlines()[:1000]
    raw.train_from_iterator(
        (json.loads(line)["text"] for line in lines),
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=raw._tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)


def ours(text: str, tokenizer: str, workers: int) -> dict[str, float]:
    """`megafrontier prepare`, to a corpus."""
    from megafrontier.data.text.prepare import prepare
    from megafrontier.data.tokenizers.tokenizer import load_tokenizer

    load_tokenizer(tokenizer)  # imported before the span, as by the others
    with Span() as span:
        summary = prepare([text], tokenizer, "corpus", workers)
    return _figures(span, summary.tokens, text)


def datasets_map(text: str, tokenizer: str, workers: int, indexed: bool) -> dict[str, float]:
    """`datasets.map` to arrow files, and from them to an indexed corpus where that is asked for."""
    import datasets

    datasets.disable_progress_bars()
    encode, vocab_size = _library(tokenizer)
    with Span() as span:
        table = datasets.load_dataset("json", data_files=text, split="train", cache_dir="cache")
        table = table.map(
            lambda rows: {"ids": encode(rows["text"])},
            batched=True,
            num_proc=workers,
            remove_columns=table.column_names,
        )
        if indexed:
            _write_indexed(table, vocab_size)
    # Counted in arrow, outside the timed span.
    tokens = sum(len(row) for part in table.data["ids"].chunks for row in part)
    return _figures(span, tokens, text)


def _write_indexed(table: Any, vocab_size: int) -> None:
    """Each document added by itself, as Megatron's own tool does."""
    from megafrontier.data.corpus.indexed import token_dtype
    from megafrontier.data.corpus.writer import CorpusWriter, DocumentWriter

    dtype, yes = token_dtype(vocab_size), np.ones(1, bool)
    with CorpusWriter("corpus", dtype) as corpus:
        writer = DocumentWriter(corpus)
        for ids in table.with_format("numpy")["ids"]:
            writer.write_chunks(ids.astype(dtype), np.array([len(ids)], np.int32), yes, ~yes)
        corpus.publish()


def library_alone(text: str, tokenizer: str, workers: int) -> dict[str, float]:
    """The tokenizer's library on texts in memory, as many processes, no ids handed back."""
    with open(text) as file:
        texts = [json.loads(line)["text"] for line in file]
    encode, _ = _library(tokenizer)
    batches = [texts[i : i + 64] for i in range(0, len(texts), 64)]
    global _count  # what a forked worker finds without sending it
    _count = lambda number: sum(map(len, encode(batches[number])))  # noqa: E731
    with Span() as span, get_context("fork").Pool(workers) as pool:
        tokens = sum(pool.imap_unordered(_count_batch, range(len(batches))))
    return _figures(span, tokens, text)


_count: Callable[[int], int]


def _count_batch(number: int) -> int:
    return _count(number)


def _library(tokenizer: str) -> tuple[Callable[[Sequence[str]], list[list[int]]], int]:
    """(texts to ids, number of ids) of the tokenizer's own library, as its users call it."""
    model = Path(tokenizer) / "tokenizer.model"
    if model.is_file():
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        return lambda texts: processor.encode(list(texts)), processor.get_piece_size()
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(tokenizer)
    return lambda texts: fast(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"], len(fast)


def _figures(span: Span, tokens: int, text: str) -> dict[str, float]:
    return {
        "seconds": span.seconds,
        "cpu_seconds": span.cpu_seconds,
        "tokens": tokens,
        "bytes": os.path.getsize(text),
    }


def table(results: Results) -> str:
    """A table for each tokenizer."""
    return "\n\n".join(_group_table(results, group) for group in results.groups())


def _group_table(results: Results, group: str) -> str:
    head = ["", "million tokens/s", "MB/s of .jsonl", "CPU s", "time over ours", "tokens"]
    rows = [_row(results, group, name) for name in results.variants(group)]
    return f"## {group}\n\n{markdown(head, rows)}"


def _row(results: Results, group: str, name: str) -> list[str]:
    skipped = results.skipped(group, name)
    if skipped:
        return [name, skipped, *[""] * 4]
    seconds, cpu_seconds, sizes, tokens = (
        np.array(results.values(group, name, figure))
        for figure in ("seconds", "cpu_seconds", "bytes", "tokens")
    )
    first = results.values(group, OURS, "seconds")
    return [
        name,
        spread((tokens / seconds / 1e6).tolist(), ".3f"),
        spread((sizes / seconds / 1e6).tolist(), ".2f"),
        spread(cpu_seconds.tolist(), ".1f"),
        f"{np.median(seconds) / np.median(first):.2f}" if first else "",
        f"{tokens[0]:,.0f}",
    ]


def main() -> None:
    """Make the input, compare, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--megabytes", type=at_least(1, float), default=64.0, help="of text")
    parser.add_argument("--workers", type=at_least(1), default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    text = out / f"text-{arguments.megabytes:g}.jsonl"
    write_input(text, arguments.megabytes)
    tasks = []
    for kind in KINDS:
        make_tokenizer(kind, out / kind, text)
        common = {
            "text": str(text),
            "tokenizer": str(out / kind),
            "workers": arguments.workers,
        }
        tasks += [
            Task(kind, OURS, f"{MODULE}:ours", common),
            Task(
                kind,
                "datasets.map",
                f"{MODULE}:datasets_map",
                common | {"indexed": False},
            ),
            Task(
                kind,
                "datasets.map, then indexed",
                f"{MODULE}:datasets_map",
                common | {"indexed": True},
            ),
            Task(kind, "the library alone", f"{MODULE}:library_alone", common),
        ]
    measure(tasks, arguments, table)


if __name__ == "__main__":
    main()
