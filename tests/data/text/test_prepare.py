"""`prepare` writes the right bytes with any number of workers, completely or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import IndexedDataset
from megafrontier.data.corpus.merge import merge
from megafrontier.data.text.prepare import prepare
from megafrontier.data.tokenizers.tokenizer import MARKER, ByteTokenizer, load_tokenizer
from tests.data.corpora import document, read_corpus, write_corpus
from tests.data.tokenizers.models import GENERAL, save_fast_bpe, train_model
from tests.processes import alive, children, wait_for


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and split texts in small blocks."""
    monkeypatch.setattr("megafrontier.data.text.files.BLOCK_BYTES", 3000)
    monkeypatch.setattr("megafrontier.data.text.files._READ_BYTES", 1000)


def write_lines(path: Path, texts: list[str]) -> str:
    """Write a .jsonl file of the texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def some_texts(count: int) -> list[str]:
    """Texts of very different lengths."""
    return [f"Text {i}:\n" + f"  word{i} and more" * (i * i % 97) for i in range(count)]


CHATS = [
    [("system", "Be kind."), ("user", "Hi?"), ("assistant", "Hello!"), ("user", "unused")],
    [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "four")],
]


def write_chats(path: Path, chats: Sequence[Sequence[tuple[str, str]]] = CHATS) -> str:
    rows = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


def trained(corpus: IndexedDataset, number: int) -> list[int]:
    """The tokens of a document that the mask has."""
    part = slice(corpus.document_start(number), corpus.document_start(number + 1))
    assert corpus.mask is not None
    return corpus.tokens[part][corpus.mask[part] == 1].tolist()


def test_of_a_chat_only_the_assistants_turns_are_trained_on(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl")
    prepare([path], "bytes", tmp_path / "made", 1, key="messages", chat="simple")
    corpus = IndexedDataset(tmp_path / "made")
    expected = b"<|system|>\nBe kind.\n<|user|>\nHi?\n<|assistant|>\nHello!"
    assert document(corpus, 0).tolist() == [*expected, 256]
    assert trained(corpus, 0) == [*b"Hello!", 256]
    assert trained(corpus, 1) == [*b"2", 256, *b"four", 256]
    prepare([write_lines(tmp_path / "x.jsonl", ["ab"])], "bytes", tmp_path / "plain", 1)
    merge([str(tmp_path / name) for name in ("plain", "made")], tmp_path / "both")
    assert IndexedDataset(tmp_path / "both").mask.tolist() == [1, 1, *corpus.mask]
    prepare([write_lines(tmp_path / "x.jsonl", ["ab"])], "bytes", tmp_path / "made", 1)
    assert IndexedDataset(tmp_path / "made").mask is None


def test_of_chats_the_trained_tokens_are_counted_and_the_first_chat_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [[("user", "x" * 2000), ("assistant", "Hello!")], *CHATS[1:]]
    words = ["prepare", write_chats(tmp_path / "chats.jsonl", chats), "--tokenizer", "bytes"]
    words += ["--chat", "simple", "--workers", "1", "--out", str(tmp_path / "made")]
    assert main(words) == 0
    corpus = IndexedDataset(tmp_path / "made")
    count, total = 7 + 2 + 5, len(corpus.tokens)
    assert corpus.mask is not None
    assert count == corpus.mask.sum()
    _, trained, title, *chat = capsys.readouterr().out.splitlines()
    share = f"{count / total:.0%}"
    assert trained == f"trained: {count} of {total} tokens ({share}), between ▶ and ◀"
    assert title == "first chat:"
    assert chat[0] == "<|user|>"
    assert re.fullmatch("x{200,300} … x{200,300}", chat[1])
    assert chat[2:] == ["<|assistant|>", "▶Hello!<eod>◀"]


def test_a_tokenizers_chat_template_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_fast_bpe(tmp_path / "fast", "<|im_end|>")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "fast")
    theirs.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    theirs.save_pretrained(tmp_path / "fast")
    path = write_chats(tmp_path / "chats.jsonl")
    prepare([path], str(tmp_path / "fast"), tmp_path / "made", 1, key="messages", chat="tokenizer")
    corpus = IndexedDataset(tmp_path / "made")
    for number, chat in enumerate(CHATS):
        messages = [{"role": role, "content": text} for role, text in chat if text != "unused"]
        made = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert document(corpus, number).tolist() == made["input_ids"]
        both = made["input_ids"], made["assistant_masks"]
        # Ours has the line break behind a turn's end token, too.
        theirs_trained = [i for i, m in zip(*both, strict=True) if m]
        newline = theirs.encode("\n")
        assert [i for i in trained(corpus, number) if [i] != newline] == theirs_trained


@pytest.mark.parametrize(
    ("chat", "template", "line"),
    [
        ([("user", "Hi?")], "simple", "no turn of the assistant, need one to train on"),
        ([("user", 3), ("assistant", "b")], "simple", "turn 0: 'content' is int, need a string"),
        (CHATS[0], "tokenizer", "--chat: tokenizer, but it has no chat template, need simple"),
    ],
)
def test_chats_that_cannot_be_used_are_refused_in_one_line(
    tmp_path: Path, chat: Any, template: Any, line: str
) -> None:
    path = write_chats(tmp_path / "chats.jsonl", [chat])
    with pytest.raises(UserError, match=re.escape(line)):
        prepare([path], "bytes", tmp_path / "made", 1, key="messages", chat=template)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_the_output_is_megatrons_format_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, dtype: str
) -> None:
    # write_corpus follows the description of the format.
    monkeypatch.setattr(ByteTokenizer, "vocab_size", vocab_size)
    texts = ["ab", "", "c\n", "dé"]
    made = prepare([write_lines(tmp_path / "x.jsonl", texts)], "bytes", tmp_path / "made", 1, True)
    documents = [[[*text.encode(), 256]] for text in texts if text]
    expected = write_corpus(tmp_path / "expected", documents, dtype)
    assert read_corpus(tmp_path / "made") == read_corpus(expected)
    assert (made.documents, made.tokens, made.text_bytes) == (3, 10, 7)


def test_workers_and_the_form_of_the_tokenizer_do_not_change_a_byte(
    tmp_path: Path, small_blocks: None
) -> None:
    load_tokenizer(GENERAL).save(tmp_path / "theirs")
    (tmp_path / "theirs" / MARKER).unlink()  # to be loaded as a Hugging Face tokenizer
    texts = some_texts(200)
    inputs = [write_lines(tmp_path / "x.jsonl", texts)]
    for workers, spec in ((1, GENERAL), (3, GENERAL), (2, str(tmp_path / "theirs"))):
        prepare(inputs, spec, tmp_path / str(workers), workers, append_eod=True)
    assert read_corpus(tmp_path / "1") == read_corpus(tmp_path / "3") == read_corpus(tmp_path / "2")
    corpus, tokenizer = IndexedDataset(tmp_path / "1"), load_tokenizer(GENERAL)
    assert len(corpus) == 200
    for i in (0, 7, 199):
        assert tokenizer.decode(document(corpus, i).tolist()) == texts[i]
        assert document(corpus, i)[-1] == tokenizer.eod


def test_unknown_characters_are_counted_with_their_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}
    fast = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, **special)
    wrapped.save_pretrained(tmp_path / "tok")
    path = tmp_path / "x.jsonl"
    write_lines(path, ["ab", "aßb", "b", "ßaß€", "ab" * 9])
    path.write_text(path.read_text() + '{"text": 7}\n')
    words = ["prepare", str(path), "--skip-bad", "--workers", "1", "--tokenizer"]
    assert main([*words, str(tmp_path / "tok"), "--out", str(tmp_path / "1")]) == 0
    said = "; 1 bad texts skipped; 4 tokens are <unk>: characters"
    assert said in capsys.readouterr().out
    assert main([*words, "bytes", "--out", str(tmp_path / "2")]) == 0
    assert "<unk>" not in capsys.readouterr().out


def test_a_long_text_is_one_document(tmp_path: Path, small_blocks: None) -> None:
    text = "one line é\n" * 5_000 + "日本" * 10_000 + " x" * 10_000
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("short")
    inputs = [str(tmp_path / "long.txt"), str(tmp_path / "short.txt")]
    prepare(inputs, "bytes", tmp_path / "made", 2, append_eod=True)
    corpus = IndexedDataset(tmp_path / "made")
    assert len(corpus) == len(corpus.sizes) == 2
    assert document(corpus, 0).tolist() == [*text.encode(), 256]


@pytest.mark.parametrize("kind", ["ours", "like GPT-2", "like Llama"])
def test_splitting_a_long_text_does_not_change_its_tokens(
    tmp_path: Path, small_blocks: None, kind: str
) -> None:
    if kind == "like GPT-2":
        save_fast_bpe(tmp_path / "tok")
    if kind == "like Llama":  # it puts a space before each text
        train_model(tmp_path / "tok", byte_fallback=True, remove_extra_whitespaces=False)
    spec = GENERAL if kind == "ours" else str(tmp_path / "tok")
    text = Path(os.__file__).read_text().replace("\n", "\n\n\n")
    (tmp_path / "long.txt").write_text(text)
    prepare([str(tmp_path / "long.txt")], spec, tmp_path / "made", 1)
    assert len(text) > 30_000
    made = document(IndexedDataset(tmp_path / "made"), 0).tolist()
    assert made == load_tokenizer(spec).encode(text)


def test_a_document_longer_than_int32_has_several_sequences(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafrontier.data.corpus.writer.LONGEST_SEQUENCE", 7_000)
    (tmp_path / "long.txt").write_bytes(b"word " * 4_000)
    prepare([str(tmp_path / "long.txt")], "bytes", tmp_path / "made", 1)
    corpus = IndexedDataset(tmp_path / "made")
    assert (len(corpus), corpus.sizes.tolist()) == (1, [7_000, 7_000, 6_000])
    assert bytes(document(corpus, 0).astype(np.uint8)) == b"word " * 4_000


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    line = json.dumps({"text": "some words of a text " * 50}) + "\n"
    peaks = []
    for lines in (2_000, 20_000):
        path = tmp_path / f"{lines}.jsonl"
        path.write_text(line * lines)
        code = f"""
from megafrontier.data.text import files
files.BLOCK_BYTES = 200_000
from megafrontier.data.text.prepare import prepare
prepare([{str(path)!r}], "bytes", {str(tmp_path / "made")!r}, 1)
print(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM")))
"""
        run = [sys.executable, "-c", code]
        peaks.append(1024 * int(subprocess.run(run, capture_output=True, check=True).stdout))
    # 21 MB of text and 42 MB of tokens, against a tenth of that.
    assert peaks[1] - peaks[0] < 8e6


def test_a_killed_run_leaves_no_corpus_and_the_next_run_writes_it(tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / "x.jsonl", some_texts(2_000))]
    made, expected = tmp_path / "made" / "c", tmp_path / "expected"
    code = f"""
import sys
from megafrontier.cli import main
from megafrontier.data.text import files
files.BLOCK_BYTES = 20_000
sys.exit(main({arguments(inputs, made)}))
"""
    victim = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_for(lambda: Path(f"{made}.bin.partial").exists() and size(f"{made}.bin.partial") > 10**4)
    workers = children(victim.pid)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not {"c.bin", "c.idx"} & set(os.listdir(made.parent))
    assert len(workers) >= 2
    wait_for(lambda: not any(alive(pid) for pid in workers))
    for out in (made, expected):
        assert main(arguments(inputs, out)) == 0
    assert sorted(os.listdir(made.parent)) == ["c.bin", "c.idx"]
    assert read_corpus(made) == read_corpus(expected)


def arguments(inputs: list[str], out: Path) -> list[str]:
    """The command line."""
    return ["prepare", *inputs, "--tokenizer", GENERAL, "--out", str(out), "--workers", "2"]


def size(path: str) -> int:
    """Bytes of a file; 0 before it exists."""
    return os.stat(path).st_size if os.path.exists(path) else 0


def test_a_refused_run_leaves_an_older_corpus_as_it_was(tmp_path: Path) -> None:
    good, bad = write_lines(tmp_path / "good.jsonl", ["good"]), tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    prepare([good], "bytes", tmp_path / "out" / "c", 1)
    before = read_corpus(tmp_path / "out" / "c")
    with pytest.raises(UserError):
        prepare([good, str(bad)], "bytes", tmp_path / "out" / "c", 1)
    assert read_corpus(tmp_path / "out" / "c") == before
    assert sorted(os.listdir(tmp_path / "out")) == ["c.bin", "c.idx"]


def test_progress_is_a_line_every_few_seconds_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megafrontier.common.progress.SECONDS_BETWEEN_LINES", 0.0)
    prepare([write_lines(tmp_path / "x.jsonl", some_texts(50))], "bytes", tmp_path / "made", 1)
    shown = capsys.readouterr().err
    line = r"^prepare: \d+\.\d of \d+\.\d MB read, [\d,]+ tokens, \d:\d\d:\d\d left$"
    assert re.search(line, shown, re.M)


def test_a_folder_that_grows_becomes_what_prepare_makes_of_all_its_files(tmp_path: Path) -> None:
    """The documents that are there stay, and files that are in the corpus are not read again."""
    folder, texts = tmp_path / "texts", some_texts(9)
    folder.mkdir()
    append = ["prepare", str(folder), "--tokenizer", "bytes", "--out", str(tmp_path / "c"),
              "--append-eod", "--append", "--workers", "1"]  # fmt: skip
    for number in range(3):
        write_lines(folder / f"{number}.jsonl", texts[3 * number : 3 * number + 3])
        assert main(append) == 0
    whole = prepare([str(folder)], "bytes", tmp_path / "whole", 1, append_eod=True)
    assert read_corpus(tmp_path / "c") == read_corpus(tmp_path / "whole")
    before = (tmp_path / "c.idx").stat()
    assert main(append) == 0
    assert (tmp_path / "c.idx").stat() == before
    assert whole.documents == len(IndexedDataset(tmp_path / "c")) == 9


def test_what_does_not_fit_a_growing_corpus_is_refused(tmp_path: Path, capsys) -> None:
    text = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    common = ["prepare", text, "--out", str(tmp_path / "c"), "--workers", "1", "--tokenizer"]

    def refused(*words: str) -> str:
        assert main([*common, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert main([*common, "bytes"]) == 0
    assert "c.sources: missing, need a corpus that prepare --append" in refused("bytes", "--append")
    (tmp_path / "c.idx").unlink()
    assert main([*common, "bytes", "--append"]) == 0
    line = refused("bytes", "--append", "--append-eod")
    assert "--append: append_eod: True, need False, with which the corpus was made" in line
    assert "--append: tokenizer: " in refused(str(GENERAL), "--append")
    assert "--part: 1/2, need no parts" in refused("bytes", "--append", "--part", "1/2")
    write_lines(tmp_path / "a.jsonl", ["one", "two", "three"])
    assert re.search(r"input '.*a.jsonl': \d+ bytes, was \d+ when it", refused("bytes", "--append"))
